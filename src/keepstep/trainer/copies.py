"""What one snapshot copies, and in which order: worked out once per layout, used at every `take`.

eager   inside `take`: small tensors together, and everything whose writer is not fenced
lazy    behind it, by the copy thread, in pieces; the optimizer that owns it waits at the gate
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from keepstep.layout import Layout, digest
from keepstep.trainer.blocks import Block, Blocks
from keepstep.trainer.fence import Watched

PIECE_BYTES = 64 << 20
# A lazily copied tensor is sampled at `take`: this share of its bytes, within these bounds.
SAMPLE_SHARE = 256
SAMPLE_MIN, SAMPLE_MAX = 64, 1 << 20
MAX_SAMPLES = 256


@dataclass(frozen=True)
class Unit:
    """One block's source bytes and its place in the payload."""

    source: torch.Tensor
    offset: int
    size_bytes: int
    path: str
    owners: frozenset[int]
    """optimizers (by index) that write it; empty: nothing fences it"""
    block: Block


@dataclass
class CopyPlan:
    """All units of a layout. Valid while the tensors' addresses and shapes are."""

    layout: Layout
    encoded: bytes
    layout_digest: bytes
    small: list[Unit] = field(default_factory=list)
    loose: list[Unit] = field(default_factory=list)
    """unfenced, or to be materialised"""
    fenced: list[Unit] = field(default_factory=list)
    snapshots: int = 0

    @property
    def payload_bytes(self) -> int:
        return self.layout.payload_bytes

    def split(self, watched: list[Watched]) -> tuple[list[Unit], list[Unit]]:
        """(what to copy inside take beyond the small ones, what may be copied behind it) at this moment."""
        trusted = {index for index, w in enumerate(watched) if w.trusted}
        eager = list(self.loose)
        lazy: list[Unit] = []
        for unit in self.fenced:
            (lazy if unit.owners <= trusted else eager).append(unit)
        return eager, lazy


def plan_copies(blocks: Blocks, watched: list[Watched], small_bytes: int) -> CopyPlan:
    """Classify every block by size and by who writes it."""
    encoded = blocks.layout.encode()
    plan = CopyPlan(blocks.layout, encoded, digest(encoded))
    owned = [w.storages() for w in watched]
    for block in blocks.blocks:
        if block.entry.size_bytes == 0:
            continue
        owners = _owners(block, owned)
        unit = Unit(block.source(), block.entry.offset, block.entry.size_bytes, block.entry.path, owners, block)
        if block.materialise or not (owners or unit.size_bytes <= small_bytes):
            plan.loose.append(unit)
        elif unit.size_bytes <= small_bytes:
            plan.small.append(unit)
        else:
            plan.fenced.append(unit)
    # Where one optimizer's tensors are copied together, it can step while the next one's are still copied.
    plan.fenced.sort(key=lambda unit: (sorted(unit.owners), unit.offset))
    return plan


def _owners(block: Block, owned: list[set[int]]) -> frozenset[int]:
    storage = block.tensors[0].untyped_storage().data_ptr()
    return frozenset(index for index, storages in enumerate(owned) if storage in storages)


@dataclass
class Samples:
    """Windows of some sources as they were at `take`, to be compared with what lands."""

    units: list[Unit]
    offsets: list[int]
    sources: list[torch.Tensor]
    taken: list[torch.Tensor]

    @classmethod
    def choose(cls, lazy: list[Unit], rng: random.Random) -> Samples:
        """Other units and other windows each time, so that in time every byte is looked at."""
        units = lazy if len(lazy) <= MAX_SAMPLES else rng.sample(lazy, MAX_SAMPLES)
        offsets, sources, taken = [], [], []
        for unit in units:
            size = min(unit.size_bytes, max(SAMPLE_MIN, min(SAMPLE_MAX, unit.size_bytes // SAMPLE_SHARE)))
            offset = rng.randrange(unit.size_bytes - size + 1)
            offsets.append(offset)
            sources.append(unit.source[offset : offset + size])
            taken.append(torch.empty(size, dtype=torch.uint8, device=unit.source.device))
        return cls(list(units), offsets, sources, taken)

    def take(self) -> None:
        torch._foreach_copy_(self.taken, self.sources)

    def changed(self, now: list[torch.Tensor], owners: set[int] | None = None) -> Unit | None:
        """The first unit (of these owners) whose window in `now` is not what was taken."""
        for unit, before, after in zip(self.units, self.taken, now, strict=True):
            if owners is not None and not unit.owners & owners:
                continue
            if not torch.equal(before.to(after.device), after):
                return unit
        return None

    def landed(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The same windows in a slot's payload."""
        return [
            payload[unit.offset + offset : unit.offset + offset + window.numel()]
            for unit, offset, window in zip(self.units, self.offsets, self.taken, strict=True)
        ]
