"""Bytes of a snapshot to devices, through a little page-locked memory that several threads fill.

A process that has just begun has page-locked nothing, and to lock the memory of a snapshot takes longer than to load
it: 2.3 s for 17 GB, where the copy to the device takes 0.3 s. Read through the descriptor into memory that is locked,
they pass nearly as fast as the link takes them, and nothing has to be mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch

from keepstep.arena.segment import Segment
from keepstep.trainer.cuda_host import lock_pages, unlock_pages

PIECE_BYTES = 16 << 20
GAP_BYTES = 4096
"""bytes between two tensors that are read with them rather than apart"""
BUFFERS = 2
"""per thread: one is filled while the other leaves"""
MOST_THREADS = 12


class Stretch(NamedTuple):
    """Bytes, by where they lie in the arena or as they are in memory, and where on a device they go."""

    source: int | torch.Tensor
    target: torch.Tensor


@dataclass
class Piece:
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


def plan(stretches: Iterable[Stretch]) -> list[Piece]:
    """Cut what is large and join what lies side by side. Pure."""
    pieces: list[Piece] = []
    inside = [stretch for stretch in stretches if isinstance(stretch.source, int)]
    for source, target in sorted(inside, key=lambda stretch: stretch.source):
        assert isinstance(source, int)
        for start in range(0, target.numel(), PIECE_BYTES):
            part, begin = target[start : start + PIECE_BYTES], source + start
            last = pieces[-1] if pieces else None
            at = begin - last.source if last is not None and isinstance(last.source, int) else -1
            if last is None or not last.has_room(at, part.numel()):
                pieces.append(last := Piece(begin))
                at = 0
            last.add(at, part)
    for source, target in stretches:
        if isinstance(source, torch.Tensor):
            for start in range(0, target.numel(), PIECE_BYTES):
                pieces.append(Piece(source[start : start + PIECE_BYTES]))
                pieces[-1].add(0, target[start : start + PIECE_BYTES])
    return pieces


def threads_for(local_world_size: int) -> int:
    """A rank's part of the cores; all that it may use where it was given its own."""
    own, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return own if own < there else own // local_world_size


class Ring:
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

    def lock(self) -> None:
        """From any thread, once. Where it fails copies are slower, not wrong."""
        with self._locking:
            if self._locked is None and self._memory is not None:
                self._locked = not lock_pages(self._address, self._bytes.size)

    def load(self, segment: Segment, stretches: Sequence[Stretch]) -> None:
        """Returns when all of it is on its device, behind what was queued there before."""
        self.lock()
        pieces, taking = iter(plan(stretches)), threading.Lock()
        behind = {target.device: _mark(target.device) for _, target in stretches if target.is_cuda}
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                with _Hand(segment, self._buffers(index), behind) as hand:
                    while (piece := _next(pieces, taking)) is not None and not failures:
                        hand.move(piece)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,), name=f"keepstep-ring-{i}") for i in range(self._threads)]
        begun: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                begun.append(thread)
            for thread in begun:
                thread.join()
        except BaseException as error:  # Ctrl-C, or no thread to be had: nothing is written once this is over
            failures.append(error)
        finally:
            for thread in begun:
                thread.join()
        if failures:
            raise failures[0]

    def _buffers(self, index: int) -> list[np.ndarray]:
        first = BUFFERS * index
        return [self._bytes[at * PIECE_BYTES : (at + 1) * PIECE_BYTES] for at in range(first, first + BUFFERS)]

    def close(self) -> None:
        with self._locking:
            if self._locked:
                unlock_pages([self._address])
            self._bytes, self._memory = self._bytes[:0].copy(), None


class _Hand:
    """One thread's buffers and streams."""

    def __init__(
        self, segment: Segment, buffers: list[np.ndarray], behind: dict[torch.device, torch.cuda.Event]
    ) -> None:
        self._segment, self._buffers = segment, buffers
        self._left: list[list[torch.cuda.Event]] = [[] for _ in buffers]
        """by buffer: after them it may be filled again"""
        self._turn = 0
        self._streams = {device: torch.cuda.Stream(device) for device in behind}  # type: ignore[no-untyped-call]
        for device, event in behind.items():
            self._streams[device].wait_event(event)

    def move(self, piece: Piece) -> None:
        self._turn = (self._turn + 1) % len(self._buffers)
        for event in self._left[self._turn]:
            event.synchronize()
        buffer = self._buffers[self._turn][: piece.size_bytes]
        if isinstance(piece.source, int):
            self._segment.read_into(piece.source, buffer.data)
        else:
            np.copyto(buffer, piece.source.numpy())
        there = torch.from_numpy(buffer)
        for at, target in piece.parts:
            with torch.cuda.stream(self._streams.get(target.device)):
                target.copy_(there[at : at + target.numel()], non_blocking=True)
        used = {target.device for _, target in piece.parts if target.is_cuda}
        self._left[self._turn] = [self._streams[device].record_event() for device in used]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """However it ends: what was queued reads the buffers."""
        for stream in self._streams.values():
            stream.synchronize()


class Loads:
    """What is to be loaded of one snapshot; `run` may be called more than once."""

    def __init__(self, ring: Ring, segment: Segment, payload_offset: int) -> None:
        self._ring, self._segment, self._payload_offset = ring, segment, payload_offset
        self._stretches: list[Stretch] = []

    def takes(self, target: torch.Tensor) -> bool:
        return target.is_cuda

    def add(self, source: int | torch.Tensor, target: torch.Tensor) -> None:
        """`source`: in the payload of the slot, or bytes that lie elsewhere. `target`: flat."""
        inside = isinstance(source, int)
        self._stretches.append(Stretch(self._payload_offset + source if inside else source, target))

    def run(self) -> None:
        stretches, self._stretches = self._stretches, []
        if stretches:
            self._ring.load(self._segment, stretches)


def _next(pieces: Iterator[Piece], taking: threading.Lock) -> Piece | None:
    with taking:
        return next(pieces, None)


def _mark(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
