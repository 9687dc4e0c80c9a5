"""Bytes of a snapshot to devices, through a little page-locked memory that several threads fill.

A process that has just begun has page-locked nothing, and to lock the memory of a snapshot takes longer than to load
it: 2.3 s for 17 GB, where the copy to the device takes 0.3 s. Read through the descriptor into memory that is locked,
they pass at half the speed of the link, and nothing has to be mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch

from keepstep.arena.memfd import Memfd
from keepstep.trainer.memory.pinned import lock_pages, unlock_pages

PIECE_BYTES = 16 << 20
GAP_BYTES = 4096
"""bytes between two tensors that are read with them rather than apart"""
BUFFERS = 2
"""for each thread: one is filled while another leaves"""
MOST_THREADS = 12


class UploadRange(NamedTuple):
    """Bytes, by where they lie in the arena or as they are in memory, and where on a device they go."""

    source: int | torch.Tensor
    target: torch.Tensor


@dataclass
class UploadPiece:
    """What passes through one buffer at once."""

    source: int | torch.Tensor
    size_bytes: int = 0
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(place in the buffer, where it goes)"""

    def has_room(self, at: int, size_bytes: int) -> bool:
        """For bytes that lie this far behind its first, with little between them and its last."""
        return self.size_bytes <= at <= self.size_bytes + GAP_BYTES and at + size_bytes <= PIECE_BYTES

    def add(self, at: int, target: torch.Tensor) -> None:
        self.parts.append((at, target))
        self.size_bytes = at + target.numel()


def plan(stretches: Iterable[UploadRange]) -> list[UploadPiece]:
    """Cut what is large and join what lies side by side. Pure."""
    pieces: list[UploadPiece] = []
    inside = [stretch for stretch in stretches if isinstance(stretch.source, int)]
    for source, target in sorted(inside, key=lambda stretch: stretch.source):
        assert isinstance(source, int)
        for start in range(0, target.numel(), PIECE_BYTES):
            part, begin = target[start : start + PIECE_BYTES], source + start
            last = pieces[-1] if pieces else None
            at = begin - last.source if last is not None and isinstance(last.source, int) else -1
            if last is None or not last.has_room(at, part.numel()):
                pieces.append(last := UploadPiece(begin))
                at = 0
            last.add(at, part)
    for source, target in stretches:
        if isinstance(source, torch.Tensor):
            for start in range(0, target.numel(), PIECE_BYTES):
                pieces.append(UploadPiece(source[start : start + PIECE_BYTES]))
                pieces[-1].add(0, target[start : start + PIECE_BYTES])
    return pieces


def threads_for(local_world_size: int) -> int:
    """A rank's part of the cores; all that it may use where it was given its own."""
    own, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return own if own < there else own // local_world_size


class PinnedUploader:
    """The memory, for the time of one restore."""

    def __init__(self, threads: int) -> None:
        self._threads = max(1, min(threads, MOST_THREADS))
        size = BUFFERS * self._threads * PIECE_BYTES
        self._memory: mmap.mmap | None = mmap.mmap(-1, size)
        with contextlib.suppress(OSError):  # a kernel without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self._locking = threading.Lock()
        self._locked: bool | None = None
        """None: not tried yet"""
        self._used: list[_Sending] = []

    def lock(self) -> None:
        """From any thread, once. Where it fails copies are slower, not wrong."""
        with self._locking:
            if self._locked is None and self._memory is not None:
                self._locked = not lock_pages(self._address, self._bytes.size)

    def load(self, segment: Memfd, stretches: Sequence[UploadRange]) -> None:
        """Returns when all of it is on its device, behind what was queued there before."""
        assert self._memory is not None, "closed: there is no buffer to wait for"
        self.lock()
        filling = _Filling(segment, plan(stretches), self._buffers(), self._threads)
        sending = _Sending({target.device for _, target in stretches if target.is_cuda})
        self._used.append(sending)
        with sending:
            try:
                filling.start()
                _pass_on(filling, sending)
            finally:  # Ctrl-C, or no thread to be had: nothing is written once this is over
                filling.end()

    def _buffers(self) -> list[np.ndarray]:
        return [self._bytes[at : at + PIECE_BYTES] for at in range(0, self._bytes.size, PIECE_BYTES)]

    def close(self) -> None:
        for sending in self._used:  # once more: it may have been interrupted while it waited
            sending.wait_for_all()
        with self._locking:
            if self._locked:
                unlock_pages([self._address])
            self._bytes, self._memory = self._bytes[:0].copy(), None


