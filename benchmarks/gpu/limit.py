"""The limits beside which the figures stand: a plain copy into registered memory, alone and beside training.

The memory is of the arena's kind, a memfd that was faulted in and registered with `cudaHostRegister`, and copies are of
64 MiB on a stream of their own. Beside training with no dependency on it, such a copy is the floor of any snapshot.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from measuring import Device

from keepstep.arena.memfd import Mapping, Memfd

PIECE_BYTES = 64 << 20
REPEATS = 3
PREFAULT_THREADS = 8


class Ring:
    """Registered host memory that copies go through again and again, and the stream they go on."""

    def __init__(self, memory: torch.Tensor, device: Device) -> None:
        self.memory, self._device = memory, device
        self._stream = torch.cuda.Stream() if device.is_cuda else None
        self._piece_bytes = min(PIECE_BYTES, memory.numel())
        self._at = 0

    def copy(self, sources: Sequence[torch.Tensor], *, to_device: bool = False) -> int:
        """Issue copies of all these bytes, in pieces. Returns how many there are; nothing is waited for."""
        total = 0
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for source in sources:
                flat = source.reshape(-1).view(torch.uint8)
                for start in range(0, flat.numel(), self._piece_bytes):
                    piece = flat[start : start + self._piece_bytes]
                    place = self._next(piece.numel())
                    target, given = (piece, place) if to_device else (place, piece)
                    target.copy_(given, non_blocking=True)
                    total += piece.numel()
        return total

    def _next(self, size_bytes: int) -> torch.Tensor:
        if self._at + size_bytes > self.memory.numel():
            self._at = 0
        place = self.memory[self._at : self._at + size_bytes]
        self._at += size_bytes
        return place

    def rate(self, buffer: torch.Tensor, size_bytes: int, *, to_device: bool = False) -> dict[str, Any]:
        """Bytes per second between `buffer` and the ring with nothing else running, by events on its own stream."""
        sources = [buffer] * max(1, size_bytes // buffer.nbytes)
        rates: list[float] = []
        for _ in range(REPEATS):
            self._device.synchronize()
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                start = self._device.mark()
                total = self.copy(sources, to_device=to_device)
                end = self._device.mark()
            self._device.synchronize()
            rates.append(total / max(self._device.seconds([start, end])[0], 1e-9))
        return {"bytes": total, "best_bytes_s": max(rates), "median_bytes_s": statistics.median(rates), "all": rates}


@contextmanager
def open_ring(size_bytes: int, device: Device) -> Iterator[Ring]:
    segment = Memfd.create(size_bytes)
    mapping = Mapping(segment)
    mapping.populate(PREFAULT_THREADS)
    if device.is_cuda:
        runtime = torch.cuda.cudart()
        failure = int(runtime.cudaHostRegister(mapping.address, size_bytes, 1))
        if failure:
            raise RuntimeError(f"cudaHostRegister of {size_bytes:,} bytes failed with error {failure}")
    try:
        yield Ring(torch.from_numpy(np.frombuffer(mapping.map, dtype=np.uint8)), device)
    finally:
        if device.is_cuda:
            device.synchronize()
            torch.cuda.cudart().cudaHostUnregister(mapping.address)
        mapping.close()
        segment.close()
