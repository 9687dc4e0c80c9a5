"""Which peers there are, and the one control connection to each. One thread reads, writes, beats and decides.

Invariants:
- at most one session per peer: of the instance we were told of, or of a newer one that has proved itself (a guest);
- both sides may dial; the one with the smaller node id decides which connection is kept, and keeps the one it has;
- a session ends by silence (`dead_s`), by its connection, by `meet`, or by `close`; its streams end with it;
- callbacks are called by this thread only: down before up, messages in between.

What is read is looked at before the clock is, so a keeper that was itself stopped for a while does not take everybody
else for silent.
"""

from __future__ import annotations

import logging
import math
import os
import random
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from keepstep.transport.connection import PeerSocketError
from keepstep.transport.frames import GOODBYE, HEARTBEAT, MESSAGE, PeerFrameError
from keepstep.transport.handshake import NOT_NOW, STRANGER, WELCOME
from keepstep.transport.interface import MAX_MESSAGE_BYTES, OnLink, OnMessage, Peer
from keepstep.transport.session import PeerSession
from keepstep.transport.traffic import Traffic

log = logging.getLogger("keepstep")
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
"""a peer that comes back is met again within this, give or take half"""
GIVE_WAY_S = 0.3
"""head start of the side whose connection would be kept"""
MAX_DIALS = 32
"""connections that are being made at once"""
BEATS = 4
"""heartbeats within `dead_s`"""


@dataclass
class _KnownPeer:
    """A peer and how far we are with it."""

    peer: Peer
    dial_at: float
    session: PeerSession | None = None
    dialling: bool = False
    retry_s: float = FIRST_RETRY_S
    met: bool = False
    complaint: str = ""


