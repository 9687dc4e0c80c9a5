"""Who is there? Both sides prove that they know the run's secret before either says anything.

    dialer                                            listener
    HELLO    version, kind, nonce, session       ->
                                                 <-   CHALLENGE  nonce, proof
    IDENTITY who I am, whom I mean, proof        ->
                                                 <-   VERDICT    welcome or not, proof
    CONFIRM  kept or not, proof (control only)   ->

A proof is HMAC-SHA256 under the run's key over a label (which names role and step) and the hash of everything said so
far: protocol version, run id, TLS binding, both nonces, both node ids and instances. So nothing of one connection is
worth anything on another: not reflected to its sender (labels), not replayed (nonces), not relayed to or from another
node (identities; the listener's stands in its first proof although it is never sent), not relayed through another TLS
connection (binding). A stranger sees random bytes, and neither run nor node until it has proved itself; what it sends
is of fixed size until then, but for one length of two bytes.

The key of a data connection is the session key that a control connection agreed on, so a stream belongs to a peer.
Without TLS somebody on the wire can read everything and take over a data stream; control frames carry MACs.
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
WELCOME, NOT_NOW, STRANGER = 0, 1, 2
"""verdicts: come in; there is a link already; not one of my peers (yet), or not whom you mean"""
NO_SESSION = bytes(16)
HANDSHAKE_S = 5.0
"""a connection that has not authenticated by then is closed"""
MIN_SECRET_BYTES = 16
MAX_IDENTITY_BYTES = 2048

_HELLO = struct.Struct("<4sBB2x32s16s")
_CHALLENGE = struct.Struct("<32s32s")
_LENGTH = struct.Struct("<H")
_RULING = struct.Struct("<B32s")
_MAGIC = b"KSPR"


class AuthError(Exception):
    """The other side is not whom it should be, or does not want us. Says which, for our own log only."""


class PeerIdentity(msgspec.Struct, frozen=True):
    """Who dials, and whom it means."""

    node_id: str
    instance: str
    wanted_node_id: str
    wanted_instance: str


class HandshakeSocket(Protocol):
    """What a handshake needs of a connection."""

    def read_exact(self, size_bytes: int, *, deadline: float | None = None) -> bytes: ...

    def write(self, data: bytes, *, deadline: float | None = None) -> None: ...


@dataclass(frozen=True)
class KeeperSelf:
    """What stays the same over all handshakes of one keeper."""

    node_id: str
    instance: str
    run_id: str


def run_key(secret: bytes, run_id: str) -> bytes:
    return hmac.digest(secret, b"keepstep peers" + run_id.encode(), "sha256")


class Handshake:
    """A handshake under way, and, when it is through, the keys that came of it."""

    def __init__(self, line: HandshakeSocket, me: KeeperSelf, kind: int, *, binding: bytes, deadline: float) -> None:
        self._line = line
        self._me = me
        self._deadline = deadline
        self._key = self._session_key = b""
        self._said = hashlib.sha256()
        self.kind = kind
        self.peer = Peer("", "")
        self.session = NO_SESSION
        for part in (b"keepstep", bytes([VERSION, kind]), me.run_id.encode(), binding):
            self._said.update(len(part).to_bytes(4, "little") + part)

    def keys(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Session id (public), session key, and the keys for frames from the dialer and from the listener."""
        session_key = self._session_key
        labels = (b"id", b"from dialer", b"from listener")
        ident, dialer, listener = (hmac.digest(session_key, label, "sha256") for label in labels)
        return ident[:16], session_key, dialer, listener

    def confirm(self, kept: bool) -> None:
        """The dialer's last word: whether this connection is the one to keep."""
        ruling = bytes([WELCOME if kept else NOT_NOW])
        self._said.update(ruling)
        self._line.write(ruling + self._mac(b"dialer confirms"), deadline=self._deadline)

    def confirmed(self) -> bool:
        ruling, proof = _RULING.unpack(self._line.read_exact(_RULING.size, deadline=self._deadline))
        self._said.update(bytes([ruling]))
        self._check(proof, b"dialer confirms")
        return bool(ruling == WELCOME)

    def _mac(self, label: bytes) -> bytes:
        return hmac.digest(self._key, label + b"\0" + self._said.digest(), "sha256")

    def _check(self, proof: bytes, label: bytes) -> None:
        if not hmac.compare_digest(proof, self._mac(label)):
            raise AuthError("wrong proof: another secret, another run, or not whom we mean")


