"""Keepers over TCP: a control connection per pair, a few streams per peer and direction, nothing before the proof.

    auth.py      who is there            frames.py    what lies on a connection     wire.py   a socket with deadlines
    door.py      listening               links.py     the control thread            session.py  one link that is up
    streams.py   fetching                serving.py   giving                        rate.py   caps and counters

Threads, all named keepstep-peer-*: `control`, `door`, one `greet-*` per connection that was accepted (it goes on as
`serve-*` if that is a stream), one `dial-*` per connection being made, one `fetch-*` per stream in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from keepstep.config import PeersConfig
from keepstep.errors import ConfigError
from keepstep.transport.address import listen_on, resolve_address, socket_towards
from keepstep.transport.connection import PeerSocket, PeerSocketError
from keepstep.transport.door import Listener
from keepstep.transport.fetch import PendingFetch
from keepstep.transport.handshake import (
    CONTROL,
    DATA,
    HANDSHAKE_S,
    MIN_SECRET_BYTES,
    STRANGER,
    WELCOME,
    AuthError,
    DialingHandshake,
    KeeperSelf,
    ListeningHandshake,
    run_key,
)
from keepstep.transport.interface import NUM_STREAMS, TIMEOUT_S, Fetched, FetchRequest, OnLink, OnMessage, Peer, Serve
from keepstep.transport.links import PeerLinks
from keepstep.transport.serve import RequestServer
from keepstep.transport.session import PeerSession
from keepstep.transport.streams import FetchStreams
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.tls import Tls, channel_binding
from keepstep.transport.traffic import Traffic

log = logging.getLogger("keepstep")


class KeeperName(Protocol):
    """Who this keeper is: a Peer, a NodeCard, anything with these two."""

    @property
    def node_id(self) -> str: ...

    @property
    def instance(self) -> str: ...


class TcpTransport:
    """`Peers` over TCP. Listens from construction on; authenticates nobody before it has a secret."""

    def __init__(
        self,
        me: KeeperName,
        run_id: str,
        secret: bytes,
        config: PeersConfig,
        *,
        on_message: OnMessage,
        on_link: OnLink,
        serve: Serve,
        towards: str = "",
        max_guests: int = 0,
        num_streams: int = NUM_STREAMS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`secret` may be empty: `admit` comes later. `towards`: with no address set, the one that leads there.

        `max_guests`: how many authenticated peers may come that `meet` has not named, or another instance of one
        that it has: a keeper that took another one's place, or one that looks for what we hold.
        """
        self._self = KeeperSelf(me.node_id, me.instance, run_id)
        self._key: bytes | None = None
        self._traffic = Traffic(config, num_streams=num_streams, timeout_s=timeout_s)
        self._serve = serve
        self._crew = ThreadGroup()
        self._closed = False
        self._lock = threading.Lock()
        self._making: set[PeerSocket] = set()
        """control connections that are being made, so that `close` need not wait for them"""
        self._tls = Tls.of(config)
        listener = listen_on(resolve_address(config.address, towards=towards), config.port)
        self._address, self._port = listener.getsockname()[:2]
        self._door = Listener(listener, self._greet, self._crew, timeout_s=timeout_s)
        self._links = PeerLinks(
            me.node_id, self._traffic, dial=self._start_dial, on_message=on_message, on_link=on_link,
            max_guests=max_guests,
        )  # fmt: skip
        log.info(
            "peers reach this keeper at %s port %d (peers.address = %r)%s",
            self._address, self._port, config.address, ", TLS" if self._tls else "",
        )  # fmt: skip
        try:
            if secret:
                self.admit(secret)
            self._crew.start("control", self._links.run)
            self._door.open()
        except BaseException:
            self.close()
            listener.close()
            raise

    def card_address(self) -> tuple[str, int]:
        """Where peers reach us."""
        return self._address, self._port

    def admit(self, secret: bytes) -> None:
        """From now on peers are authenticated with this secret. Links made with another one end."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"a secret of {len(secret)} bytes is too short: {MIN_SECRET_BYTES} at least",
                hint="head -c 32 /dev/urandom > secret; same file on all nodes",
            )
        key = run_key(secret, self._self.run_id)
        changed, self._key = self._key not in (None, key), key
        if changed:
            self._links.part_all("another secret")
        self._links.start_dialling()

    def meet(self, peers: Sequence[Peer]) -> None:
        self._links.meet(peers)

    def send(self, node_id: str, message: bytes) -> bool:
        return self._links.send(node_id, message)

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        fetch = PendingFetch(request)
        session = self._links.session(request.node_id)
        if session is None or session.streams is None:
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
            for wire in self._making:
                wire.shut()
        self._door.close()
        self._links.close()
        left = self._crew.join()
        if left:
            log.warning("closed, but these do not return: %s", ", ".join(left))

    # --- connections we make --------------------------------------------------------------------------------------

    def _start_dial(self, peer: Peer) -> None:
        try:
            self._crew.start(f"dial-{peer.node_id}", lambda: self._dial_control(peer))
        except RuntimeError as error:
            self._links.dialled(peer, str(error))

    def _dial_control(self, peer: Peer) -> None:
        made: list[PeerSocket] = []
        complaint = "failed"
        try:
            complaint = self._try_control(peer, made)
        except (PeerSocketError, AuthError) as error:
            complaint = str(error)
        finally:
            with self._lock:
                self._making.difference_update(made)
            self._links.dialled(peer, complaint)

    def _being_made(self, made: list[PeerSocket], wire: PeerSocket) -> None:
        made.append(wire)
        with self._lock:
            self._making.add(wire)
            if self._closed:
                wire.shut()

    def _try_control(self, peer: Peer, made: list[PeerSocket]) -> str:
        assert self._key is not None  # nobody dials before `admit`
        deadline = time.monotonic() + HANDSHAKE_S
        wire = self._connect(peer, deadline, partial(self._being_made, made))
        kept = handed_over = False
        try:
            dialing = DialingHandshake(wire, self._self, CONTROL, binding=channel_binding(wire), deadline=deadline)
            dialing.shake(self._key, peer)
            decides = self._self.node_id < peer.node_id
            if not decides:
                dialing.confirm(True)
            session = self._session(wire, dialing, dialled=True)
            kept = self._links.adopt(session)
            if decides:
                dialing.confirm(kept)
            handed_over = kept and self._links.ready(session)
        except (PeerSocketError, AuthError) as error:
            if kept:
                self._links.lose(session, str(error))
            raise
        finally:
            if not handed_over:
                wire.close()
        return ""

    def _connect(self, peer: Peer, deadline: float, show: Callable[[PeerSocket], None]) -> PeerSocket:
        """Shown before anything is waited for, so that it can be stopped. Closed here if it fails."""
        try:
            sock = socket_towards(peer.address, source=self._address)
        except OSError as error:
            raise PeerSocketError(f"cannot connect from {self._address}: {error.strerror}") from None
        wire = PeerSocket(sock, timeout_s=self._traffic.timeout_s)
        show(wire)
        try:
            wire.connect((peer.address, peer.port), timeout_s=deadline - time.monotonic())
            if self._tls is not None:
                self._tls.secure(wire, server=False, timeout_s=deadline - time.monotonic())
        except BaseException:
            wire.close()
            raise
        return wire

    def _session(
        self, wire: PeerSocket, agreement: DialingHandshake | ListeningHandshake, *, dialled: bool
    ) -> PeerSession:
        session = PeerSession(wire, agreement, dialled=dialled)

        def dial(deadline: float, show: Callable[[PeerSocket], None]) -> PeerSocket:
            return self._dial_data(session, deadline, show)

        session.streams = FetchStreams(session.peer.node_id, dial, self._traffic, self._crew)
        return session

    def _dial_data(self, session: PeerSession, deadline: float, show: Callable[[PeerSocket], None]) -> PeerSocket:
        peer = self._links.peer_of(session)
        deadline = min(deadline, time.monotonic() + HANDSHAKE_S)
        wire = self._connect(peer, deadline, show)
        try:
            dialing = DialingHandshake(wire, self._self, DATA, binding=channel_binding(wire), deadline=deadline)
            dialing.shake(session.key, peer, session.ident)
        except BaseException:
            wire.close()
            raise
        return wire

    # --- connections made to us -----------------------------------------------------------------------------------

    def _greet(self, wire: PeerSocket, host: str, proved: Callable[[], None]) -> None:
        keep = False
        try:
            keep = self._welcome(wire, proved)
        except (PeerSocketError, AuthError) as error:
            if not self._closed:
                self._traffic.counters.add("strangers")
                self._door.turned_away(host, str(error))
        finally:
            if not keep:
                wire.close()

    def _welcome(self, wire: PeerSocket, proved: Callable[[], None]) -> bool:
        """True when the connection has become a link: the control thread closes it then."""
        deadline = time.monotonic() + HANDSHAKE_S
        if self._tls is not None:
            self._tls.secure(wire, server=True, timeout_s=HANDSHAKE_S)
        heard = ListeningHandshake.hear(
            wire, self._self, key_of=self._key_of, binding=channel_binding(wire), deadline=deadline
        )
        if heard.kind == DATA:
            self._welcome_stream(wire, heard, proved)
            return False
        ruling = self._links.ruling(heard.peer)
        heard.rule(ruling)
        if ruling != WELCOME or not heard.confirmed():
            return False
        session = self._session(wire, heard, dialled=False)
        return self._links.adopt(session) and self._links.ready(session)

    def _welcome_stream(self, wire: PeerSocket, heard: ListeningHandshake, proved: Callable[[], None]) -> None:
        session = self._links.session_by(heard.session)
        if session is None or not session.is_of(heard.peer) or not session.admit(wire):
            heard.rule(STRANGER)
            return
        try:
            heard.rule(WELCOME)
            proved()
            threading.current_thread().name = f"keepstep-peer-serve-{heard.peer.node_id}"
            RequestServer(heard.peer.node_id, self._serve, self._traffic, lambda: bool(session.why)).run(wire)
        finally:
            session.leave(wire)

    def _key_of(self, kind: int, ident: bytes) -> bytes | None:
        if kind == CONTROL:
            return self._key
        session = self._links.session_by(ident)
        return session.key if session is not None else None
