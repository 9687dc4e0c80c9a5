"""The asking side of the bytes: a few connections to one peer, a thread on each, for as long as the session lasts.

A stream is dialled when the first fetch needs it and asks for one thing at a time. Whatever goes wrong in the middle of
an answer (deadline, cancel, rubbish) costs the connection: what is left in it cannot be told from the next answer.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from keepstep.transport.connection import PeerSocket, PeerSocketError
from keepstep.transport.fetch import BodyDigest, PendingFetch
from keepstep.transport.frames import ANSWER_HEAD_BYTES, REFUSED, AnswerHead, PeerFrameError, RequestHead
from keepstep.transport.handshake import AuthError
from keepstep.transport.interface import MAX_QUEUED_FETCHES
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.traffic import Traffic

log = logging.getLogger("keepstep")
Dial = Callable[[float, Callable[[PeerSocket], None]], PeerSocket]
"""deadline, and whom to show the connection to before its handshake; raises WireError or AuthError"""


class FetchStreams:
    """All fetches from one peer in one session."""

    def __init__(self, node_id: str, dial: Dial, traffic: Traffic, crew: ThreadGroup) -> None:
        self._node_id = node_id
        self._dial = dial
        self._traffic = traffic
        self._crew = crew
        self._changed = threading.Condition()
        self._waiting: deque[PendingFetch] = deque()
        self._wires: set[PeerSocket] = set()
        self._num_threads = 0
        self._num_idle = 0
        self._numbers = itertools.count(1)
        self._ended = ""

    def submit(self, fetch: PendingFetch) -> None:
        refused = ""
        with self._changed:
            if self._ended:
                refused = self._ended
            elif len(self._waiting) >= MAX_QUEUED_FETCHES:
                refused = f"{MAX_QUEUED_FETCHES} fetches wait already"
            else:
                self._waiting.append(fetch)
                self._grow()
                self._changed.notify()
        if refused:
            fetch.fail_waiting(refused, lost=bool(self._ended))

    def _grow(self) -> None:
        """One more thread if there is work for it. Without one, what waits ends by its deadline."""
        if self._num_idle < len(self._waiting) and self._num_threads < self._traffic.num_streams:
            try:
                self._crew.start(f"fetch-{self._node_id}-{self._num_threads}", self._work)
                self._num_threads += 1
            except RuntimeError as error:
                log.warning("no thread for a stream to %s: %s", self._node_id, error)

    def expire(self, now: float) -> None:
        """End what has waited past its deadline; called every now and then."""
        late: list[PendingFetch] = []
        with self._changed:
            if any(fetch.deadline <= now or fetch.done() for fetch in self._waiting):
                on_time: deque[PendingFetch] = deque()
                for fetch in self._waiting:
                    (late if fetch.deadline <= now or fetch.done() else on_time).append(fetch)
                self._waiting = on_time
        for fetch in late:
            fetch.fail_waiting("no answer by the deadline: others were before it", lost=True)

    def end(self, reason: str) -> None:
        """The session is over: so is everything that was asked in it."""
        with self._changed:
            self._ended = self._ended or reason
            waiting, self._waiting = self._waiting, deque()
            for wire in self._wires:
                wire.shut()
            self._changed.notify_all()
        for fetch in waiting:
            fetch.fail_waiting(reason, lost=True)

    def _work(self) -> None:
        wire: PeerSocket | None = None
        while (fetch := self._next()) is not None:
            if fetch.begin():
                wire = self._fetch(fetch, wire)
            del fetch
        if wire is not None:
            self._drop(wire)

    def _next(self) -> PendingFetch | None:
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._num_idle -= 1
            return None if self._ended else self._waiting.popleft()

    def _fetch(self, fetch: PendingFetch, wire: PeerSocket | None) -> PeerSocket | None:
        """End `fetch`, one way or another. The connection, if it can be used again."""
        asked = RequestHead(next(self._numbers), len(fetch.query), fetch.size_bytes, fetch.exact)
        for stale in (wire is not None, False):
            reason, lost, answered = "", True, False
            try:
                if wire is None:
                    wire = self._dial(fetch.deadline, self._hold)
                if not fetch.interruptible(wire.shut):
                    raise PeerSocketError("cancelled")
                head = self._ask(wire, fetch, asked)
                answered = True
                self._receive(wire, fetch, head)
                return wire
            except PeerSocketError as error:
                reason = error.reason if not fetch.remaining_s <= 0 else "no answer by the deadline"
            except AuthError as error:
                reason = str(error)
            except PeerFrameError as error:
                reason, lost = str(error), False
            if wire is not None:
                self._drop(wire)
                wire = None
            # A connection that broke while nobody used it is no reason to fail: reading again does no harm.
            if not stale or answered or fetch.abandoned or self._ended or fetch.remaining_s <= 0:
                break
        self._traffic.counters.add("failed")
        fetch.fail(self._ended or reason, lost=lost or bool(self._ended))
        return None

    def _ask(self, wire: PeerSocket, fetch: PendingFetch, asked: RequestHead) -> AnswerHead:
        wire.write(asked.pack() + fetch.query, deadline=fetch.deadline)
        # Until the answer begins only the fetch's own deadline counts: the server may have to think.
        return AnswerHead.unpack(wire.read_exact(ANSWER_HEAD_BYTES, deadline=fetch.deadline), asked)

    def _receive(self, wire: PeerSocket, fetch: PendingFetch, head: AnswerHead) -> None:
        counters = self._traffic.counters
        if head.status == REFUSED:
            reason = wire.read_exact(head.length, deadline=fetch.deadline).decode(errors="replace")
            counters.add("refused")
            fetch.fail(f"refused: {reason}", lost=False)
            return
        checksum, wrong, loose = self._body(wire, fetch, head)
        if wrong:
            counters.add("bad_checksums")
            fetch.fail(wrong, lost=False)
        else:
            counters.add("fetched")
            fetch.succeed(head.length, checksum, loose)

    def _body(self, wire: PeerSocket, fetch: PendingFetch, head: AnswerHead) -> tuple[bytes, str, bytearray | None]:
        target, loose = fetch.target(head.length)
        digest = BodyDigest(fetch.expect, head.checksum)
        cap, meter, timeout_s = self._traffic.cap_in, self._traffic.meter_in, self._traffic.timeout_s
        done = 0
        while done < head.length:
            want = min(cap.slice_bytes, head.length - done)
            if not cap.take(want, lambda: fetch.abandoned or bool(self._ended) or fetch.remaining_s <= 0):
                raise PeerSocketError("stopped")
            if (remaining_s := fetch.remaining_s) <= 0:
                raise PeerSocketError("no answer by the deadline", timed_out=True)
            wire.limit(min(timeout_s, remaining_s))
            count = wire.read_some(target[done : done + want])
            cap.give_back(want - count)
            digest.update(target[done : done + count])
            meter.add(count)
            done += count
        return *digest.verdict(), loose

    def _hold(self, wire: PeerSocket) -> None:
        with self._changed:
            self._wires.add(wire)
            if self._ended:
                wire.shut()

    def _drop(self, wire: PeerSocket) -> None:
        with self._changed:
            self._wires.discard(wire)
        wire.close()