def _pass_on(filling: _Filling, sending: _Sending) -> None:
    """From those who read to the devices, and the buffers back again. Raises what went wrong in reading."""
    while filling.num_busy:
        try:
            found = filling.filled.get(block=not sending.on_their_way)
        except queue.Empty:
            filling.free.put(sending.wait_for_one())
            continue
        if isinstance(found, BaseException):
            raise found
        if found is None:
            filling.num_busy -= 1
            continue
        sending.send(*found)
        while sending.has_arrived():
            filling.free.put(sending.wait_for_one())


class _Filling:
    """Threads that read pieces into free buffers, and do nothing else: what they did besides, each of a dozen would
    have to wait for, in the interpreter and in CUDA, longer than its piece takes to read."""

    def __init__(self, segment: Memfd, pieces: list[UploadPiece], buffers: list[np.ndarray], threads: int) -> None:
        self._segment = segment
        self._todo = iter(pieces)
        """gives each to one thread: it runs outside the interpreter's loop"""
        self.free: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        """None: there will be no more"""
        self.filled: queue.SimpleQueue[tuple[UploadPiece, np.ndarray] | BaseException | None] = queue.SimpleQueue()
        """an error, or None, from each thread that is done"""
        for buffer in buffers:
            self.free.put(buffer)
        self._threads = [
            threading.Thread(target=self._fill, name=f"keepstep-ring-{i}", daemon=True) for i in range(threads)
        ]  # daemons: a second Ctrl-C that comes while they end must not leave a process that cannot
        self.num_busy = 0
        self._ended = False

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
            self.num_busy += 1

    def end(self) -> None:
        self._ended = True
        for _ in self._threads:
            self.free.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _fill(self) -> None:
        ended: BaseException | None = None
        try:
            for piece in self._todo:
                buffer = self.free.get()
                if buffer is None or self._ended:
                    break
                self._read(piece, buffer[: piece.size_bytes])
                self.filled.put((piece, buffer))
        except BaseException as error:
            ended = error
        self.filled.put(ended)

    def _read(self, piece: UploadPiece, buffer: np.ndarray) -> None:
        if isinstance(piece.source, int):
            self._segment.read_into(piece.source, buffer.data)
        else:
            np.copyto(buffer, piece.source.numpy())


class _Sending:
    """Copies to devices, queued by one thread on one stream for each of them, and the buffers that they still read."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
        self._sent: deque[tuple[list[torch.cuda.Event], np.ndarray]] = deque()
        self._current = contextlib.ExitStack()

    @property
    def on_their_way(self) -> int:
        return len(self._sent)

    def send(self, piece: UploadPiece, buffer: np.ndarray) -> None:
        there = torch.from_numpy(buffer)
        for at, target in piece.parts:
            target.copy_(there[at : at + target.numel()], non_blocking=True)
        used = {target.device for _, target in piece.parts if target.is_cuda}
        self._sent.append(([self._streams[device].record_event() for device in used], buffer))

    def has_arrived(self) -> bool:
        """Whether the oldest has: its buffer is free."""
        return bool(self._sent) and all(event.query() for event in self._sent[0][0])  # type: ignore[no-untyped-call]

    def wait_for_one(self) -> np.ndarray:
        """The buffer of the oldest."""
        events, buffer = self._sent[0]
        for event in events:
            event.synchronize()
        self._sent.popleft()
        return buffer

    def wait_for_all(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as entered:
            for device, stream in self._streams.items():
                stream.wait_event(torch.cuda.current_stream(device).record_event())
                entered.callback(stream.synchronize)  # though another one failed: what was queued reads the buffers
                entered.enter_context(torch.cuda.stream(stream))
            self._current = entered.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._current.close()


class UploadPlan:
    """What is to be loaded of one snapshot; `run` may be called more than once."""

    def __init__(self, ring: PinnedUploader, segment: Memfd, payload_offset: int) -> None:
        self._ring, self._segment, self._payload_offset = ring, segment, payload_offset
        self._stretches: list[UploadRange] = []

    def takes(self, target: torch.Tensor) -> bool:
        return target.is_cuda

    def add(self, source: int | torch.Tensor, target: torch.Tensor) -> None:
        """`source`: in the payload of the slot, or bytes that lie elsewhere. `target`: flat."""
        inside = isinstance(source, int)
        self._stretches.append(UploadRange(self._payload_offset + source if inside else source, target))

    def run(self) -> None:
        stretches, self._stretches = self._stretches, []
        if stretches:
            self._ring.load(self._segment, stretches)
