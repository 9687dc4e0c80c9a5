"""Windows of lazily copied bytes as they were at `take`, to be compared with what lands.

Tensor version counters do not see the writers that matter (fence.py), so bytes are looked at: other units and other
windows each time, so that in time every byte is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keepstep.trainer.coding import Coded
from keepstep.trainer.units import Unit

# A lazily copied tensor is sampled at `take`: this share of its bytes, within these bounds.
SAMPLE_SHARE = 256
SAMPLE_MIN, SAMPLE_MAX = 64, 1 << 20
MAX_SAMPLES = 256


@dataclass(frozen=True)
class Window:
    """A stretch of what one unit writes, and the bytes that it is made of."""

    unit: Unit | Coded
    offset: int
    """in the unit"""
    size_bytes: int
    sources: list[torch.Tensor]
    taken: list[torch.Tensor]
    coded: Coded | None = None

    @classmethod
    def choose(cls, unit: Unit | Coded, rng: random.Random) -> Window:
        size = min(unit.size_bytes, max(SAMPLE_MIN, min(SAMPLE_MAX, unit.size_bytes // SAMPLE_SHARE)))
        offset = rng.randrange(unit.size_bytes - size + 1)
        coded = unit.window(offset, size) if isinstance(unit, Coded) else None
        sources = (
            [part.source for part in coded.parts()] if coded is not None else [unit.source[offset : offset + size]]  # type: ignore[union-attr]
        )
        taken = [torch.empty(source.numel(), dtype=torch.uint8, device=source.device) for source in sources]
        return cls(unit, offset, size, sources, taken, coded)

    def has_landed(self, payload: torch.Tensor) -> bool:
        """Whether what stands in the payload is what was taken, or the parity of it."""
        begin = self.unit.offset + self.offset
        landed = payload[begin : begin + self.size_bytes]
        taken = [part.to(landed.device) for part in self.taken]
        return torch.equal(self.coded.compute_from(taken) if self.coded is not None else taken[0], landed)

    def has_changed(self) -> bool:
        """Whether the tensors themselves are not what was taken."""
        return not all(map(torch.equal, self.taken, self.sources))


@dataclass(frozen=True)
class Samples:
    """The windows of one snapshot."""

    windows: list[Window]

    @classmethod
    def choose(cls, lazy: Sequence[Unit | Coded], rng: random.Random) -> Samples:
        units = lazy if len(lazy) <= MAX_SAMPLES else rng.sample(lazy, MAX_SAMPLES)
        return cls([Window.choose(unit, rng) for unit in units])

    def take(self) -> None:
        taken = [part for window in self.windows for part in window.taken]
        sources = [part for window in self.windows for part in window.sources]
        if taken:
            torch._foreach_copy_(taken, sources)

    def changed_at_source(self, owners: set[int]) -> Unit | Coded | None:
        """The first unit of these optimizers whose tensors are not what was taken any more."""
        return next((w.unit for w in self.windows if w.unit.owners & owners and w.has_changed()), None)

    def changed_on_the_way(self, payload: torch.Tensor) -> Unit | Coded | None:
        """The first unit that did not land as it was taken."""
        return next((w.unit for w in self.windows if not w.has_landed(payload)), None)
