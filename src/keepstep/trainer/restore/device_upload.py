"""Host-to-device upload of a snapshot through a small page-locked buffer pool.

A new process has page-locked nothing, and page-locking the arena first takes longer than loading it: 2.3 s for 17 GB,
where the copy to the device takes 0.3 s. Bytes that are read through the descriptor into buffers that are locked
already reach the device at half the link's speed, and nothing has to be mapped.

    reader threads        free buffer -> preadv -> filled queue
    restoring thread      filled queue -> copy queued on the device's stream -> event passed -> free buffer

Reader threads call only preadv. When each of them queued its own copies, they contended for the GIL and the CUDA lock
for about 0.28 ms per piece (decision 14), so every CUDA call is made by the restoring thread.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from keepstep.arena.memfd import Memfd
from keepstep.trainer.memory.pinned import lock_pages, unlock_pages

PIECE_BYTES = 16 << 20
GAP_BYTES = 4096  # Up to this many bytes between two tensors are read with them: one read instead of two.
BUFFERS_PER_THREAD = 2  # One is filled while the device reads the other.
MAX_THREADS = 12


class UploadRange(NamedTuple):
    """Bytes at an offset of the arena, or in memory, and the flat device tensor that receives them."""

    source: int | torch.Tensor
    target: torch.Tensor


@dataclass
class UploadPiece:
    """What one buffer carries at a time."""

    source: int | torch.Tensor
    size_bytes: int = 0
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (offset in the buffer, target)

    def has_room(self, at: int, size_bytes: int) -> bool:
        """Whether bytes at this distance from the first one fit, close behind the last one."""
        return self.size_bytes <= at <= self.size_bytes + GAP_BYTES and at + size_bytes <= PIECE_BYTES

    def add(self, at: int, target: torch.Tensor) -> None:
        self.parts.append((at, target))
        self.size_bytes = at + target.numel()


FreeBuffers = queue.SimpleQueue[np.ndarray | None]  # None ends a reader
FilledBuffers = queue.SimpleQueue[tuple[UploadPiece, np.ndarray] | BaseException]
InFlight = deque[tuple[list[torch.cuda.Event], np.ndarray]]


def plan(ranges: Iterable[UploadRange]) -> list[UploadPiece]:
    """Cut large ranges and join neighbouring ones. Pure."""
    pieces: list[UploadPiece] = []
    inside = [item for item in ranges if isinstance(item.source, int)]
    for source, target in sorted(inside, key=lambda item: item.source):
        assert isinstance(source, int)
        for start in range(0, target.numel(), PIECE_BYTES):
            part, begin = target[start : start + PIECE_BYTES], source + start
            last = pieces[-1] if pieces else None
            at = begin - last.source if last is not None and isinstance(last.source, int) else -1
            if last is None or not last.has_room(at, part.numel()):
                pieces.append(last := UploadPiece(begin))
                at = 0
            last.add(at, part)
    for source, target in ranges:
        if isinstance(source, torch.Tensor):
            for start in range(0, target.numel(), PIECE_BYTES):
                pieces.append(UploadPiece(source[start : start + PIECE_BYTES]))
                pieces[-1].add(0, target[start : start + PIECE_BYTES])
    return pieces


def threads_for(local_world_size: int) -> int:
    """This rank's share of the cores; all that it may use where its affinity is restricted already."""
    own, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return own if own < total else own // local_world_size


