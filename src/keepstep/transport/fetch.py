"""Fetching side: the future of each fetch, and the streams that carry the fetches from one peer.

Invariants:
- A fetch ends exactly once. The thread that ends it has released the caller's buffer before.
- A stream is connected when the first fetch needs it, and carries one request at a time.
- A failure in the middle of an answer (deadline, cancel, malformed data) costs the connection: the rest of that answer
  could not be separated from the next one.
- A fetch fails because of a broken connection only if that connection was new. One that broke while idle is replaced,
  since reading again does no harm.

Both transports use PendingFetch, so they cannot differ in when a future ends and when the buffer is free again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Protocol

import xxhash

from keepstep.transport.connection import PeerSocket, PeerSocketError
from keepstep.transport.frames import ANSWER_HEAD_BYTES, REFUSED, AnswerHead, PeerFrameError, RequestHead
from keepstep.transport.handshake import AuthError, SessionKeys
from keepstep.transport.interface import (
    CHECKSUM_BYTES,
    MAX_BODY_BYTES,
    MAX_QUEUED_FETCHES,
    MAX_REQUEST_BYTES,
    MAX_RETURNED_BODY_BYTES,
    Fetched,
    FetchError,
    FetchRequest,
)
from keepstep.transport.threads import ThreadGroup
from keepstep.transport.throttle import Traffic

log = logging.getLogger("keepstep")
NOT_STARTED = "no stream was free before the deadline"
NO_ANSWER = "no answer before the deadline"


class PendingFetch(Future[Fetched]):
    """The future of one fetch, and what a stream needs to carry it."""

    def __init__(self, request: FetchRequest) -> None:
        super().__init__()
        into, size_bytes = request.into, request.size_bytes
        if not 0 <= size_bytes <= (MAX_RETURNED_BODY_BYTES if into is None else MAX_BODY_BYTES):
            raise ValueError(f"a fetch of {size_bytes} bytes is out of bounds")
        if into is not None and (into.nbytes != size_bytes or not into.contiguous or (into.readonly and size_bytes)):
            raise ValueError(f"the buffer of {into.nbytes} bytes cannot receive {size_bytes}")
        if len(request.query) > MAX_REQUEST_BYTES:
            raise ValueError(f"a request of {len(request.query)} bytes is too long")
        if request.expect is not None and len(request.expect) != CHECKSUM_BYTES:
            raise ValueError("an xxh3_128 has 16 bytes")
        self.node_id = request.node_id
        self.query = bytes(request.query)
        self.into = into.cast("B") if into is not None and size_bytes else into
        self.size_bytes = size_bytes
        self.expect = request.expect
        self.deadline = time.monotonic() + request.timeout_s
        self._guard = threading.RLock()  # Reentrant: done-callbacks run inside `cancel`.
        self._interrupt: Callable[[], None] | None = None
        self.abandoned = False

    @property
    def exact(self) -> bool:
        return self.into is not None

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def begin(self) -> bool:
        """Mark it as running; called by the stream that carries it. False: it has ended already."""
        with self._guard:
            return not self.done() and self.set_running_or_notify_cancel()

    def interruptible(self, interrupt: Callable[[], None] | None) -> bool:
        """Set the call that stops the stream carrying this fetch. False: it was cancelled already."""
        with self._guard:
            self._interrupt = interrupt
            return not self.abandoned

    def cancel(self) -> bool:
        """Cancel, also while it runs: then the future ends when the stream has released the buffer."""
        with self._guard:
            if self.done():
                return False
            if super().cancel():
                self.into = None
                self.set_running_or_notify_cancel()
                return True
            self.abandoned = True
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()
        return True

    def target(self, size_bytes: int) -> tuple[memoryview, bytearray | None]:
        """The buffer for `size_bytes`: the caller's, or a new one, which is returned as well."""
        if self.into is not None:
            return self.into, None
        data = bytearray(size_bytes)
        return memoryview(data), data

    def succeed(self, size_bytes: int, checksum: bytes, data: bytearray | None) -> None:
        """End it with the verified bytes."""
        self.into = None
        self.interruptible(None)
        self.set_result(Fetched(size_bytes, checksum, None if data is None else bytes(data)))

    def fail(self, reason: str, *, lost: bool) -> None:
        """End it with an error. Called outside of `except`: a traceback would hold the buffer."""
        self.into = None
        self.interruptible(None)
        self.set_exception(CancelledError() if self.abandoned else FetchError(self.node_id, reason, lost=lost))

    def fail_waiting(self, reason: str, *, lost: bool) -> None:
        """End it with an error, unless a stream carries it: then that stream ends it."""
        if self.begin():
            self.fail(reason, lost=lost)


