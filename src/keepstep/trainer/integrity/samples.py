"""Windows of lazily copied bytes as they were at `take`, to be compared with what lands.

Tensor version counters do not see the writers that matter (fence.py), so bytes are looked at: other units and other
windows each time, so that in time every byte is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from keepstep.layout import ALIGN, align
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.plan.parity_ops import ParityOp

# A lazily copied tensor is sampled at `take`: this share of its bytes, within these bounds.
SAMPLE_SHARE = 256
SAMPLE_MIN, SAMPLE_MAX = 64, 1 << 20
MAX_SAMPLES = 256


@dataclass(frozen=True)
class SampleWindow:
    """A stretch of what one unit writes, and the bytes that it is made of."""

    unit: CopyOp | ParityOp
    offset: int
    """in the unit"""
    size_bytes: int
    sources: list[torch.Tensor]
    coded: ParityOp | None = None

    @classmethod
    def choose(cls, unit: CopyOp | ParityOp, rng: random.Random) -> SampleWindow:
        size = min(unit.size_bytes, max(SAMPLE_MIN, min(SAMPLE_MAX, unit.size_bytes // SAMPLE_SHARE)))
        offset = rng.randrange(unit.size_bytes - size + 1)
        coded = unit.window(offset, size) if isinstance(unit, ParityOp) else None
        sources = (
            [part.source for part in coded.inputs()] if coded is not None else [unit.source[offset : offset + size]]  # type: ignore[union-attr]
        )
        return cls(unit, offset, size, sources, coded)

    def has_landed(self, payload: torch.Tensor, taken: list[torch.Tensor]) -> bool:
        """Whether what stands in the payload is what was taken, or the parity of it."""
        begin = self.unit.offset + self.offset
        landed = payload[begin : begin + self.size_bytes]
        return torch.equal(self.coded.compute_from(taken) if self.coded is not None else taken[0], landed)


class HostSamples:
    """The windows of one snapshot."""

    def __init__(self, windows: list[SampleWindow]) -> None:
        self.windows = windows
        self._sources = [source for window in windows for source in window.sources]
        self._starts, sizes = _side_by_side(self._sources)
        # One buffer for each device: to fetch hundreds of windows one by one takes it half a second beside the copy.
        self._taken = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}

    @classmethod
    def choose(cls, lazy: Sequence[CopyOp | ParityOp], rng: random.Random) -> HostSamples:
        units = lazy if len(lazy) <= MAX_SAMPLES else rng.sample(lazy, MAX_SAMPLES)
        return cls([SampleWindow.choose(unit, rng) for unit in units])

    def take(self) -> None:
        if self._sources:
            torch._foreach_copy_(self._parts(self._taken), self._sources)

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        """The first unit of these optimizers whose tensors are not what was taken any more."""
        for window, taken in self._each(self._taken):
            if window.unit.owners & owners and not all(map(torch.equal, taken, window.sources)):
                return window.unit
        return None

    def changed_on_the_way(self, payload: torch.Tensor) -> CopyOp | ParityOp | None:
        """The first unit that did not land as it was taken."""
        here = {device: buffer.to(payload.device) for device, buffer in self._taken.items()}
        return next((window.unit for window, taken in self._each(here) if not window.has_landed(payload, taken)), None)

    def _each(self, buffers: dict[torch.device, torch.Tensor]) -> Iterator[tuple[SampleWindow, list[torch.Tensor]]]:
        parts = iter(self._parts(buffers))
        return ((window, [next(parts) for _ in window.sources]) for window in self.windows)

    def _parts(self, buffers: dict[torch.device, torch.Tensor]) -> list[torch.Tensor]:
        placed = zip(self._sources, self._starts, strict=True)
        return [buffers[source.device][start : start + source.numel()] for source, start in placed]


def _side_by_side(sources: list[torch.Tensor]) -> tuple[list[int], dict[torch.device, int]]:
    """Where each has its place in the buffer of its device, and how large those are."""
    starts, sizes = [], dict[torch.device, int]()
    for source in sources:
        starts.append(sizes.get(source.device, 0))
        sizes[source.device] = align(starts[-1] + source.numel(), ALIGN)
    return starts, sizes
