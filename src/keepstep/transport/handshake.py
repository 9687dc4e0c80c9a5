"""Mutual authentication: both sides prove that they know the run's secret before either reveals anything.

    dialer                                            listener
    HELLO    version, kind, nonce, session       ->
                                                 <-   CHALLENGE  nonce, proof
    IDENTITY own and wanted identity, proof      ->
                                                 <-   VERDICT    accepted or not, proof
    CONFIRM  kept or not, proof (control only)   ->

A proof is HMAC-SHA256 under the run's key over a label (which names role and step) and the hash of the transcript so
far: protocol version, run id, TLS binding, both nonces, both node ids and instances. So nothing of one connection can
be used on another: not reflected to its sender (labels), not replayed (nonces), not relayed to or from another node
(identities; the listener's is part of its first proof although it is never sent), not relayed through another TLS
connection (binding). An unauthenticated peer sees random bytes, and learns neither run nor node. What it sends has a
fixed size until it has authenticated, but for one length of two bytes.

The key of a data connection is the session key that a control connection agreed on, so a stream belongs to a peer.
Without TLS an attacker on the network can read everything and take over a data stream; control frames carry MACs.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from keepstep.transport.interface import Peer

VERSION = 1
CONTROL, DATA = 1, 2
# Verdicts. UNKNOWN_PEER: not a peer (yet), or another keeper than the dialer wants.
ACCEPTED, ALREADY_LINKED, UNKNOWN_PEER = 0, 1, 2
NO_SESSION = bytes(16)
HANDSHAKE_S = 5.0  # A connection that has not authenticated by then is closed.
MAX_IDENTITY_BYTES = 2048

_HELLO = struct.Struct("<4sBB2x32s16s")
_CHALLENGE = struct.Struct("<32s32s")
_LENGTH = struct.Struct("<H")
_VERDICT = struct.Struct("<B32s")
_MAGIC = b"KSPR"


class AuthError(Exception):
    """The other side failed to authenticate, or declined. The text is for our own log only."""


class PeerIdentity(msgspec.Struct, frozen=True):
    """The keeper that dials, and the one that it wants to reach."""

    node_id: str
    instance: str
    wanted_node_id: str
    wanted_instance: str


class HandshakeSocket(Protocol):
    """The part of a connection that a handshake uses."""

    def read_exact(self, size_bytes: int, *, deadline: float | None = None) -> bytes: ...

    def write(self, data: bytes, *, deadline: float | None = None) -> None: ...


@dataclass(frozen=True)
class KeeperSelf:
    """Identity of this keeper, the same in all its handshakes."""

    node_id: str
    instance: str
    run_id: str


@dataclass(frozen=True)
class SessionKeys:
    """Result of a handshake: the peer, and the keys that both sides have derived."""

    peer: Peer
    ident: bytes  # Public id of the session.
    key: bytes  # Authenticates the data connections of the session.
    from_dialer: bytes  # MACs of control frames, per direction.
    from_listener: bytes


def run_key(secret: bytes, run_id: str) -> bytes:
    """The key that authenticates the control connections of a run."""
    return hmac.digest(secret, b"keepstep peers" + run_id.encode(), "sha256")


class Handshake:
    """One handshake on one connection: the transcript, the proofs and the keys."""

    def __init__(
        self, connection: HandshakeSocket, me: KeeperSelf, kind: int, *, binding: bytes, deadline: float
    ) -> None:
        self._connection = connection
        self._me = me
        self._deadline = deadline
        self._key = self._session_key = b""
        self._transcript = hashlib.sha256()
        self.kind = kind
        self.peer = Peer("", "")
        self.session = NO_SESSION
        for part in (b"keepstep", bytes([VERSION, kind]), me.run_id.encode(), binding):
            self._transcript.update(len(part).to_bytes(4, "little") + part)

    def keys(self) -> SessionKeys:
        """The keys of the session, the same on both sides. Called after the verdict."""
        labels = (b"id", b"from dialer", b"from listener")
        ident, dialer, listener = (hmac.digest(self._session_key, label, "sha256") for label in labels)
        return SessionKeys(self.peer, ident[:16], self._session_key, dialer, listener)

    def send_confirmation(self, kept: bool) -> None:
        """Last step of the dialer: whether this connection is the one to keep."""
        verdict = bytes([ACCEPTED if kept else ALREADY_LINKED])
        self._transcript.update(verdict)
        self._connection.write(verdict + self._mac(b"dialer confirms"), deadline=self._deadline)

    def receive_confirmation(self) -> bool:
        """Last step of the listener: whether the dialer keeps this connection."""
        verdict, proof = _VERDICT.unpack(self._connection.read_exact(_VERDICT.size, deadline=self._deadline))
        self._transcript.update(bytes([verdict]))
        self._check(proof, b"dialer confirms")
        return bool(verdict == ACCEPTED)

    def _mac(self, label: bytes) -> bytes:
        return hmac.digest(self._key, label + b"\0" + self._transcript.digest(), "sha256")

    def _check(self, proof: bytes, label: bytes) -> None:
        if not hmac.compare_digest(proof, self._mac(label)):
            raise AuthError("wrong proof: another secret, another run, or another keeper than expected")


class DialingHandshake(Handshake):
    """The side that connected."""

    def authenticate(self, key: bytes, peer: Peer, session: bytes = NO_SESSION) -> None:
        """Run the handshake, or raise AuthError. On a control connection `send_confirmation` follows."""
        self._key, self.peer, self.session = key, peer, session
        hello = _HELLO.pack(_MAGIC, VERSION, self.kind, os.urandom(32), session)
        self._connection.write(hello, deadline=self._deadline)
        challenge = self._connection.read_exact(_CHALLENGE.size, deadline=self._deadline)
        nonce, proof = _CHALLENGE.unpack(challenge)
        self._transcript.update(hello + nonce)
        self._check(proof, _listener_label(peer.node_id, peer.instance))
        me = PeerIdentity(self._me.node_id, self._me.instance, peer.node_id, peer.instance)
        body = msgspec.msgpack.encode(me)
        self._transcript.update(body)
        proof = self._mac(b"dialer")
        self._connection.write(_LENGTH.pack(len(body)) + body + proof, deadline=self._deadline)
        verdict, proof = _VERDICT.unpack(self._connection.read_exact(_VERDICT.size, deadline=self._deadline))
        self._transcript.update(bytes([verdict]))
        self._check(proof, b"listener rules")
        self._session_key = self._mac(b"session")
        if verdict == ALREADY_LINKED:
            raise AuthError("the peer has a link to this keeper already")
        if verdict != ACCEPTED:
            raise AuthError("the peer does not have this keeper in its list yet")


class ListeningHandshake(Handshake):
    """The side that accepted. Sends only random bytes before the dialer has authenticated."""

    @classmethod
    def accept(
        cls,
        connection: HandshakeSocket,
        me: KeeperSelf,
        *,
        key_of: Callable[[int, bytes], bytes | None],
        binding: bytes,
        deadline: float,
    ) -> ListeningHandshake:
        """Run the handshake up to the dialer's identity. `key_of(kind, session)`: the key, or None to reject it."""
        hello = connection.read_exact(_HELLO.size, deadline=deadline)
        magic, version, kind, _, session = _HELLO.unpack(hello)
        if magic != _MAGIC or kind not in (CONTROL, DATA):
            raise AuthError("not this protocol")
        if version != VERSION:
            raise AuthError(f"version {version} of the protocol, this keeper has {VERSION}")
        key = key_of(kind, session)
        if key is None:
            raise AuthError("no such session" if kind == DATA else "this keeper has no secret yet")
        self = cls(connection, me, kind, binding=binding, deadline=deadline)
        self._key, self.session = key, session
        nonce = os.urandom(32)
        self._transcript.update(hello + nonce)
        connection.write(nonce + self._mac(_listener_label(me.node_id, me.instance)), deadline=deadline)
        self.peer = self._identity()
        return self

    def send_verdict(self, verdict: int) -> None:
        """Accept or decline the dialer, which has proved that it knows the secret."""
        self._transcript.update(bytes([verdict]))
        self._session_key = self._mac(b"session")
        self._connection.write(bytes([verdict]) + self._mac(b"listener rules"), deadline=self._deadline)

    def _identity(self) -> Peer:
        (length,) = _LENGTH.unpack(self._connection.read_exact(_LENGTH.size, deadline=self._deadline))
        if length > MAX_IDENTITY_BYTES:
            raise AuthError(f"an identity of {length} bytes")
        body = self._connection.read_exact(length, deadline=self._deadline)
        proof = self._connection.read_exact(32, deadline=self._deadline)
        self._transcript.update(body)
        self._check(proof, b"dialer")
        try:
            identity = msgspec.msgpack.decode(body, type=PeerIdentity)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise AuthError(f"bad identity: {error}") from error
        if (identity.wanted_node_id, identity.wanted_instance) != (self._me.node_id, self._me.instance):
            raise AuthError(f"wants {identity.wanted_node_id}/{identity.wanted_instance}, not this keeper")
        return Peer(identity.node_id, identity.instance)


def _listener_label(node_id: str, instance: str) -> bytes:
    parts = (node_id.encode(), instance.encode())
    return b"listener" + b"".join(_LENGTH.pack(len(part)) + part for part in parts)