class DialingHandshake(Handshake):
    """The side that connected."""

    def shake(self, key: bytes, peer: Peer, session: bytes = NO_SESSION) -> None:
        """Through, or AuthError. For control, `confirm` is still to be said."""
        self._key, self.peer, self.session = key, peer, session
        hello = _HELLO.pack(_MAGIC, VERSION, self.kind, os.urandom(32), session)
        self._line.write(hello, deadline=self._deadline)
        challenge = self._line.read_exact(_CHALLENGE.size, deadline=self._deadline)
        nonce, proof = _CHALLENGE.unpack(challenge)
        self._said.update(hello + nonce)
        self._check(proof, _listener_label(peer.node_id, peer.instance))
        me = PeerIdentity(self._me.node_id, self._me.instance, peer.node_id, peer.instance)
        body = msgspec.msgpack.encode(me)
        self._said.update(body)
        proof = self._mac(b"dialer")
        self._line.write(_LENGTH.pack(len(body)) + body + proof, deadline=self._deadline)
        ruling, proof = _RULING.unpack(self._line.read_exact(_RULING.size, deadline=self._deadline))
        self._said.update(bytes([ruling]))
        self._check(proof, b"listener rules")
        self._session_key = self._mac(b"session")
        if ruling != WELCOME:
            raise AuthError("it has a link to us already" if ruling == NOT_NOW else "it does not know us as a peer yet")


class ListeningHandshake(Handshake):
    """The side that was connected to. Says nothing but random bytes before the other has proved itself."""

    @classmethod
    def hear(
        cls,
        line: HandshakeSocket,
        me: KeeperSelf,
        *,
        key_of: Callable[[int, bytes], bytes | None],
        binding: bytes,
        deadline: float,
    ) -> ListeningHandshake:
        """Up to the identity. `key_of(kind, session)` is the key to use, None to end it here."""
        hello = line.read_exact(_HELLO.size, deadline=deadline)
        magic, version, kind, _, session = _HELLO.unpack(hello)
        if magic != _MAGIC or kind not in (CONTROL, DATA):
            raise AuthError("does not speak this protocol")
        if version != VERSION:
            raise AuthError(f"speaks version {version} of the protocol, this keeper {VERSION}")
        key = key_of(kind, session)
        if key is None:
            raise AuthError("no such session" if kind == DATA else "this keeper has no secret yet")
        self = cls(line, me, kind, binding=binding, deadline=deadline)
        self._key, self.session = key, session
        nonce = os.urandom(32)
        self._said.update(hello + nonce)
        line.write(nonce + self._mac(_listener_label(me.node_id, me.instance)), deadline=deadline)
        self.peer = self._identity()
        return self

    def rule(self, ruling: int) -> None:
        """Say whether it is welcome; it is known to hold the secret by now."""
        self._said.update(bytes([ruling]))
        self._session_key = self._mac(b"session")
        self._line.write(bytes([ruling]) + self._mac(b"listener rules"), deadline=self._deadline)

    def _identity(self) -> Peer:
        (length,) = _LENGTH.unpack(self._line.read_exact(_LENGTH.size, deadline=self._deadline))
        if length > MAX_IDENTITY_BYTES:
            raise AuthError(f"an identity of {length} bytes")
        body = self._line.read_exact(length, deadline=self._deadline)
        proof = self._line.read_exact(32, deadline=self._deadline)
        self._said.update(body)
        self._check(proof, b"dialer")
        try:
            identity = msgspec.msgpack.decode(body, type=PeerIdentity)
        except (msgspec.DecodeError, ValueError) as error:
            raise AuthError(f"bad identity: {error}") from error
        if (identity.wanted_node_id, identity.wanted_instance) != (self._me.node_id, self._me.instance):
            raise AuthError(f"means {identity.wanted_node_id}/{identity.wanted_instance}, not this keeper")
        return Peer(identity.node_id, identity.instance)


def _listener_label(node_id: str, instance: str) -> bytes:
    node, inst = node_id.encode(), instance.encode()
    return b"listener" + _LENGTH.pack(len(node)) + node + _LENGTH.pack(len(inst)) + inst
