"""The peers of this keeper and the one control connection to each, served by one thread.

Invariants:
- At most one session per peer: of the instance that `set_peers` named, or of another one that has authenticated (an
  unlisted peer). A link that is up is not displaced by another instance: it ends by silence first, or by `set_peers`.
- Both sides may dial. The side with the smaller node id decides which connection is kept, and keeps the one it has.
- A session ends by silence (`dead_s`), by its connection, by `set_peers`, or by `close`. Its streams end with it.
- Only the control thread calls the handlers: down before up, messages in between.
- Received data is processed before the clock is checked, so that a keeper that was itself stopped for a while does not
  take all others for silent.
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
from typing import Protocol

from keepstep.transport.connection import PeerSocketError
from keepstep.transport.frames import GOODBYE, HEARTBEAT, MESSAGE, PeerFrameError
from keepstep.transport.handshake import ACCEPTED, ALREADY_LINKED, UNKNOWN_PEER
from keepstep.transport.interface import MAX_MESSAGE_BYTES, InvalidMessageError, Peer, TransportListener
from keepstep.transport.session import FIRST_RETRY_S, LinkState, PeerSession
from keepstep.transport.throttle import Traffic

log = logging.getLogger("keepstep")
LAST_RETRY_S = 1.0  # A peer that returns is linked again within this time, plus or minus half.
GIVE_WAY_S = 0.3  # Head start of the side whose connection would be kept.
MAX_DIALS = 32  # at the same time
HEARTBEATS = 4  # within `dead_s`
SHORTEST_SLEEP_S = 0.001
MAX_INVALID_MESSAGES = 20  # over one link: one keeper of another version is no attack


class LinkDialer(Protocol):
    """Makes control connections, each on a thread of its own, and reports the end to `PeerLinks.dialled`."""

    def start_dial(self, peer: Peer) -> None: ...


class PeerLinks:
    """All peers, their sessions, and the control thread (`run`)."""

    def __init__(
        self,
        node_id: str,
        traffic: Traffic,
        listener: TransportListener,
        *,
        dialer: LinkDialer,
        max_unlisted_peers: int,
        is_successor: bool = False,
    ) -> None:
        """`max_unlisted_peers`: how many authenticated peers may be linked that `set_peers` has not named.

        `is_successor`: this keeper listens where one that died did. Its peers were refused there and dial seldom by
        now, so the first peers are dialled without giving way.
        """
        self._max_unlisted_peers = max_unlisted_peers
        self._gives_way = not is_successor
        self._node_id = node_id
        self._traffic = traffic
        self._dialer = dialer
        self._listener = listener
        self._lock = threading.Lock()
        self._links: dict[str, LinkState] = {}
        self._arrived: list[PeerSession] = []
        # Sessions that the control thread ends, and why. Not ended at once: ending them calls back, and needs no lock.
        self._ended: list[tuple[PeerSession, str]] = []
        # Sessions that were reported up, by node id. Used by the control thread only.
        self._live: dict[str, PeerSession] = {}
        self._may_dial = False
        self._closing = False
        self._wake_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)

    # --- for any thread -------------------------------------------------------------------------------------------

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Replace the list of peers: see `Transport.set_peers`."""
        wanted = {peer.node_id: peer for peer in peers if peer.node_id != self._node_id}
        with self._lock:
            for node_id, link in list(self._links.items()):
                peer = wanted.get(node_id)
                if peer is not None and not link.peer.address and peer.instance == link.peer.instance:
                    link.peer = link.named = peer  # It was unlisted, and its address is known now.
                if peer != link.peer:
                    reason = "replaced by another instance or address" if node_id in wanted else "no longer a peer"
                    self._end_session(link, reason)
                    del self._links[node_id]
            for node_id, peer in wanted.items():
                if node_id not in self._links:
                    dial_at = self._next_dial(node_id, 0.0) if self._gives_way else time.monotonic()
                    self._links[node_id] = LinkState(peer, dial_at, peer)
            self._gives_way = self._gives_way or bool(wanted)
        self.wake()

    def start_dialling(self) -> None:
        with self._lock:
            self._may_dial = True
        self.wake()

    def end_all(self, reason: str) -> None:
        """End every session. The peers are dialled again."""
        with self._lock:
            for node_id, link in list(self._links.items()):
                self._end_session(link, reason)
                self._forget_unlisted(node_id, link)
        self.wake()

    def session(self, node_id: str) -> PeerSession | None:
        """The session of this peer, if its link is up."""
        with self._lock:
            link = self._links.get(node_id)
            return link.session if link is not None else None

    def session_by(self, ident: bytes) -> PeerSession | None:
        """The session with this public id."""
        with self._lock:
            sessions = (link.session for link in self._links.values())
            return next((session for session in sessions if session and session.keys.ident == ident), None)

    def listed_peer(self, node_id: str, ident: bytes) -> Peer:
        """The peer of a session as `set_peers` named it, with its address; the one of the handshake has none."""
        with self._lock:
            link = self._links.get(node_id)
            if link is None or link.session is None or link.session.keys.ident != ident:
                raise PeerSocketError("the link is down")
            return link.peer

    def send(self, node_id: str, message: bytes) -> bool:
        """Queue a message: see `Transport.send`."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long: {MAX_MESSAGE_BYTES} at most")
        session = self.session(node_id)
        if session is None or not session.send(MESSAGE, message):
            self._traffic.counters.add("messages_dropped")
            return False
        self._traffic.counters.add("messages_out")
        self.wake()
        return True

    def verdict(self, peer: Peer) -> int:
        """The verdict of the handshake on a control connection from that peer."""
        with self._lock:
            link = self._links.get(peer.node_id)
            if self._closing:
                return UNKNOWN_PEER
            if link is None or link.peer.instance != peer.instance:
                return ACCEPTED if self._may_replace(link, peer) else UNKNOWN_PEER
            return ALREADY_LINKED if link.session is not None and self._decides(peer.node_id) else ACCEPTED

    def adopt(self, session: PeerSession) -> bool:
        """Make this session the link to its peer, unless this side decides and has one. `hand_over` follows."""
        node_id = session.peer.node_id
        with self._lock:
            if self._closing:
                return False
            link = self._links.get(node_id)
            if link is None or link.peer.instance != session.peer.instance:
                if not self._may_replace(link, session.peer):
                    return False
                link = self._replace(link, session.peer)
            if link.session is not None:
                if self._decides(node_id):
                    return False
                self._end_session(link, "the peer chose another connection")
            link.session, link.retry_s, link.last_error = session, FIRST_RETRY_S, ""
            self._traffic.counters.add("links")
            self._traffic.counters.add("reconnects", int(link.was_linked))
            link.was_linked = True
        return True

    def hand_over(self, session: PeerSession) -> bool:
        """The handshake is complete: the control thread owns the connection. False: the session has ended, close it."""
        with self._lock:
            if session.ended:
                return False
            session.handed_over = True
            self._arrived.append(session)
        self.wake()
        return True

    def lose(self, session: PeerSession, reason: str) -> None:
        """End this session and dial its peer again."""
        with self._lock:
            link = self._links.get(session.peer.node_id)
            if link is not None and link.session is session:
                link.dial_at = self._next_dial(session.peer.node_id, FIRST_RETRY_S)
                self._end_session(link, reason)
                self._forget_unlisted(session.peer.node_id, link)
        # Else it is on the list already: another session or `set_peers` has replaced it.
        self.wake()

    def dialled(self, peer: Peer, error: str) -> None:
        """A dial has ended; it failed if there is an error."""
        with self._lock:
            link = self._links.get(peer.node_id)
            if link is None or link.peer != peer:
                return
            link.dialling = False
            if error:
                link.dial_at = self._next_dial(peer.node_id, link.retry_s)
                link.retry_s = min(LAST_RETRY_S, link.retry_s * 2)
                is_new, link.last_error = error != link.last_error, error
                if is_new and link.session is None:
                    log.info("no link to %s at %s:%d yet: %s", peer.node_id, peer.address, peer.port, error)
        self.wake()

    def num_up(self) -> tuple[int, int]:
        """Links that are up, and all peers."""
        with self._lock:
            return sum(link.session is not None for link in self._links.values()), len(self._links)

    def close(self) -> None:
        """End all links and the control thread, without waiting for it."""
        with self._lock:
            self._closing = True
        self.wake()

    def wake(self) -> None:
        """Let the control thread run its loop once more."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._wake_fd, 1)

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _has_room(self, peer: Peer) -> bool:
        unlisted = sum(not link.peer.address for node_id, link in self._links.items() if node_id != peer.node_id)
        return peer.node_id != self._node_id and unlisted < self._max_unlisted_peers

    def _may_replace(self, link: LinkState | None, peer: Peer) -> bool:
        """Whether an instance that this link is not with may have it: the one that `set_peers` named always may."""
        if link is not None and link.named is not None and link.named.instance == peer.instance:
            return True
        return (link is None or link.session is None) and self._has_room(peer)

    def _replace(self, link: LinkState | None, peer: Peer) -> LinkState:
        """Begin a link with another instance. One that `set_peers` has not named may fetch; it is never dialled."""
        named = link.named if link is not None else None
        if link is not None:
            self._end_session(link, "replaced by another instance")
        if named is not None and named.instance == peer.instance:
            new = LinkState(named, self._next_dial(peer.node_id, 0.0), named)
        else:
            new = LinkState(Peer(peer.node_id, peer.instance), math.inf, named)
        self._links[peer.node_id] = new
        return new

    def _forget_unlisted(self, node_id: str, link: LinkState) -> None:
        """A session has ended: its name belongs to the peer that `set_peers` named, if there is one."""
        if link.named is None:
            del self._links[node_id]
        elif link.named != link.peer:
            self._links[node_id] = LinkState(link.named, self._next_dial(node_id, FIRST_RETRY_S), link.named)

    def _decides(self, node_id: str) -> bool:
        return self._node_id < node_id

    def _next_dial(self, node_id: str, wait_s: float) -> float:
        give_way_s = 0.0 if self._decides(node_id) else GIVE_WAY_S
        return time.monotonic() + wait_s * random.uniform(0.5, 1.5) + give_way_s

    def _end_session(self, link: LinkState, reason: str) -> None:
        session, link.session = link.session, None
        if session is not None:
            self._ended.append((session, reason))

    # --- the control thread ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Receive, send, watch for silence and start dials, until `close`."""
        maintain_s, maintain_at = self._traffic.config.dead_s / HEARTBEATS / 4, 0.0
        try:
            while not self._closing:
                for key, events in self._selector.select(self._sleep_s(maintain_s)):
                    if key.data is None:
                        os.eventfd_read(self._wake_fd)
                    elif events & selectors.EVENT_READ:
                        self._guard(key.data, self._receive)
                if self._closing:
                    break
                self._report_links()
                now = time.monotonic()
                # With a thousand peers a message arrives every millisecond: each must not cost a pass over all links.
                if now >= maintain_at:
                    maintain_at = now + maintain_s
                    for session in list(self._live.values()):
                        self._guard(session, self._maintain)
                for session in [session for session in self._live.values() if session.wants_to_send]:
                    self._guard(session, self._flush)
                self._start_dials(now)
        finally:
            self._shut_down()

    def _sleep_s(self, longest_s: float) -> float:
        with self._lock:
            dials = [link.dial_at for link in self._links.values() if link.session is None and not link.dialling]
            if self._arrived or self._ended:
                return 0.0
        next_dial_s = min(dials, default=math.inf) - time.monotonic() if self._may_dial else longest_s
        return max(SHORTEST_SLEEP_S, min(longest_s, next_dial_s))

    def _guard(self, session: PeerSession, work: Callable[[PeerSession], None]) -> None:
        """Run `work`. A bug in it costs one link, not the thread that serves all of them."""
        try:
            work(session)
        except Exception as error:
            log.exception("the link to %s failed", session.peer.node_id)
            self.lose(session, f"internal error: {type(error).__name__}")

    def _receive(self, session: PeerSession) -> None:
        try:
            frames = session.read()
        except (OSError, PeerFrameError) as error:
            self.lose(session, str(error))
            return
        for kind, body in frames:
            if session.ended:
                return
            if kind == MESSAGE:
                self._traffic.counters.add("messages_in")
                self._deliver(session, body)
            elif kind == GOODBYE:
                self.lose(session, "the peer closed its end")

    def _deliver(self, session: PeerSession, message: bytes) -> None:
        try:
            self._call(lambda: self._listener.on_message(session.peer.node_id, message, session.peer.instance))
        except InvalidMessageError as error:
            session.invalid_messages += 1
            if session.invalid_messages > MAX_INVALID_MESSAGES:
                self.lose(session, f"{session.invalid_messages} invalid messages, the last one {error}")

    def _maintain(self, session: PeerSession) -> None:
        """Send a heartbeat if one is due; end the session if the peer is silent."""
        if session.ended:
            return
        now = time.monotonic()
        silent_s = now - session.received_at
        if silent_s > self._traffic.config.dead_s:
            self.lose(session, f"silent for {silent_s:.1f} s")
            return
        if now - session.sent_at >= self._traffic.config.dead_s / HEARTBEATS:
            session.send(HEARTBEAT)
        session.streams.expire(now)

    def _flush(self, session: PeerSession) -> None:
        """Send what is queued, and wait for writability if some of it remains."""
        if session.ended:
            return
        try:
            session.flush()
        except OSError as error:
            self.lose(session, error.strerror or str(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.wants_to_send else 0)
        if self._selector.get_key(session.connection.sock).events != interest:
            self._selector.modify(session.connection.sock, interest, session)

    def _report_links(self) -> None:
        """Report the sessions that ended and those that arrived, in that order."""
        with self._lock:
            ended, self._ended = self._ended, []
            arrived, self._arrived = self._arrived, []
        for session, reason in ended:
            session.end(reason)
            node_id = session.peer.node_id
            if self._live.get(node_id) is session:
                del self._live[node_id]
                self._selector.unregister(session.connection.sock)
                self._report_link(session, False, reason)
            self._close(session)
        for session in arrived:
            if session.ended:
                continue  # It ended before it was reported.
            session.connection.sock.setblocking(False)
            self._selector.register(session.connection.sock, selectors.EVENT_READ, session)
            self._live[session.peer.node_id] = session
            self._report_link(session, True, "connected" if session.dialled else "accepted")
            self._guard(session, self._receive)  # TLS may have read ahead.

    def _close(self, session: PeerSession) -> None:
        """Close the connection if this thread owns it. Else the thread of the handshake does, after `hand_over`."""
        with self._lock:
            owned = session.handed_over
        if owned:
            session.connection.close()

    def _report_link(self, session: PeerSession, up: bool, reason: str) -> None:
        log.info("link to %s is %s: %s", session.peer.node_id, "up" if up else "down", reason)
        self._call(lambda: self._listener.on_link(session.peer.node_id, up, reason))

    def _call(self, handler: Callable[[], None]) -> None:
        if self._closing:
            return
        try:
            handler()
        except InvalidMessageError:
            raise
        except Exception:
            log.exception("the listener of the transport failed")

    def _start_dials(self, now: float) -> None:
        with self._lock:
            if not self._may_dial:
                return
            room = MAX_DIALS - sum(link.dialling for link in self._links.values())
            links = self._links.values()
            due = [link for link in links if link.session is None and not link.dialling and link.dial_at <= now]
            due = sorted(due, key=lambda link: link.dial_at)[: max(0, room)]
            for link in due:
                link.dialling = True
            peers = [link.peer for link in due]
        for peer in peers:
            self._dialer.start_dial(peer)

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = True
            for link in self._links.values():
                self._end_session(link, "closed")
            ended, self._ended, self._arrived = self._ended, [], []
        for session, reason in ended:
            if session in self._live.values():
                session.send(GOODBYE)
                with suppress(OSError):
                    session.flush()
            session.end(reason)
            self._close(session)
        self._live.clear()
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