class BodyDigest:
    """xxh3_128 of a body, updated slice by slice while each is still in the cache."""

    def __init__(self, expect: bytes | None, sent: bytes) -> None:
        """`expect`: the caller's checksum; without one, the checksum that the server `sent` counts."""
        self._state = xxhash.xxh3_128()
        self._expect = expect if expect is not None else sent
        self.update = self._state.update

    def verify(self) -> tuple[bytes, str]:
        """The checksum of the bytes, and the error if it is not the expected one."""
        actual = self._state.digest()
        if actual == self._expect:
            return actual, ""
        return actual, f"the bytes do not match their checksum ({actual.hex()[:12]}, not {self._expect.hex()[:12]})"


class StreamDialer(Protocol):
    """Makes data connections. Two calls, so that the socket can be shut down while it connects."""

    def new_stream(self, keys: SessionKeys) -> PeerSocket:
        """A socket that is not connected yet. Raises PeerSocketError."""

    def connect_stream(self, connection: PeerSocket, keys: SessionKeys, deadline: float) -> None:
        """Connect and authenticate with the keys of a session. Raises PeerSocketError or AuthError."""


class FetchStreams:
    """All fetches from one peer in one session: a queue, and a few threads with a connection each."""

    def __init__(self, keys: SessionKeys, dialer: StreamDialer, traffic: Traffic, threads: ThreadGroup) -> None:
        self._keys = keys
        self._dialer = dialer
        self._traffic = traffic
        self._threads = threads
        self._changed = threading.Condition()
        self._waiting: deque[PendingFetch] = deque()
        self._connections: set[PeerSocket] = set()
        self._num_threads = 0
        self._num_idle = 0
        self._numbers = itertools.count(1)
        self._ended = ""

    def submit(self, fetch: PendingFetch) -> None:
        """Queue a fetch, or fail it at once."""
        refusal = ""
        with self._changed:
            if self._ended:
                refusal = self._ended
            elif len(self._waiting) >= MAX_QUEUED_FETCHES:
                refusal = f"{MAX_QUEUED_FETCHES} fetches wait already"
            else:
                self._waiting.append(fetch)
                self._add_thread()
                self._changed.notify()
        if refusal:
            fetch.fail_waiting(refusal, lost=bool(self._ended))

    def _add_thread(self) -> None:
        """Start another thread if there is work for it. If none can be started, fetches end by their deadlines."""
        if self._num_idle < len(self._waiting) and self._num_threads < self._traffic.num_streams:
            node_id = self._keys.peer.node_id
            try:
                self._threads.start(f"fetch-{node_id}-{self._num_threads}", self._work)
                self._num_threads += 1
            except RuntimeError as error:
                log.warning("no thread could be started for a stream to %s: %s", node_id, error)

    def expire(self, now: float) -> None:
        """Fail the fetches that have waited past their deadline. Called by the control thread."""
        late: list[PendingFetch] = []
        with self._changed:
            if any(fetch.deadline <= now or fetch.done() for fetch in self._waiting):
                on_time: deque[PendingFetch] = deque()
                for fetch in self._waiting:
                    (late if fetch.deadline <= now or fetch.done() else on_time).append(fetch)
                self._waiting = on_time
        for fetch in late:
            fetch.fail_waiting(NOT_STARTED, lost=True)

    def end(self, reason: str) -> None:
        """Fail all fetches and end all streams, because the session has ended."""
        with self._changed:
            self._ended = self._ended or reason
            waiting, self._waiting = self._waiting, deque()
            for connection in self._connections:
                connection.shut()
            self._changed.notify_all()
        for fetch in waiting:
            fetch.fail_waiting(reason, lost=True)

    def _work(self) -> None:
        connection: PeerSocket | None = None
        while (fetch := self._next()) is not None:
            if fetch.begin():
                connection = self._fetch(fetch, connection)
            del fetch
        if connection is not None:
            self._drop(connection)

    def _next(self) -> PendingFetch | None:
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._num_idle -= 1
            return None if self._ended else self._waiting.popleft()

    def _fetch(self, fetch: PendingFetch, connection: PeerSocket | None) -> PeerSocket | None:
        """Carry one fetch to its end. Returns the connection if it can be used again."""
        head = RequestHead(next(self._numbers), len(fetch.query), fetch.size_bytes, fetch.exact)
        for may_be_stale in (connection is not None, False):
            reason, lost, answered = "", True, False
            try:
                if connection is None:
                    connection = self._new_connection()
                    self._dialer.connect_stream(connection, self._keys, fetch.deadline)
                if not fetch.interruptible(connection.shut):
                    raise PeerSocketError("cancelled")
                answer = self._request(connection, fetch, head)
                answered = True
                self._receive(connection, fetch, answer)
                return connection
            except PeerSocketError as error:
                reason = error.reason if fetch.remaining_s > 0 else NO_ANSWER
            except AuthError as error:
                reason = str(error)
            except PeerFrameError as error:
                reason, lost = str(error), False
            if connection is not None:
                self._drop(connection)
                connection = None
            if not may_be_stale or answered or fetch.abandoned or self._ended or fetch.remaining_s <= 0:
                break
        self._traffic.counters.add("failed")
        fetch.fail(self._ended or reason, lost=lost or bool(self._ended))
        return None

    def _request(self, connection: PeerSocket, fetch: PendingFetch, head: RequestHead) -> AnswerHead:
        connection.write(head.pack() + fetch.query, deadline=fetch.deadline)
        # Until the answer begins only the fetch's own deadline counts: the server may need time to prepare it.
        return AnswerHead.unpack(connection.read_exact(ANSWER_HEAD_BYTES, deadline=fetch.deadline), head)

    def _receive(self, connection: PeerSocket, fetch: PendingFetch, answer: AnswerHead) -> None:
        counters = self._traffic.counters
        if answer.status == REFUSED:
            reason = connection.read_exact(answer.length, deadline=fetch.deadline).decode(errors="replace")
            counters.add("refused")
            fetch.fail(f"refused: {reason}", lost=False)
            return
        checksum, mismatch, data = self._receive_body(connection, fetch, answer)
        if mismatch:
            counters.add("bad_checksums")
            fetch.fail(mismatch, lost=False)
        else:
            counters.add("fetched")
            fetch.succeed(answer.length, checksum, data)

    def _receive_body(
        self, connection: PeerSocket, fetch: PendingFetch, answer: AnswerHead
    ) -> tuple[bytes, str, bytearray | None]:
        target, data = fetch.target(answer.length)
        digest = BodyDigest(fetch.expect, answer.checksum)
        cap, meter, timeout_s = self._traffic.cap_in, self._traffic.meter_in, self._traffic.timeout_s
        done = 0
        while done < answer.length:
            want = min(cap.slice_bytes, answer.length - done)
            if not cap.take(want, lambda: fetch.abandoned or bool(self._ended) or fetch.remaining_s <= 0):
                raise PeerSocketError("stopped")
            if (remaining_s := fetch.remaining_s) <= 0:
                raise PeerSocketError(NO_ANSWER, timed_out=True)
            connection.limit(min(timeout_s, remaining_s))
            count = connection.read_some(target[done : done + want])
            cap.give_back(want - count)
            digest.update(target[done : done + count])
            meter.add(count)
            done += count
        return *digest.verify(), data

    def _new_connection(self) -> PeerSocket:
        """A socket that `end` shuts down too, from before it connects."""
        connection = self._dialer.new_stream(self._keys)
        with self._changed:
            self._connections.add(connection)
            if self._ended:
                connection.shut()
        return connection

    def _drop(self, connection: PeerSocket) -> None:
        with self._changed:
            self._connections.discard(connection)
        connection.close()
