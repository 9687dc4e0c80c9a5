"""Chunks from any node, this one included, read together as coding needs them.

A read is what one step of coding needs: the chunks of the other members of a stripe. A bounded number of reads is in
flight at once. Buffers come from a small pool and return to it, so memory is bounded by the window however large the
state is.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import xxhash

from keepstep.keeper.transfer.chunk_store import ChunkRequest, ChunkStore
from keepstep.layout import CHUNK_BYTES
from keepstep.transport.interface import Body, Fetched, FetchError, FetchRequest, Refusal, Transport

MAX_READS = 16  # in flight
RETRY_S = 0.2
POLL_S = 0.25  # how often a wait checks whether it was stopped
ABANDON_S = 60.0  # until a cancelled fetch has let go of its buffer

log = logging.getLogger("keepstep.keeper")
_decoder = msgspec.msgpack.Decoder(ChunkRequest)


@dataclass(frozen=True)
class RetryPolicy:
    """When to stop asking one node for one chunk."""

    tries: int  # answers that are refusals, or bytes that do not match
    lost_s: float  # without any answer, and nothing else received from that node either


EXCHANGING = RetryPolicy(3, math.inf)  # until stopped: a peer that cannot be reached returns or is replaced
# Long enough for a link that is being made, short enough that a dead node does not hold a recovery up.
RECOVERING = RetryPolicy(3, 2.0)
ASKING = RetryPolicy(1, 2.0)  # there is another way to get it
HELPING = RetryPolicy(1, 0.0)  # the node that asked for help can do without


@dataclass(frozen=True)
class FetchSettings:
    """Memory for chunks in flight, and how long a connection may move no byte."""

    window_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class ChunkSource:
    """One chunk and the node that sends it."""

    node_id: str
    request: bytes
    size_bytes: int
    expect: bytes | None
    index: int = 0  # its place in the code
    rank: int = -1
    instead: tuple[str, ...] = ()  # nodes that hold the same bytes: asked in turn when this one refuses or is silent


@dataclass
class StripeRead:
    """Chunks that are needed together, and what they are for."""

    sources: list[ChunkSource]
    purpose: Any
    buffers: list[memoryview] = field(default_factory=list)
    futures: list[Future[Fetched]] = field(default_factory=list)


class SourceFailedError(Exception):
    """A chunk could not be fetched."""

    def __init__(self, source: ChunkSource, error: FetchError) -> None:
        super().__init__(str(error))
        self.source, self.error = source, error


class StoppedError(Exception):
    """The work was stopped from outside."""


class ChunkClient:
    """Fetches chunks: from the store of this node, or from a peer."""

    def __init__(self, store: ChunkStore, transport: Transport) -> None:
        self.node_id, self.store, self._transport = store.node_id, store, transport

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        """As `Transport.fetch`; a chunk of this node is read at once."""
        if request.node_id != self.node_id:
            return self._transport.fetch(request)
        future: Future[Fetched] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._read(request))
        except FetchError as error:
            future.set_exception(error)
        return future

    def _read(self, request: FetchRequest) -> Fetched:
        into, size_bytes = request.into, request.size_bytes
        try:
            body = self.store.read(_decoder.decode(request.query))
        except Refusal as refusal:
            raise FetchError(self.node_id, str(refusal), lost=False) from refusal
        try:
            if body.size_bytes > size_bytes or (into is not None and body.size_bytes != size_bytes):
                raise FetchError(self.node_id, f"{body.size_bytes} bytes where {size_bytes} are wanted", lost=False)
            buffer = into if into is not None else memoryview(bytearray(body.size_bytes))
            _fill(body, buffer, self.node_id)
        finally:
            if body.release is not None:
                body.release()
        digest = xxhash.xxh3_128_digest(buffer)
        if digest != (request.expect or body.checksum):
            raise FetchError(self.node_id, "the bytes do not match their checksum", lost=False)
        return Fetched(len(buffer), digest, None if into is not None else bytes(buffer))


def _fill(body: Body, buffer: memoryview, node_id: str) -> None:
    if body.data is not None:
        buffer[:] = body.data
        return
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(body.fd, [buffer[done:]], body.offset + done)
        except OSError as error:
            raise FetchError(node_id, f"memory of this node cannot be read: {error.strerror}", lost=False) from error
        if count <= 0:
            raise FetchError(node_id, "memory of this node ends early", lost=False)
        done += count


class _Failures:
    """Failures of one node to send one chunk."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._tries = 0
        self._lost_since = 0.0

    def add(self, error: FetchError, answered_at: float) -> bool:
        """Whether this one is too many. `answered_at`: when that node last sent anything that this reader asked for."""
        if not error.lost:
            self._tries += 1
            return self._tries >= self._policy.tries
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        return now - max(self._lost_since, answered_at) >= self._policy.lost_s


