"""Rows of chunks from several peers, a bounded number of them on their way at once.

A row is what one step of coding needs: the chunks of the other members of a stripe. Buffers are taken
from a small pool and go back to it, so memory is bounded by the window however large the state is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from keepstep.layout import CHUNK_BYTES
from keepstep.peers.base import Fetched, FetchError, Peers

MAX_DEPTH = 16
RETRY_S = 0.2
# A peer that lives and sends what does not match, or refuses, is asked again this often.
TRIES = 3


@dataclass(frozen=True)
class Source:
    """One chunk and where it is."""

    node_id: str
    request: bytes
    size_bytes: int
    expect: bytes | None
    index: int = 0
    """its place in the code"""
    rank: int = -1


@dataclass
class Row:
    """Chunks that are needed together, and what they are for."""

    sources: list[Source]
    purpose: Any
    buffers: list[memoryview] = field(default_factory=list)
    futures: list[Future[Fetched]] = field(default_factory=list)


class SourceFailedError(Exception):
    """A chunk could not be had."""

    def __init__(self, source: Source, error: FetchError) -> None:
        super().__init__(str(error))
        self.source, self.error = source, error


class StoppedError(Exception):
    """The work was given up from outside."""


class Rows:
    """Fetches rows in order; `finish` is called for each when all its chunks are here, on the caller's thread."""

    def __init__(
        self, peers: Peers, *, window_bytes: int, timeout_s: float, stopped: threading.Event, patient: bool
    ) -> None:
        """`patient`: a peer that cannot be reached is asked again until somebody stops it."""
        self._peers, self._timeout_s, self._stopped, self._patient = peers, timeout_s, stopped, patient
        self._window = window_bytes
        self._free: list[bytearray] = []
        self.moved_bytes = 0

    def run(self, rows: Iterable[Row], finish: Callable[[Row], None]) -> None:
        waiting: deque[Row] = deque()
        iterator = iter(rows)
        done = False
        try:
            while True:
                while not done and len(waiting) < MAX_DEPTH and self._fits(waiting):
                    row = next(iterator, None)
                    if row is None:
                        done = True
                        break
                    self._start(row)
                    waiting.append(row)
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

    def _fits(self, waiting: deque[Row]) -> bool:
        used = sum(len(row.buffers) for row in waiting) * CHUNK_BYTES
        return not waiting or used + len(waiting[-1].buffers) * CHUNK_BYTES <= self._window

    def _start(self, row: Row) -> None:
        for source in row.sources:
            buffer = self._free.pop() if self._free else bytearray(CHUNK_BYTES)
            view = memoryview(buffer)[: source.size_bytes]
            row.buffers.append(view)
            row.futures.append(self._ask(source, view))

    def _ask(self, source: Source, view: memoryview) -> Future[Fetched]:
        return self._peers.fetch(
            source.node_id, source.request, view, size_bytes=source.size_bytes, expect=source.expect,
            timeout_s=self._timeout_s,
        )  # fmt: skip

    def _finish(self, row: Row) -> None:
        for at, source in enumerate(row.sources):
            tries = 0
            while True:
                if self._stopped.is_set():
                    raise StoppedError
                try:
                    row.futures[at].result(timeout=0.25)
                    self.moved_bytes += source.size_bytes
                    break
                except TimeoutError:
                    if row.futures[at].done():
                        raise
                except CancelledError:
                    raise StoppedError from None
                except FetchError as error:
                    tries += not (error.lost and self._patient)
                    if tries >= TRIES:
                        raise SourceFailedError(source, error) from error
                    self._stopped.wait(RETRY_S)
                    row.futures[at] = self._ask(source, row.buffers[at])

    def _recycle(self, row: Row) -> None:
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
    peers: Peers, node_id: str, request: bytes, *, most_bytes: int, timeout_s: float, stopped: threading.Event
) -> bytes:
    """A body of unknown size, at most so long. Asked again until stopped when the peer cannot be reached."""
    tries = 0
    while True:
        if stopped.is_set():
            raise StoppedError
        future = peers.fetch(node_id, request, None, size_bytes=most_bytes, expect=None, timeout_s=timeout_s)
        try:
            found = future.result(timeout=timeout_s + 5)
            return found.data or b""
        except CancelledError:
            raise StoppedError from None
        except FetchError as error:
            tries += 1
            if not error.lost and tries >= TRIES:
                raise SourceFailedError(Source(node_id, request, 0, None), error) from error
            if error.lost and tries >= 50:
                raise SourceFailedError(Source(node_id, request, 0, None), error) from error
            stopped.wait(RETRY_S)