class PinnedUploader:
    """The buffer pool of one restore."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = max(1, min(num_threads, MAX_THREADS))
        self._memory: mmap.mmap | None = mmap.mmap(-1, BUFFERS_PER_THREAD * self._num_threads * PIECE_BYTES)
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self._locking = threading.Lock()
        self._locked: bool | None = None  # None: not tried yet
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def lock(self) -> None:
        """Page-lock the buffers, from any thread. Where that fails copies are slower, not wrong."""
        with self._locking:
            if self._locked is None and self._memory is not None:
                self._locked = not lock_pages(self._address, self._bytes.size)

    def load(self, memfd: Memfd, ranges: Sequence[UploadRange]) -> None:
        """Upload all ranges, ordered after what their devices' streams hold. Returns when all bytes have arrived."""
        assert self._memory is not None, "closed: there is no buffer to wait for"
        self.lock()
        pieces = plan(ranges)
        todo = iter(pieces)  # next() on a list iterator is atomic under the GIL: each piece goes to one reader
        free: FreeBuffers = queue.SimpleQueue()
        filled: FilledBuffers = queue.SimpleQueue()
        for start in range(0, self._bytes.size, PIECE_BYTES):
            free.put(self._bytes[start : start + PIECE_BYTES])
        devices = {target.device for _, target in ranges if target.is_cuda}
        with self._current_streams(devices), ThreadPoolExecutor(self._num_threads, "keepstep-upload") as readers:
            try:
                for _ in range(self._num_threads):
                    readers.submit(_read_pieces, memfd, todo, free, filled)
                self._copy_pieces(len(pieces), free, filled)
            finally:  # after an error or Ctrl-C too: no reader outlives this call
                deque(todo, maxlen=0)
                for _ in range(self._num_threads):
                    free.put(None)

    def _copy_pieces(self, count: int, free: FreeBuffers, filled: FilledBuffers) -> None:
        """Queue a copy of each filled buffer and recycle the buffer when it is done. Raises what a reader raised."""
        in_flight: InFlight = deque()
        while count:
            try:
                item = filled.get(block=not in_flight)
            except queue.Empty:
                free.put(_wait_for_oldest(in_flight))
                continue
            if isinstance(item, BaseException):
                raise item
            piece, buffer = item
            in_flight.append((_copy_piece(piece, buffer, self._streams), buffer))
            count -= 1
            while in_flight and all(event.query() for event in in_flight[0][0]):  # type: ignore[no-untyped-call]
                free.put(_wait_for_oldest(in_flight))
        while in_flight:
            _wait_for_oldest(in_flight)

    @contextmanager
    def _current_streams(self, devices: set[torch.device]) -> Iterator[None]:
        """Make one stream per device current, ordered after the caller's; wait for each of them at the end."""
        with ExitStack() as stack:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream = self._streams[device]
                stream.wait_event(torch.cuda.current_stream(device).record_event())
                stack.callback(stream.synchronize)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def close(self) -> None:
        for stream in self._streams.values():  # load() may have been interrupted while it waited
            stream.synchronize()
        with self._locking:
            if self._locked:
                unlock_pages([self._address])
            self._bytes, self._memory = self._bytes[:0].copy(), None


def _read_pieces(memfd: Memfd, todo: Iterator[UploadPiece], free: FreeBuffers, filled: FilledBuffers) -> None:
    try:
        for piece in todo:
            buffer = free.get()
            if buffer is None:
                return
            if isinstance(piece.source, int):
                memfd.read_into(piece.source, buffer[: piece.size_bytes].data)
            else:
                np.copyto(buffer[: piece.size_bytes], piece.source.numpy())
            filled.put((piece, buffer))
    except BaseException as error:  # raised again by the restoring thread
        filled.put(error)


def _copy_piece(
    piece: UploadPiece, buffer: np.ndarray, streams: dict[torch.device, torch.cuda.Stream]
) -> list[torch.cuda.Event]:
    """Queue the copies of one buffer; returns the events that say when they are done."""
    source = torch.from_numpy(buffer)
    for at, target in piece.parts:
        target.copy_(source[at : at + target.numel()], non_blocking=True)
    used = {target.device for _, target in piece.parts if target.is_cuda}
    return [streams[device].record_event() for device in used]


def _wait_for_oldest(in_flight: InFlight) -> np.ndarray:
    """Wait for the oldest copy and return its buffer, which is free then."""
    events, buffer = in_flight[0]
    for event in events:
        event.synchronize()
    in_flight.popleft()
    return buffer


class UploadQueue:
    """The uploads of one snapshot: collected by `add`, carried out by `run`, which may be called more than once."""

    def __init__(self, uploader: PinnedUploader, memfd: Memfd, payload_offset: int) -> None:
        self._uploader, self._memfd, self._payload_offset = uploader, memfd, payload_offset
        self._ranges: list[UploadRange] = []

    def accepts(self, target: torch.Tensor) -> bool:
        return target.is_cuda

    def add(self, source: int | torch.Tensor, target: torch.Tensor) -> None:
        """`source`: an offset in the payload of the slot, or bytes elsewhere in memory. `target`: flat."""
        inside = isinstance(source, int)
        self._ranges.append(UploadRange(self._payload_offset + source if inside else source, target))

    def run(self) -> None:
        ranges, self._ranges = self._ranges, []
        if ranges:
            self._uploader.load(self._memfd, ranges)