class StripeReader:
    """Performs reads in order, a bounded number ahead."""

    def __init__(
        self, client: ChunkClient, policy: RetryPolicy, settings: FetchSettings, stopped: threading.Event
    ) -> None:
        self._client, self._settings, self._stopped, self.policy = client, settings, stopped, policy
        self._free: list[bytearray] = []
        self._answered_at: dict[str, float] = {}
        self._failed: set[str] = set()  # nodes that failed a chunk: others are asked first
        self.moved_bytes = 0

    def run(self, reads: Iterable[StripeRead]) -> Generator[StripeRead]:
        """Yield each read when all its chunks are read; its buffers are used again after the next one is requested.

        Close the iterator (`contextlib.closing`): that cancels what is still in flight. Raises SourceFailedError when a
        chunk cannot be fetched, StoppedError when stopped.
        """
        waiting: deque[StripeRead] = deque()
        iterator = iter(reads)
        done = False
        try:
            while True:
                while not done and len(waiting) < MAX_READS and self._fits(waiting):
                    read = next(iterator, None)
                    if read is None:
                        done = True
                        break
                    waiting.append(read)
                    self._start(read)
                if not waiting:
                    return
                read = waiting[0]
                self._finish(read)
                waiting.popleft()
                yield read
                self._recycle(read)
        finally:
            for read in waiting:
                for future in read.futures:
                    future.cancel()
            for read in waiting:
                for future in read.futures:
                    _wait(future)

    def _fits(self, waiting: deque[StripeRead]) -> bool:
        used = sum(len(read.buffers) for read in waiting) * CHUNK_BYTES
        return not waiting or used + len(waiting[-1].buffers) * CHUNK_BYTES <= self._settings.window_bytes

    def _start(self, read: StripeRead) -> None:
        for at, source in enumerate(read.sources):
            buffer = self._free.pop() if self._free else bytearray(CHUNK_BYTES)
            view = memoryview(buffer)[: source.size_bytes]
            while source.node_id in self._failed and source.instead:
                source = _next(source)
            read.sources[at] = source
            read.buffers.append(view)
            read.futures.append(self._ask(source, view))

    def _ask(self, source: ChunkSource, view: memoryview) -> Future[Fetched]:
        timeout_s = self._settings.timeout_s
        future = self._client.fetch(
            FetchRequest(source.node_id, source.request, source.size_bytes, timeout_s, view, source.expect)
        )
        future.add_done_callback(lambda ended: self._note(source.node_id, ended))
        return future

    def _note(self, node_id: str, ended: Future[Fetched]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            self._answered_at[node_id] = time.monotonic()

    def _finish(self, read: StripeRead) -> None:
        for at in range(len(read.sources)):
            failures = _Failures(self.policy)
            while (error := self._wait_for(read.futures[at])) is not None:
                source = read.sources[at]
                too_many = failures.add(error, self._answered_at.get(source.node_id, 0.0))
                if source.instead and (too_many or source.node_id in self._failed):
                    self._failed.add(source.node_id)
                    source = read.sources[at] = _next(source)
                    failures = _Failures(self.policy)
                    log.info("a node failed, another is asked", extra={"peer": error.node_id, "reason": error.reason})
                elif too_many:
                    raise SourceFailedError(source, error) from error
                else:
                    self._stopped.wait(RETRY_S)
                read.futures[at] = self._ask(source, read.buffers[at])
            self.moved_bytes += read.sources[at].size_bytes

    def _wait_for(self, future: Future[Fetched]) -> FetchError | None:
        """The error that a fetch ended with; None when its chunk is read."""
        while True:
            if self._stopped.is_set():
                raise StoppedError
            try:
                future.result(timeout=POLL_S)
            except TimeoutError:
                if future.done():
                    raise
            except CancelledError:
                raise StoppedError from None
            except FetchError as error:
                return error
            else:
                return None

    def _recycle(self, read: StripeRead) -> None:
        for view in read.buffers:
            buffer = view.obj
            view.release()
            if isinstance(buffer, bytearray):
                self._free.append(buffer)
        read.buffers = []


def _next(source: ChunkSource) -> ChunkSource:
    """The same chunk from the next node that holds it."""
    first, *others = source.instead
    return replace(source, node_id=first, instead=tuple(others))


def _wait(future: Future[Fetched]) -> None:
    """Until it has ended the transport may still write into its buffer."""
    deadline = time.monotonic() + ABANDON_S
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.005)


def fetch_bytes(
    client: ChunkClient, policy: RetryPolicy, source: ChunkSource, *, timeout_s: float, stopped: threading.Event
) -> bytes:
    """A body of unknown size, at most `source.size_bytes`."""
    failures = _Failures(policy)
    while True:
        request = FetchRequest(source.node_id, source.request, source.size_bytes, timeout_s, expect=source.expect)
        future = client.fetch(request)
        try:
            while True:
                if stopped.is_set():
                    future.cancel()
                    raise StoppedError
                try:
                    return future.result(timeout=POLL_S).data or b""
                except TimeoutError:
                    if future.done():
                        raise
        except CancelledError:
            raise StoppedError from None
        except FetchError as error:
            if failures.add(error, 0.0):
                raise SourceFailedError(source, error) from error
            stopped.wait(RETRY_S)
