"""The transport over TCP: one control connection per pair of keepers, and a few streams per peer and direction.

    handshake.py   mutual authentication    frames.py    the wire format         connection.py  a socket with deadlines
    serve.py       listening and serving    links.py     the control thread      session.py     one link that is up
    fetch.py       fetching                 throttle.py  rate caps, counters     address.py     which address to use

Invariants:
- Nothing but the handshake is exchanged before both sides have authenticated.
- Every socket is registered before it connects, so that `close` can shut it down at any time.

Threads, all named keepstep-peer-*: `control`, `listen`, one `accept-*` per accepted connection (it goes on as `serve-*`
if that is a stream), one `dial-*` per control connection being made, one `fetch-*` per stream in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from keepstep.config import PeersConfig
from keepstep.control.secret_file import MIN_SECRET_BYTES
from keepstep.errors import ConfigError
from keepstep.transport.address import listen_on, resolve_address, socket_towards
from keepstep.transport.connection import PeerSocket, PeerSocketError, Tls, channel_binding
from keepstep.transport.fetch import PendingFetch
from keepstep.transport.handshake import (
    ACCEPTED,
    CONTROL,
    DATA,
    HANDSHAKE_S,
    UNKNOWN_PEER,
    AuthError,
    DialingHandshake,
    Handshake,
    KeeperSelf,
    ListeningHandshake,
    SessionKeys,
    run_key,
)
from keepstep.transport.interface import (
    NUM_STREAMS,
    TIMEOUT_S,
    Fetched,
    FetchRequest,
    Peer,
    TransportListener,
)
from keepstep.transport.links import PeerLinks
from keepstep.transport.serve import Listener, RequestServer
from keepstep.transport.session import PeerSession
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.throttle import Traffic

log = logging.getLogger("keepstep")


class KeeperName(Protocol):
    """Identity of this keeper: a Peer, a NodeCard, anything with these two."""

    @property
    def node_id(self) -> str: ...

    @property
    def instance(self) -> str: ...


@dataclass(frozen=True)
class TcpOptions:
    """Settings beside the configuration."""

    towards: str = ""  # With no address configured: listen on the one that leads to this host.
    # How many authenticated peers may be linked that `set_peers` has not named: replaced keepers, and keepers that
    # look for what this one holds.
    max_unlisted_peers: int = 0
    is_successor: bool = False  # This keeper listens where one that died did: it dials without giving way.
    num_streams: int = NUM_STREAMS
    timeout_s: float = TIMEOUT_S


class TcpTransport:
    """`Transport` over TCP. Listens from construction on; authenticates no peer before it has a secret."""

    def __init__(
        self,
        me: KeeperName,
        run_id: str,
        secret: bytes,
        config: PeersConfig,
        listener: TransportListener,
        *,
        options: TcpOptions = TcpOptions(),
    ) -> None:
        """`secret` may be empty: `admit` follows then."""
        self._self = KeeperSelf(me.node_id, me.instance, run_id)
        self._key: bytes | None = None
        self._traffic = Traffic(config, num_streams=options.num_streams, timeout_s=options.timeout_s)
        self._transport_listener = listener
        self._threads = ThreadGroup()
        self._closed = False
        self._lock = threading.Lock()
        self._connecting: set[PeerSocket] = set()  # Control connections: `close` shuts them down.
        self._tls = Tls.of(config)
        listening = listen_on(resolve_address(config.address, towards=options.towards), config.port)
        self._address, self._port = listening.getsockname()[:2]
        self._listener = Listener(listening, self._accept, self._threads, timeout_s=options.timeout_s)
        self._links = PeerLinks(
            me.node_id, self._traffic, listener, dialer=self,
            max_unlisted_peers=options.max_unlisted_peers, is_successor=options.is_successor,
        )  # fmt: skip
        log.info(
            "peers reach this keeper at %s port %d (peers.address = %r)%s",
            self._address, self._port, config.address, ", TLS" if self._tls else "",
        )  # fmt: skip
        try:
            if secret:
                self.admit(secret)
            self._threads.start("control", self._links.run)
            self._listener.open()
        except BaseException:
            self.close()
            listening.close()
            raise

    def card_address(self) -> tuple[str, int]:
        return self._address, self._port

    def admit(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"a secret of {len(secret)} bytes is too short: {MIN_SECRET_BYTES} at least",
                hint="head -c 32 /dev/urandom > secret; same file on all nodes",
            )
        key = run_key(secret, self._self.run_id)
        changed, self._key = self._key not in (None, key), key
        if changed:
            self._links.end_all("the secret has changed")
        self._links.start_dialling()

    def set_peers(self, peers: Sequence[Peer]) -> None:
        self._links.set_peers(peers)

    def send(self, node_id: str, message: bytes) -> bool:
        return self._links.send(node_id, message)

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        fetch = PendingFetch(request)
        session = self._links.session(request.node_id)
        if session is None:
            fetch.fail_waiting("closed" if self._closed else "the link is down", lost=True)
        else:
            session.streams.submit(fetch)
        return fetch

    def up(self, node_id: str) -> bool:
        return self._links.session(node_id) is not None

    def counters(self) -> dict[str, float]:
        num_up, num_peers = self._links.num_up()
        return self._traffic.all() | {"up": num_up, "peers": num_peers}

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in self._connecting:
                connection.shut()
        self._listener.close()
        self._links.close()
        running = self._threads.join()
        if running:
            log.warning("the transport is closed, but these threads still run: %s", ", ".join(running))

    # --- connections that this side makes -------------------------------------------------------------------------

    def start_dial(self, peer: Peer) -> None:
        """Make a control connection on a thread of its own (LinkDialer)."""
        try:
            self._threads.start(f"dial-{peer.node_id}", lambda: self._dial(peer))
        except RuntimeError as error:
            self._links.dialled(peer, str(error))

    def _dial(self, peer: Peer) -> None:
        connection: PeerSocket | None = None
        failure = "failed"
        try:
            connection = self._new_socket(peer)
            with self._lock:
                self._connecting.add(connection)
                if self._closed:
                    connection.shut()
            self._dial_control(connection, peer)
            failure = ""
        except (PeerSocketError, AuthError) as error:
            failure = str(error)
        finally:
            if connection is not None:
                with self._lock:
                    self._connecting.discard(connection)
            self._links.dialled(peer, failure)

    def _dial_control(self, connection: PeerSocket, peer: Peer) -> None:
        assert self._key is not None  # Dialling starts after `admit`.
        deadline = time.monotonic() + HANDSHAKE_S
        adopted = handed_over = False
        try:
            self._connect(connection, peer, deadline)
            binding = channel_binding(connection)
            handshake = DialingHandshake(connection, self._self, CONTROL, binding=binding, deadline=deadline)
            handshake.authenticate(self._key, peer)
            decides = self._self.node_id < peer.node_id
            if not decides:
                handshake.send_confirmation(True)
            session = self._session(connection, handshake, dialled=True)
            adopted = self._links.adopt(session)
            if decides:
                handshake.send_confirmation(adopted)
            handed_over = adopted and self._links.hand_over(session)
        except (PeerSocketError, AuthError) as error:
            if adopted:
                self._links.lose(session, str(error))
            raise
        finally:
            if not handed_over:
                connection.close()

    def new_stream(self, keys: SessionKeys) -> PeerSocket:
        """A socket for a data connection, not connected yet (StreamDialer)."""
        return self._new_socket(self._links.listed_peer(keys.peer.node_id, keys.ident))

    def connect_stream(self, connection: PeerSocket, keys: SessionKeys, deadline: float) -> None:
        """Connect a data connection with the keys of its session (StreamDialer)."""
        peer = self._links.listed_peer(keys.peer.node_id, keys.ident)
        deadline = min(deadline, time.monotonic() + HANDSHAKE_S)
        self._connect(connection, peer, deadline)
        binding = channel_binding(connection)
        handshake = DialingHandshake(connection, self._self, DATA, binding=binding, deadline=deadline)
        handshake.authenticate(keys.key, peer, keys.ident)

    def _new_socket(self, peer: Peer) -> PeerSocket:
        try:
            sock = socket_towards(peer.address, source=self._address)
        except OSError as error:
            raise PeerSocketError(f"cannot connect from {self._address}: {error.strerror}") from None
        return PeerSocket(sock, timeout_s=self._traffic.timeout_s)

    def _connect(self, connection: PeerSocket, peer: Peer, deadline: float) -> None:
        connection.connect((peer.address, peer.port), timeout_s=deadline - time.monotonic())
        if self._tls is not None:
            self._tls.secure(connection, server=False, timeout_s=deadline - time.monotonic())

    def _session(self, connection: PeerSocket, handshake: Handshake, *, dialled: bool) -> PeerSession:
        return PeerSession(
            connection, handshake.keys(),
            dialled=dialled, dialer=self, traffic=self._traffic, threads=self._threads,
        )  # fmt: skip

    # --- connections that peers make ------------------------------------------------------------------------------

    def _accept(self, connection: PeerSocket, host: str) -> None:
        """Authenticate a connection, and use it until it ends or becomes a link."""
        is_link = False
        try:
            is_link = self._authenticate(connection)
        except (PeerSocketError, AuthError) as error:
            if not self._closed:
                self._traffic.counters.add("strangers")
                self._listener.log_rejected(host, str(error))
        finally:
            if not is_link:
                connection.close()

    def _authenticate(self, connection: PeerSocket) -> bool:
        """True when the connection has become a link: the control thread closes it then."""
        deadline = time.monotonic() + HANDSHAKE_S
        if self._tls is not None:
            self._tls.secure(connection, server=True, timeout_s=HANDSHAKE_S)
        handshake = ListeningHandshake.accept(
            connection, self._self, key_of=self._key_of, binding=channel_binding(connection), deadline=deadline
        )
        if handshake.kind == DATA:
            self._serve_stream(connection, handshake)
            return False
        verdict = self._links.verdict(handshake.peer)
        handshake.send_verdict(verdict)
        if verdict != ACCEPTED or not handshake.receive_confirmation():
            return False
        session = self._session(connection, handshake, dialled=False)
        return self._links.adopt(session) and self._links.hand_over(session)

    def _serve_stream(self, connection: PeerSocket, handshake: ListeningHandshake) -> None:
        peer, session = handshake.peer, self._links.session_by(handshake.session)
        if session is None or not session.is_of(peer) or not session.add_served_stream(connection):
            handshake.send_verdict(UNKNOWN_PEER)
            return
        try:
            handshake.send_verdict(ACCEPTED)
            self._listener.authenticated(connection)
            threading.current_thread().name = f"keepstep-peer-serve-{peer.node_id}"
            RequestServer(session, self._transport_listener, self._traffic).run(connection)
        finally:
            session.remove_served_stream(connection)

    def _key_of(self, kind: int, ident: bytes) -> bytes | None:
        """The key for the handshake of a connection: the run's, or that of the session a stream belongs to."""
        if kind == CONTROL:
            return self._key
        session = self._links.session_by(ident)
        return session.keys.key if session is not None else None
