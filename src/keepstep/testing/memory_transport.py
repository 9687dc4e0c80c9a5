"""Peers inside one process: the twin of the TCP transport for tests and simulations, with faults to order.

    hub = Hub()
    a = MemoryPeers(hub, Peer("a", "1"), config, on_message=..., on_link=..., serve=...)
    hub.cut("a", "b"); hub.freeze("b"); hub.delay("a", "b", 0.1); hub.corrupt("a", "b")

Same rules, bounds and futures as over TCP (one conformance suite runs on both). A cut or a frozen node is silent: its
peers find out after `dead_s`, and what was sent meanwhile arrives if the link has held until then.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from keepstep.config import PeersConfig
from keepstep.transport.fetch import BodyDigest, PendingFetch
from keepstep.transport.interface import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_FETCHES,
    MAX_QUEUED_MESSAGES,
    NUM_STREAMS,
    TIMEOUT_S,
    Body,
    Fetched,
    FetchRequest,
    OnLink,
    OnMessage,
    Peer,
    Refusal,
    Serve,
)
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.traffic import Traffic

log = logging.getLogger("keepstep")
TICK_S = 0.005
"""how often waiting threads look again: faults are ordered by plain attributes, not events"""


class _Link:
    """What two nodes share while they are connected."""

    def __init__(self, one: str, other: str) -> None:
        self.ended = ""
        self.inbox: dict[str, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}


class MemoryHub:
    """The network. Orders may be given from any thread and hold until they are taken back."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: dict[str, MemoryTransport] = {}
        self.ports = itertools.count(1)
        self._cut: set[frozenset[str]] = set()
        self._frozen: set[str] = set()
        self._delay_s: dict[frozenset[str], float] = {}
        self._corrupt: dict[tuple[str, str], int] = {}

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between the two, and nothing says so."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))

    def freeze(self, node_id: str) -> None:
        """That node does nothing, as after SIGSTOP."""
        self._frozen.add(node_id)

    def thaw(self, node_id: str) -> None:
        self._frozen.discard(node_id)

    def delay(self, one: str, other: str, seconds: float) -> None:
        """Messages and answers between the two take so much longer."""
        self._delay_s[frozenset((one, other))] = seconds

    def corrupt(self, source: str, target: str, num_bodies: int = 1) -> None:
        """Flip a bit in the next bodies that `target` fetches from `source`."""
        self._corrupt[source, target] = num_bodies

    def frozen(self, node_id: str) -> bool:
        return node_id in self._frozen

    def passes(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self._cut and not self._frozen & {one, other}

    def delay_s(self, one: str, other: str) -> float:
        return self._delay_s.get(frozenset((one, other)), 0.0)

    def flips(self, source: str, target: str) -> bool:
        with self.lock:
            left = self._corrupt.get((source, target), 0)
            self._corrupt[source, target] = max(0, left - 1)
            return left > 0


class MemoryTransport:
    """`Peers` over a hub."""

    def __init__(
        self,
        hub: MemoryHub,
        me: Peer,
        config: PeersConfig,
        *,
        on_message: OnMessage,
        on_link: OnLink,
        serve: Serve,
        num_streams: int = NUM_STREAMS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.me = Peer(me.node_id, me.instance, "memory", next(hub.ports))
        self._hub = hub
        self._traffic = Traffic(config, num_streams=num_streams, timeout_s=timeout_s)
        self._on_message, self._on_link, self._serve = on_message, on_link, serve
        self._crew = ThreadGroup()
        self._known: dict[str, Peer] = {}
        self._links: dict[str, _Link] = {}
        self._told: dict[str, _Link] = {}
        self._heard_at: dict[str, float] = {}
        self._waiting: dict[str, deque[PendingFetch]] = {}
        self._num_streams: dict[str, int] = {}
        self._met: set[str] = set()
        self._wake = threading.Event()
        self.closed = False
        with hub.lock:
            hub.nodes[me.node_id] = self
        self._crew.start("control", self._run)

    def card_address(self) -> tuple[str, int]:
        return self.me.address, self.me.port

    def admit(self, secret: bytes) -> None:
        """There is nobody to keep out."""

    def meet(self, peers: Sequence[Peer]) -> None:
        with self._hub.lock:
            wanted = {peer.node_id: peer for peer in peers if peer.node_id != self.me.node_id}
            for node_id, link in list(self._links.items()):
                if wanted.get(node_id) != self._known.get(node_id):
                    self._drop(node_id, link, "no longer a peer, or replaced")
            self._known = wanted
        self._wake.set()

    def send(self, node_id: str, message: bytes) -> bool:
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long: {MAX_MESSAGE_BYTES} at most")
        with self._hub.lock:
            link = self._links.get(node_id)
            queue = link.inbox[node_id] if link is not None else None
            full = queue is not None and (
                len(queue) >= MAX_QUEUED_MESSAGES or sum(len(m) for _, m in queue) + len(message) > MAX_QUEUED_BYTES
            )
            if queue is None or full or self.closed:
                self._traffic.counters.add("messages_dropped")
                return False
            queue.append((time.monotonic() + self._hub.delay_s(self.me.node_id, node_id), bytes(message)))
            other = self._hub.nodes.get(node_id)
        self._traffic.counters.add("messages_out")
        if other is not None:
            other._wake.set()
        return True

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        fetch, node_id = PendingFetch(request), request.node_id
        refused = ""
        with self._hub.lock:
            link = self._links.get(node_id)
            waiting = self._waiting.setdefault(node_id, deque())
            if link is None or self.closed:
                refused = "closed" if self.closed else "the link is down"
            elif len(waiting) >= MAX_QUEUED_FETCHES:
                refused = f"{MAX_QUEUED_FETCHES} fetches wait already"
            else:
                waiting.append(fetch)
                if self._num_streams.get(node_id, 0) < self._traffic.num_streams:
                    self._num_streams[node_id] = self._num_streams.get(node_id, 0) + 1
                    self._crew.start(f"fetch-{node_id}", lambda: self._stream(node_id))
        if refused:
            fetch.fail_waiting(refused, lost=link is None or self.closed)
        return fetch

    def up(self, node_id: str) -> bool:
        return node_id in self._links

    def counters(self) -> dict[str, float]:
        return self._traffic.all() | {"up": float(len(self._links)), "peers": float(len(self._known))}

    def close(self) -> None:
        with self._hub.lock:
            self.closed = True
            if self._hub.nodes.get(self.me.node_id) is self:
                del self._hub.nodes[self.me.node_id]
            for node_id, link in list(self._links.items()):
                self._drop(node_id, link, "the peer closed its end")
        self._wake.set()
        self._crew.join()
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft().fail_waiting("closed", lost=True)

    # --- the control thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.closed:
            self._wake.wait(TICK_S)
            self._wake.clear()
            if self.closed or self._hub.frozen(self.me.node_id):
                continue
            for node_id in {*self._known, *self._told}:
                self._look(node_id, time.monotonic())
                self._report(node_id)
                self._deliver(node_id)
                self._expire(node_id)

    def _look(self, node_id: str, now: float) -> None:
        """Make the link if both want it; end it if the other end has, or has been silent for too long."""
        with self._hub.lock:
            link = self._links.get(node_id)
            if link is None:
                self._connect(node_id, now)
            elif self._hub.passes(self.me.node_id, node_id):
                self._heard_at[node_id] = now
                if link.ended:
                    self._drop(node_id, link, link.ended)
            elif now - self._heard_at[node_id] > self._traffic.config.dead_s:
                self._drop(node_id, link, f"silent for {now - self._heard_at[node_id]:.1f} s")

    def _connect(self, node_id: str, now: float) -> None:
        other, mine = self._hub.nodes.get(node_id), self.me.node_id
        known = self._known.get(node_id)
        if other is None or known is None or known.instance != other.me.instance or not self._hub.passes(mine, node_id):
            return
        met = other._known.get(mine)
        if met is None or met.instance != self.me.instance or mine in other._links or self.closed or other.closed:
            return
        link = _Link(mine, node_id)
        for side, far in ((self, node_id), (other, mine)):
            side._links[far], side._heard_at[far] = link, now
            side._traffic.counters.add("links")
            side._traffic.counters.add("reconnects", int(far in side._met))
            side._met.add(far)
            side._wake.set()

    def _drop(self, node_id: str, link: _Link, why: str) -> None:
        del self._links[node_id]
        link.ended = link.ended or why
        self._wake.set()

    def _report(self, node_id: str) -> None:
        told, link = self._told.get(node_id), self._links.get(node_id)
        if told is link:
            return
        if told is not None:
            del self._told[node_id]
            self._call(lambda: self._on_link(node_id, False, told.ended))
        if link is not None:
            self._told[node_id] = link
            self._call(lambda: self._on_link(node_id, True, "connected"))

    def _deliver(self, node_id: str) -> None:
        link = self._told.get(node_id)
        while link is not None and self._links.get(node_id) is link and self._hub.passes(self.me.node_id, node_id):
            with self._hub.lock:
                inbox = link.inbox[self.me.node_id]
                if not inbox or inbox[0][0] > time.monotonic():
                    return
                _, message = inbox.popleft()
            self._traffic.counters.add("messages_in")
            self._call(lambda: self._on_message(node_id, message))  # noqa: B023

    def _expire(self, node_id: str) -> None:
        """End what waits past its deadline, and everything when the link is down."""
        with self._hub.lock:
            waiting = list(self._waiting.get(node_id, ()))
            down = node_id not in self._links
        for fetch in waiting:
            if down:
                fetch.fail_waiting("the link is down", lost=True)
            elif fetch.remaining_s <= 0:
                fetch.fail_waiting("no answer by the deadline: others were before it", lost=True)

    def _call(self, callback: Callable[[], None]) -> None:
        if self.closed:
            return
        try:
            callback()
        except Exception:
            log.exception("a callback of the peers failed")

    # --- streams --------------------------------------------------------------------------------------------------

    def _stream(self, node_id: str) -> None:
        """Works until nothing waits: threads here are cheap, and none is left to close."""
        while True:
            with self._hub.lock:
                if not self._waiting[node_id]:
                    self._num_streams[node_id] -= 1
                    return
                fetch = self._waiting[node_id].popleft()
                link = self._links.get(node_id)
            if fetch.begin():
                self._fetch(fetch, link)
            del fetch

    def _fetch(self, fetch: PendingFetch, link: _Link | None) -> None:
        node_id, counters = fetch.node_id, self._traffic.counters
        outcome = self._answer(fetch, link)
        if isinstance(outcome, str):
            counters.add("failed")
            fetch.fail(outcome, lost=True)
            return
        body, reason = outcome
        if body is None:
            counters.add("refused")
            fetch.fail(f"refused: {reason}", lost=False)
            return
        try:
            stopped, checksum, wrong, loose = self._body(fetch, body, link)
        finally:
            if body.release is not None:
                body.release()
        if stopped:
            counters.add("failed")
            fetch.fail(stopped, lost=True)
        elif wrong:
            counters.add("bad_checksums")
            fetch.fail(wrong, lost=False)
        else:
            counters.add("fetched")
            self._hub_counter(node_id, "served")
            fetch.succeed(body.size_bytes, checksum, loose)

    def _answer(self, fetch: PendingFetch, link: _Link | None) -> tuple[Body | None, str] | str:
        """What the other side's `serve` says, on a thread of its own; a string when it says nothing in time."""
        answers: list[tuple[Body | None, str]] = []
        late = threading.Event()
        start = time.monotonic() + self._hub.delay_s(self.me.node_id, fetch.node_id)
        asked = False
        while not answers or not self._hub.passes(self.me.node_id, fetch.node_id):
            if stopped := self._stopped(fetch, link):
                late.set()
                for body, _ in answers:
                    if body is not None and body.release is not None:
                        body.release()
                return stopped
            other = self._hub.nodes.get(fetch.node_id)
            passes = self._hub.passes(self.me.node_id, fetch.node_id)
            if not asked and other is not None and passes and time.monotonic() >= start:
                asked = True
                request = (self.me.node_id, fetch.query, fetch.size_bytes, fetch.exact)
                other._crew.start(f"serve-{self.me.node_id}", lambda: other._give(request, answers, late))  # noqa: B023
            time.sleep(0.0005 if asked else TICK_S)
        return answers[0]

    def _give(
        self, asked: tuple[str, bytes, int, bool], answers: list[tuple[Body | None, str]], late: threading.Event
    ) -> None:
        node_id, request, size_bytes, exact = asked
        body: Body | None = None
        try:
            body = self._serve(node_id, request)
            reason = ""
        except Refusal as refusal:
            reason = str(refusal)
        except Exception as error:
            log.exception("serving %s failed", node_id)
            reason = f"the server failed: {type(error).__name__}"
        fits = body is None or (body.size_bytes == size_bytes if exact else body.size_bytes <= size_bytes)
        if body is not None and (late.is_set() or not fits):
            if body.release is not None:
                body.release()
            reason, body = f"there are {body.size_bytes} bytes, not {size_bytes}", None
        if body is None:
            self._traffic.counters.add("refused")
        answers.append((body, reason))

    def _body(self, fetch: PendingFetch, body: Body, link: _Link | None) -> tuple[str, bytes, str, bytearray | None]:
        target, loose = fetch.target(body.size_bytes)
        digest = BodyDigest(fetch.expect, body.checksum)
        flip = self._hub.flips(fetch.node_id, self.me.node_id)
        other = self._hub.nodes.get(fetch.node_id)
        cap, far_cap = self._traffic.cap_in, other._traffic.cap_out if other is not None else self._traffic.cap_out
        data = memoryview(body.data).cast("B") if body.data is not None and body.size_bytes else memoryview(b"")
        done = 0
        while done < body.size_bytes:
            want = min(cap.slice_bytes, far_cap.slice_bytes, body.size_bytes - done)
            allowed = all(each.take(want, lambda: bool(self._stopped(fetch, link))) for each in (cap, far_cap))
            while not self._hub.passes(self.me.node_id, fetch.node_id) and not self._stopped(fetch, link):
                time.sleep(TICK_S)
            if (stopped := self._stopped(fetch, link)) or not allowed:
                return stopped or "stopped", b"", "", None
            piece = data[done : done + want] if body.data is not None else os.pread(body.fd, want, body.offset + done)
            target[done : done + want] = piece
            if flip:
                target[done] ^= 1
                flip = False
            digest.update(target[done : done + want])
            self._traffic.meter_in.add(want)
            if other is not None:
                other._traffic.meter_out.add(want)
            done += want
        return "", *digest.verdict(), loose

    def _stopped(self, fetch: PendingFetch, link: _Link | None) -> str:
        """Why the fetch must end now, if it must."""
        if fetch.abandoned:
            return "cancelled"
        if fetch.remaining_s <= 0:
            return "no answer by the deadline"
        if link is None or self._links.get(fetch.node_id) is not link:
            return f"the link is down: {link.ended}" if link is not None else "the link is down"
        return ""

    def _hub_counter(self, node_id: str, name: str) -> None:
        other = self._hub.nodes.get(node_id)
        if other is not None:
            other._traffic.counters.add(name)
