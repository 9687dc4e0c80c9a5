"""Transport inside one process, for tests and simulations, with faults to inject.

    hub = MemoryHub()
    a = MemoryTransport(hub, Peer("a", "1"), config, listener)
    hub.cut("a", "b"); hub.freeze("b"); hub.delay("a", "b", 0.1); hub.corrupt("a", "b")

Rules, limits and futures are those of the TCP transport; one conformance suite runs on both. A cut link or a frozen
node is silent: its peers report it after `dead_s`; messages sent meanwhile arrive if the link has lasted until then.
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
from functools import partial

from keepstep.config import PeersConfig
from keepstep.transport.fetch import NO_ANSWER, NOT_STARTED, BodyDigest, PendingFetch
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
    Peer,
    Refusal,
    TransportListener,
)
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.throttle import Traffic

log = logging.getLogger("keepstep")
TICK_S = 0.005  # Waiting threads poll at this interval: faults are plain attributes, not events.
ANSWER_POLL_S = 0.0005


class _Link:
    """State that two connected nodes share."""

    def __init__(self, one: str, other: str) -> None:
        self.ended = ""
        self.inbox: dict[str, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}


class MemoryHub:
    """The network. Faults may be injected from any thread, and last until they are taken back."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes: dict[str, MemoryTransport] = {}
        self.ports = itertools.count(1)
        self._cut: set[frozenset[str]] = set()
        self._frozen: set[str] = set()
        self._delay_s: dict[frozenset[str], float] = {}
        self._corrupt: dict[tuple[str, str], int] = {}

    def cut(self, one: str, other: str) -> None:
        """Drop everything between the two, silently."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))

    def freeze(self, node_id: str) -> None:
        """Stop that node, as SIGSTOP does."""
        self._frozen.add(node_id)

    def thaw(self, node_id: str) -> None:
        self._frozen.discard(node_id)

    def delay(self, one: str, other: str, seconds: float) -> None:
        """Delay messages and answers between the two."""
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
    """`Transport` over a hub."""

    def __init__(
        self,
        hub: MemoryHub,
        me: Peer,
        config: PeersConfig,
        listener: TransportListener,
        *,
        num_streams: int = NUM_STREAMS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.me = Peer(me.node_id, me.instance, "memory", next(hub.ports))
        self._hub = hub
        self._traffic = Traffic(config, num_streams=num_streams, timeout_s=timeout_s)
        self._listener = listener
        self._threads = ThreadGroup()
        self._peers: dict[str, Peer] = {}
        self._links: dict[str, _Link] = {}
        self._reported: dict[str, _Link] = {}
        self._received_at: dict[str, float] = {}
        self._waiting: dict[str, deque[PendingFetch]] = {}
        self._num_streams: dict[str, int] = {}
        self._linked_before: set[str] = set()
        self._wake = threading.Event()
        self.closed = False
        with hub.lock:
            hub.nodes[me.node_id] = self
        self._threads.start("control", self._run)

    def card_address(self) -> tuple[str, int]:
        return self.me.address, self.me.port

    def admit(self, secret: bytes) -> None:
        """Nothing to do: every node of the hub is admitted."""

    def set_peers(self, peers: Sequence[Peer]) -> None:
        with self._hub.lock:
            wanted = {peer.node_id: peer for peer in peers if peer.node_id != self.me.node_id}
            for node_id, link in list(self._links.items()):
                if wanted.get(node_id) != self._peers.get(node_id):
                    self._drop(node_id, link, "no longer a peer, or replaced")
            self._peers = wanted
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
                    self._threads.start(f"fetch-{node_id}", lambda: self._stream(node_id))
        if refused:
            fetch.fail_waiting(refused, lost=link is None or self.closed)
        return fetch

    def up(self, node_id: str) -> bool:
        return node_id in self._links

    def counters(self) -> dict[str, float]:
        return self._traffic.all() | {"up": float(len(self._links)), "peers": float(len(self._peers))}

    def close(self) -> None:
        with self._hub.lock:
            self.closed = True
            if self._hub.nodes.get(self.me.node_id) is self:
                del self._hub.nodes[self.me.node_id]
            for node_id, link in list(self._links.items()):
                self._drop(node_id, link, "the peer closed its end")
        self._wake.set()
        self._threads.join()
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
            for node_id in {*self._peers, *self._reported}:
                self._update(node_id, time.monotonic())
                self._report(node_id)
                self._deliver(node_id)
                self._expire(node_id)

    def _update(self, node_id: str, now: float) -> None:
        """Make the link if both sides list each other; end it if the other side has, or is silent for too long."""
        with self._hub.lock:
            link = self._links.get(node_id)
            if link is None:
                self._connect(node_id, now)
            elif self._hub.passes(self.me.node_id, node_id):
                self._received_at[node_id] = now
                if link.ended:
                    self._drop(node_id, link, link.ended)
            elif now - self._received_at[node_id] > self._traffic.config.dead_s:
                self._drop(node_id, link, f"silent for {now - self._received_at[node_id]:.1f} s")

    def _connect(self, node_id: str, now: float) -> None:
        other, own_id = self._hub.nodes.get(node_id), self.me.node_id
        peer = self._peers.get(node_id)
        if other is None or peer is None or peer.instance != other.me.instance or not self._hub.passes(own_id, node_id):
            return
        listed = other._peers.get(own_id)
        if listed is None or listed.instance != self.me.instance or own_id in other._links:
            return
        if self.closed or other.closed:
            return
        link = _Link(own_id, node_id)
        for side, far_id in ((self, node_id), (other, own_id)):
            side._links[far_id], side._received_at[far_id] = link, now
            side._traffic.counters.add("links")
            side._traffic.counters.add("reconnects", int(far_id in side._linked_before))
            side._linked_before.add(far_id)
            side._wake.set()

    def _drop(self, node_id: str, link: _Link, reason: str) -> None:
        del self._links[node_id]
        link.ended = link.ended or reason
        self._wake.set()

    def _report(self, node_id: str) -> None:
        reported, link = self._reported.get(node_id), self._links.get(node_id)
        if reported is link:
            return
        if reported is not None:
            del self._reported[node_id]
            self._call(lambda: self._listener.on_link(node_id, False, reported.ended))
        if link is not None:
            self._reported[node_id] = link
            self._call(lambda: self._listener.on_link(node_id, True, "connected"))

    def _deliver(self, node_id: str) -> None:
        link = self._reported.get(node_id)
        while link is not None and self._links.get(node_id) is link and self._hub.passes(self.me.node_id, node_id):
            with self._hub.lock:
                inbox = link.inbox[self.me.node_id]
                if not inbox or inbox[0][0] > time.monotonic():
                    return
                _, message = inbox.popleft()
            self._traffic.counters.add("messages_in")
            self._call(lambda: self._listener.on_message(node_id, message, self._hub.nodes[node_id].me.instance))  # noqa: B023

    def _expire(self, node_id: str) -> None:
        """Fail fetches that wait past their deadline, and all of them when the link is down."""
        with self._hub.lock:
            waiting = list(self._waiting.get(node_id, ()))
            down = node_id not in self._links
        for fetch in waiting:
            if down:
                fetch.fail_waiting("the link is down", lost=True)
            elif fetch.remaining_s <= 0:
                fetch.fail_waiting(NOT_STARTED, lost=True)

    def _call(self, handler: Callable[[], None]) -> None:
        if self.closed:
            return
        try:
            handler()
        except Exception:
            log.exception("the listener of the transport failed")

    # --- streams --------------------------------------------------------------------------------------------------

    def _stream(self, node_id: str) -> None:
        """Carry fetches until none waits, then end: threads are cheap here, and none remains to be closed."""
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
            stopped, checksum, mismatch, data = self._body(fetch, body, link)
        finally:
            if body.release is not None:
                body.release()
        if stopped:
            counters.add("failed")
            fetch.fail(stopped, lost=True)
        elif mismatch:
            counters.add("bad_checksums")
            fetch.fail(mismatch, lost=False)
        else:
            counters.add("fetched")
            self._hub_counter(node_id, "served")
            fetch.succeed(body.size_bytes, checksum, data)

    def _answer(self, fetch: PendingFetch, link: _Link | None) -> tuple[Body | None, str] | str:
        """Answer of the other side's `serve`, run on a thread of its own; a string if it did not answer in time."""
        answers: list[tuple[Body | None, str]] = []
        abandoned = threading.Event()
        start = time.monotonic() + self._hub.delay_s(self.me.node_id, fetch.node_id)
        requested = False
        while not answers or not self._hub.passes(self.me.node_id, fetch.node_id):
            if stopped := self._stopped(fetch, link):
                abandoned.set()
                for body, _ in answers:
                    if body is not None and body.release is not None:
                        body.release()
                return stopped
            other = self._hub.nodes.get(fetch.node_id)
            passes = self._hub.passes(self.me.node_id, fetch.node_id)
            if not requested and other is not None and passes and time.monotonic() >= start:
                requested = True
                request = (self.me.node_id, fetch.query, fetch.size_bytes, fetch.exact)
                answer = partial(other._serve_request, request, answers, abandoned)
                other._threads.start(f"serve-{self.me.node_id}", answer)
            time.sleep(ANSWER_POLL_S if requested else TICK_S)
        return answers[0]

    def _serve_request(
        self, request: tuple[str, bytes, int, bool], answers: list[tuple[Body | None, str]], abandoned: threading.Event
    ) -> None:
        node_id, query, size_bytes, exact = request
        body: Body | None = None
        try:
            body = self._listener.serve(node_id, query)
            reason = ""
        except Refusal as refusal:
            reason = str(refusal)
        except Exception as error:
            log.exception("serving %s failed", node_id)
            reason = f"the server failed: {type(error).__name__}"
        fits = body is None or (body.size_bytes == size_bytes if exact else body.size_bytes <= size_bytes)
        if body is not None and (abandoned.is_set() or not fits):
            if body.release is not None:
                body.release()
            reason, body = f"the body has {body.size_bytes} bytes, not {size_bytes}", None
        if body is None:
            self._traffic.counters.add("refused")
        answers.append((body, reason))

    def _body(self, fetch: PendingFetch, body: Body, link: _Link | None) -> tuple[str, bytes, str, bytearray | None]:
        target, buffer = fetch.target(body.size_bytes)
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
            in_memory = body.data is not None
            target[done : done + want] = (
                data[done : done + want] if in_memory else os.pread(body.fd, want, body.offset + done)
            )
            if flip:
                target[done] ^= 1
                flip = False
            digest.update(target[done : done + want])
            self._traffic.meter_in.add(want)
            if other is not None:
                other._traffic.meter_out.add(want)
            done += want
        return "", *digest.verify(), buffer

    def _stopped(self, fetch: PendingFetch, link: _Link | None) -> str:
        """Reason why the fetch must end now; empty if it need not."""
        if fetch.abandoned:
            return "cancelled"
        if fetch.remaining_s <= 0:
            return NO_ANSWER
        if link is None or self._links.get(fetch.node_id) is not link:
            return f"the link is down: {link.ended}" if link is not None else "the link is down"
        return ""

    def _hub_counter(self, node_id: str, name: str) -> None:
        other = self._hub.nodes.get(node_id)
        if other is not None:
            other._traffic.counters.add(name)