class PeerLinks:
    """The peers, their sessions, and the control thread (`run`)."""

    def __init__(
        self,
        node_id: str,
        traffic: Traffic,
        *,
        dial: Callable[[Peer], None],
        on_message: OnMessage,
        on_link: OnLink,
        max_guests: int,
    ) -> None:
        """`max_guests`: authenticated peers that are let in although `meet` has not named them."""
        self._max_guests = max_guests
        self._node_id = node_id
        self._traffic = traffic
        self._dial = dial
        self._on_message = on_message
        self._on_link = on_link
        self._lock = threading.Lock()
        self._known: dict[str, _KnownPeer] = {}
        self._arrived: list[PeerSession] = []
        self._ended: list[tuple[PeerSession, str]] = []
        """to be ended by the control thread, and why: what ends with them may call back, so no lock is held then"""
        self._live: dict[str, PeerSession] = {}
        """sessions that were reported up, by node id; the control thread's own"""
        self._may_dial = False
        self._closing = False
        self._wake_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)

    # --- for any thread -------------------------------------------------------------------------------------------

    def meet(self, peers: Sequence[Peer]) -> None:
        wanted = {peer.node_id: peer for peer in peers if peer.node_id != self._node_id}
        with self._lock:
            for node_id, known in list(self._known.items()):
                said = wanted.get(node_id)
                if said is not None and not known.peer.address and said.instance == known.peer.instance:
                    known.peer = said  # a guest, and now we know where it lives
                if said != known.peer:
                    why = "replaced by another instance or address" if node_id in wanted else "no longer a peer"
                    self._part(known, why)
                    del self._known[node_id]
            for node_id, peer in wanted.items():
                if node_id not in self._known:
                    self._known[node_id] = _KnownPeer(peer, self._next_dial(node_id, 0.0))
        self.wake()

    def start_dialling(self) -> None:
        with self._lock:
            self._may_dial = True
        self.wake()

    def part_all(self, why: str) -> None:
        with self._lock:
            for known in self._known.values():
                self._part(known, why)
        self.wake()

    def session(self, node_id: str) -> PeerSession | None:
        with self._lock:
            known = self._known.get(node_id)
            return known.session if known is not None else None

    def session_by(self, ident: bytes) -> PeerSession | None:
        with self._lock:
            return next((k.session for k in self._known.values() if k.session and k.session.ident == ident), None)

    def peer_of(self, session: PeerSession) -> Peer:
        """The peer as `meet` named it, with its address; the one of the handshake has none."""
        with self._lock:
            known = self._known.get(session.peer.node_id)
            if known is None or known.session is not session:
                raise PeerSocketError("the link is down")
            return known.peer

    def send(self, node_id: str, message: bytes) -> bool:
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long: {MAX_MESSAGE_BYTES} at most")
        session = self.session(node_id)
        if session is None or not session.send(MESSAGE, message):
            self._traffic.counters.add("messages_dropped")
            return False
        self._traffic.counters.add("messages_out")
        self.wake()
        return True

    def ruling(self, peer: Peer) -> int:
        """Whether a connection from that peer would be welcome now."""
        with self._lock:
            known = self._known.get(peer.node_id)
            if self._closing:
                return STRANGER
            if known is None or known.peer.instance != peer.instance:
                return WELCOME if self._has_room(peer) else STRANGER
            return NOT_NOW if known.session is not None and self._decides(peer.node_id) else WELCOME

    def adopt(self, session: PeerSession) -> bool:
        """Make it the link to its peer, unless we decide and have one. Nothing is sent on it before `ready`."""
        node_id = session.peer.node_id
        with self._lock:
            if self._closing:
                return False
            known = self._known.get(node_id)
            if known is None or known.peer.instance != session.peer.instance:
                if not self._has_room(session.peer):
                    return False
                known = self._take_in(session.peer)
            if known.session is not None:
                if self._decides(node_id):
                    return False
                self._part(known, "the peer chose another connection")
            known.session, known.retry_s, known.complaint = session, FIRST_RETRY_S, ""
            self._traffic.counters.add("links")
            self._traffic.counters.add("reconnects", int(known.met))
            known.met = True
        return True

    def _has_room(self, peer: Peer) -> bool:
        guests = sum(not known.peer.address for node_id, known in self._known.items() if node_id != peer.node_id)
        return peer.node_id != self._node_id and guests < self._max_guests

    def _take_in(self, peer: Peer) -> _KnownPeer:
        """It has proved that it is of this run, and nobody has told us of it: it took another keeper's place, or it
        looks for what we hold of an incarnation before. It may ask; we know no address to dial."""
        before = self._known.get(peer.node_id)
        if before is not None:
            self._part(before, "another instance took its place")
        self._known[peer.node_id] = known = _KnownPeer(Peer(peer.node_id, peer.instance), math.inf)
        return known

    def ready(self, session: PeerSession) -> bool:
        """The handshake is through: the connection is the control thread's now. False: it has ended, close it."""
        with self._lock:
            if session.why:
                return False
            session.handed_over = True
            self._arrived.append(session)
        self.wake()
        return True

    def lose(self, session: PeerSession, why: str) -> None:
        with self._lock:
            known = self._known.get(session.peer.node_id)
            if known is not None and known.session is session:
                known.dial_at = self._next_dial(session.peer.node_id, FIRST_RETRY_S)
                self._part(known, why)
                if not known.peer.address:
                    del self._known[session.peer.node_id]
        # Otherwise what replaced it, or `meet`, has put it on the list already.
        self.wake()

    def dialled(self, peer: Peer, complaint: str) -> None:
        """An attempt is over; with a complaint it has failed."""
        with self._lock:
            known = self._known.get(peer.node_id)
            if known is None or known.peer != peer:
                return
            known.dialling = False
            if complaint:
                known.dial_at = self._next_dial(peer.node_id, known.retry_s)
                known.retry_s = min(LAST_RETRY_S, known.retry_s * 2)
                fresh, known.complaint = complaint != known.complaint, complaint
                if fresh and known.session is None:
                    log.info("no link to %s at %s:%d yet: %s", peer.node_id, peer.address, peer.port, complaint)
        self.wake()

    def num_up(self) -> tuple[int, int]:
        with self._lock:
            return sum(known.session is not None for known in self._known.values()), len(self._known)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self.wake()

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._wake_fd, 1)

    def _decides(self, node_id: str) -> bool:
        return self._node_id < node_id

    def _next_dial(self, node_id: str, wait_s: float) -> float:
        give_way_s = 0.0 if self._decides(node_id) else GIVE_WAY_S
        return time.monotonic() + wait_s * random.uniform(0.5, 1.5) + give_way_s

    def _part(self, known: _KnownPeer, why: str) -> None:
        session, known.session = known.session, None
        if session is not None:
            self._ended.append((session, why))

    # --- the control thread ---------------------------------------------------------------------------------------

    def run(self) -> None:
        look_s, look_at = self._traffic.config.dead_s / BEATS / 4, 0.0
        try:
            while not self._closing:
                for key, events in self._selector.select(self._nap_s(look_s)):
                    if key.data is None:
                        os.eventfd_read(self._wake_fd)
                    elif events & selectors.EVENT_READ:
                        self._guard(key.data, self._hear)
                if self._closing:
                    break
                self._report()
                now = time.monotonic()
                # With a thousand peers somebody is heard every millisecond: not a reason to look after all others.
                if now >= look_at:
                    look_at = now + look_s
                    for session in list(self._live.values()):
                        self._guard(session, self._tend)
                for session in [session for session in self._live.values() if session.wants_to_send]:
                    self._guard(session, self._flush)
                self._start_dials(now)
        finally:
            self._shut_down()

    def _nap_s(self, longest_s: float) -> float:
        with self._lock:
            waiting = [k.dial_at for k in self._known.values() if k.session is None and not k.dialling]
            if self._arrived or self._ended:
                return 0.0
        soonest = min(waiting, default=float("inf")) - time.monotonic() if self._may_dial else longest_s
        return max(0.001, min(longest_s, soonest))

    def _hear(self, session: PeerSession) -> None:
        try:
            frames = session.read()
        except (OSError, PeerFrameError) as error:
            self.lose(session, str(error))
            return
        for kind, body in frames:
            if session.why:
                return
            if kind == MESSAGE:
                self._traffic.counters.add("messages_in")
                self._call(lambda: self._on_message(session.peer.node_id, body))  # noqa: B023
            elif kind == GOODBYE:
                self.lose(session, "the peer closed its end")

    def _guard(self, session: PeerSession, work: Callable[[PeerSession], None]) -> None:
        """A fault of ours costs one link, not the thread that all of them live on."""
        try:
            work(session)
        except Exception as error:
            log.exception("the link to %s failed", session.peer.node_id)
            self.lose(session, f"a fault here: {type(error).__name__}")

    def _tend(self, session: PeerSession) -> None:
        """Say that we are here, and see whether the peer still is."""
        if session.why:
            return
        now = time.monotonic()
        silent_s = now - session.heard_at
        if silent_s > self._traffic.config.dead_s:
            self.lose(session, f"silent for {silent_s:.1f} s")
            return
        if now - session.spoke_at >= self._traffic.config.dead_s / BEATS:
            session.send(HEARTBEAT)
        if session.streams is not None:
            session.streams.expire(now)

    def _flush(self, session: PeerSession) -> None:
        """Send what waits; be woken when there is room for the rest."""
        if session.why:
            return
        try:
            session.flush()
        except OSError as error:
            self.lose(session, error.strerror or str(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.wants_to_send else 0)
        if self._selector.get_key(session.wire.sock).events != interest:
            self._selector.modify(session.wire.sock, interest, session)

    def _report(self) -> None:
        """Tell the keeper of links that went and came, in that order."""
        with self._lock:
            ended, self._ended = self._ended, []
            arrived, self._arrived = self._arrived, []
        for session, why in ended:
            session.end(why)
            node_id = session.peer.node_id
            if self._live.get(node_id) is session:
                del self._live[node_id]
                self._selector.unregister(session.wire.sock)
                self._tell(session, False, why)
            self._close(session)
        for session in arrived:
            if session.why:
                continue  # came and went before it was told of
            session.wire.sock.setblocking(False)
            self._selector.register(session.wire.sock, selectors.EVENT_READ, session)
            self._live[session.peer.node_id] = session
            self._tell(session, True, "connected" if session.dialled else "accepted")
            self._guard(session, self._hear)  # TLS may have read ahead

    def _close(self, session: PeerSession) -> None:
        with self._lock:
            ours = session.handed_over
        if ours:
            session.wire.close()
        # Otherwise the thread that shakes hands on it finds out by `ready`.

    def _tell(self, session: PeerSession, up: bool, reason: str) -> None:
        log.info("link to %s is %s: %s", session.peer.node_id, "up" if up else "down", reason)
        self._call(lambda: self._on_link(session.peer.node_id, up, reason))

    def _call(self, callback: Callable[[], None]) -> None:
        if self._closing:
            return
        try:
            callback()
        except Exception:
            log.exception("a callback of the peers failed")

    def _start_dials(self, now: float) -> None:
        due: list[Peer] = []
        with self._lock:
            if not self._may_dial:
                return
            room = MAX_DIALS - sum(known.dialling for known in self._known.values())
            ripe = [k for k in self._known.values() if k.session is None and not k.dialling and k.dial_at <= now]
            for known in sorted(ripe, key=lambda known: known.dial_at)[: max(0, room)]:
                known.dialling = True
                due.append(known.peer)
        for peer in due:
            self._dial(peer)

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = True
            for known in self._known.values():
                self._part(known, "closed")
            gone, self._ended, self._arrived = self._ended, [], []
        for session, why in gone:
            if session in self._live.values():
                session.send(GOODBYE)
                with suppress(OSError):
                    session.flush()
            session.end(why)
            self._close(session)
        self._live.clear()
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
