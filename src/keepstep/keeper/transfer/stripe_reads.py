"""Rows of chunks from several peers, a bounded number of them on their way at once.

A row is what one step of coding needs: the chunks of the other members of a stripe. Buffers are taken
from a small pool and go back to it, so memory is bounded by the window however large the state is.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.keeper.transfer.reach import ChunkClient
from keepstep.layout import CHUNK_BYTES
from keepstep.transport.interface import Fetched, FetchError, FetchRequest

MAX_DEPTH = 16
RETRY_S = 0.2
LOOK_S = 0.25


@dataclass(frozen=True)
class RetryPolicy:
    """When to stop asking one peer for one thing."""

    tries: int
    """answers that are refusals, or bytes that do not match"""
    lost_s: float
    """without any answer, and nothing else coming from that peer either"""


EXCHANGING = RetryPolicy(3, math.inf)
"""until somebody stops it: a peer that is away comes back or is replaced"""
RECOVERING = RetryPolicy(3, 2.0)
"""long enough for a link that is being made, short enough that a dead node does not hold a recovery up"""
ASKING = RetryPolicy(1, 2.0)
"""there is another way"""
HELPING = RetryPolicy(1, 0.0)
"""whoever asked for help can do without"""


@dataclass(frozen=True)
class ChunkSource:
    """One chunk and where it is."""

    node_id: str
    request: bytes
    size_bytes: int
    expect: bytes | None
    index: int = 0
    """its place in the code"""
    rank: int = -1
    instead: tuple[str, ...] = ()
    """nodes that have the same bytes, when this one does not answer"""


@dataclass
class StripeRead:
    """Chunks that are needed together, and what they are for."""

    sources: list[ChunkSource]
    purpose: Any
    buffers: list[memoryview] = field(default_factory=list)
    futures: list[Future[Fetched]] = field(default_factory=list)


class SourceFailedError(Exception):
    """A chunk could not be had."""

    def __init__(self, source: ChunkSource, error: FetchError) -> None:
        super().__init__(str(error))
        self.source, self.error = source, error


class StoppedError(Exception):
    """The work was given up from outside."""


class _Failures:
    """Of one peer, over one thing."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._patience = patience
        self._tries = 0
        self._lost_since = 0.0

    def too_many(self, error: FetchError, heard_at: float) -> bool:
        """After one more; `heard_at`: when something last came from that peer, for this or another request."""
        if not error.lost:
            self._tries += 1
            return self._tries >= self._patience.tries
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        return now - max(self._lost_since, heard_at) >= self._patience.lost_s


class StripeReader:
    """Fetches rows in order; `finish` is called for each when all its chunks are here, on the caller's thread."""

    def __init__(
        self,
        peers: ChunkClient,
        patience: RetryPolicy,
        *,
        window_bytes: int,
        timeout_s: float,
        stopped: threading.Event,
    ) -> None:
        self._peers, self._timeout_s, self._stopped, self.patience = peers, timeout_s, stopped, patience
        self._window = window_bytes
        self._free: list[bytearray] = []
        self._heard_at: dict[str, float] = {}
        self.moved_bytes = 0

    def run(self, rows: Iterable[StripeRead], finish: Callable[[StripeRead], None]) -> None:
        waiting: deque[StripeRead] = deque()
        iterator = iter(rows)
        done = False
        try:
            while True:
                while not done and len(waiting) < MAX_DEPTH and self._fits(waiting):
                    row = next(iterator, None)
                    if row is None:
                        done = True
                        break
                    waiting.append(row)
                    self._start(row)
                if not waiting:
                    return
                row = waiting[0]
                self._finish(row)
                waiting.popleft()
                finish(row)
                self._recycle(row)
        finally:
            for row in waiting:
                for future in row.futures:
                    future.cancel()
            for row in waiting:
                for future in row.futures:
                    _wait(future)

    def _fits(self, waiting: deque[StripeRead]) -> bool:
        used = sum(len(row.buffers) for row in waiting) * CHUNK_BYTES
        return not waiting or used + len(waiting[-1].buffers) * CHUNK_BYTES <= self._window

    def _start(self, row: StripeRead) -> None:
        for source in row.sources:
            buffer = self._free.pop() if self._free else bytearray(CHUNK_BYTES)
            view = memoryview(buffer)[: source.size_bytes]
            row.buffers.append(view)
            row.futures.append(self._ask(source, view))

    def _ask(self, source: ChunkSource, view: memoryview) -> Future[Fetched]:
        future = self._peers.fetch(
            FetchRequest(source.node_id, source.request, source.size_bytes, self._timeout_s, view, source.expect)
        )
        future.add_done_callback(lambda ended: self._note(source.node_id, ended))
        return future

    def _note(self, node_id: str, ended: Future[Fetched]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            self._heard_at[node_id] = time.monotonic()

    def _finish(self, row: StripeRead) -> None:
        for at in range(len(row.sources)):
            failures = _Failures(self.patience)
            while True:
                if self._stopped.is_set():
                    raise StoppedError
                source = row.sources[at]
                try:
                    row.futures[at].result(timeout=LOOK_S)
                    self.moved_bytes += source.size_bytes
                    break
                except TimeoutError:
                    if row.futures[at].done():
                        raise
                except CancelledError:
                    raise StoppedError from None
                except FetchError as error:
                    if failures.too_many(error, self._heard_at.get(source.node_id, 0.0)):
                        if not source.instead:
                            raise SourceFailedError(source, error) from error
                        first, *others = source.instead
                        row.sources[at] = replace(source, node_id=first, instead=tuple(others))
                        failures = _Failures(self.patience)
                    else:
                        self._stopped.wait(RETRY_S)
                    row.futures[at] = self._ask(row.sources[at], row.buffers[at])

    def _recycle(self, row: StripeRead) -> None:
        for view in row.buffers:
            buffer = view.obj
            view.release()
            if isinstance(buffer, bytearray):
                self._free.append(buffer)
        row.buffers = []


def _wait(future: Future[Fetched]) -> None:
    """Until it has ended the transport may still write into its buffer."""
    deadline = time.monotonic() + 60
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.005)


def fetch_bytes(
    peers: ChunkClient, patience: RetryPolicy, source: ChunkSource, *, timeout_s: float, stopped: threading.Event
) -> bytes:
    """A body of unknown size, at most `source.size_bytes`."""
    failures = _Failures(patience)
    while True:
        request = FetchRequest(source.node_id, source.request, source.size_bytes, timeout_s, expect=source.expect)
        future = peers.fetch(request)
        try:
            while True:
                if stopped.is_set():
                    future.cancel()
                    raise StoppedError
                try:
                    return future.result(timeout=LOOK_S).data or b""
                except TimeoutError:
                    if future.done():
                        raise
        except CancelledError:
            raise StoppedError from None
        except FetchError as error:
            if failures.too_many(error, 0.0):
                raise SourceFailedError(source, error) from error
            stopped.wait(RETRY_S)
