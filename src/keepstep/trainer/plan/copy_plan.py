"""What one snapshot copies, and in which order: worked out once per layout, used at every `take`.

eager     inside `take`: small tensors of the host together, and everything whose writer is not fenced
lazy      behind it, by the copy thread, in pieces; the optimizer that owns it waits at the gate
gathered  the same, for small tensors of a device: collected there first

Of a stream only the stored chunks are copied, each from the tensors that it is made of; parity of others
is computed on the way (coding.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from keepstep.layout import Layout, digest
from keepstep.trainer.capture.scattered import Scattered
from keepstep.trainer.capture.small_tensors import SmallTensorBatch, gather
from keepstep.trainer.plan.parity_ops import ParityOp, coded_units
from keepstep.trainer.plan.ranges import cut, gaps, runs
from keepstep.trainer.plan.tensor_blocks import Block, Blocks, SharedBlocks
from keepstep.trainer.plan.units import CopyOp
from keepstep.trainer.state.optimizer_fence import WatchedOptimizer

SMALL_BYTES = 65536  # tensors up to this size are copied inside `take`, all together: the gates of a copy cost more


@dataclass
class PlanHistory:
    """What the plans of one layout have in common, however its streams are turned."""

    snapshots: int = 0


@dataclass
class CopySchedule:
    """A plan, dealt out."""

    eager: list[CopyOp | ParityOp]
    lazy: list[CopyOp | ParityOp] = field(default_factory=list)
    small: Scattered | None = None
    """of the host"""
    gathered: dict[torch.device, list[SmallTensorBatch]] = field(default_factory=dict)
    gathered_now: list[SmallTensorBatch] = field(default_factory=list)
    """of devices, inside `take`"""

    @cached_property
    def lazy_on_host(self) -> list[CopyOp | ParityOp]:
        return [unit for unit in self.lazy if unit.device.type == "cpu"]

    @cached_property
    def devices(self) -> set[torch.device]:
        """That lazy copies leave."""
        return {unit.device for unit in self.lazy if unit.device.type != "cpu"} | set(self.gathered)

    @cached_property
    def owners(self) -> frozenset[int]:
        found = {unit.owners for unit in self.lazy}
        found |= {one.owners for some in self.gathered.values() for one in some}
        return frozenset[int]().union(*found)


@dataclass
class CopyPlan:
    """All units of a layout. Valid while the tensors' addresses and shapes are."""

    layout: Layout
    encoded: bytes
    layout_digest: bytes
    small: list[CopyOp] = field(default_factory=list)
    loose: list[CopyOp | ParityOp] = field(default_factory=list)
    """unfenced, or to be materialised"""
    fenced: list[CopyOp | ParityOp] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(offset, size) of what no unit writes in the chunks of streams: zero on all ranks that store them"""
    history: PlanHistory = field(default_factory=PlanHistory)
    _parts: dict[frozenset[int], CopySchedule] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        return self.layout.payload_bytes

    def units(self) -> list[CopyOp | ParityOp]:
        return [*self.small, *self.loose, *self.fenced]

    def parts(self, watched: list[WatchedOptimizer]) -> CopySchedule:
        """What to copy when, at this moment: it depends on whose fence is trusted."""
        trusted = frozenset(index for index, w in enumerate(watched) if w.trusted)
        if trusted not in self._parts:
            self._parts[trusted] = self._part(trusted)
        return self._parts[trusted]

    def _part(self, trusted: frozenset[int]) -> CopySchedule:
        parts = CopySchedule(eager=list(self.loose))
        for unit in self.fenced:
            (parts.lazy if unit.owners <= trusted else parts.eager).append(unit)
        loose: dict[torch.device, list[CopyOp]] = {}
        fenced: dict[torch.device, list[CopyOp]] = {}
        here = [unit for unit in self.small if unit.device.type == "cpu"]
        parts.small = Scattered(here) if here else None
        for unit in self.small:
            if unit.device.type != "cpu":
                waits = unit.owners and unit.owners <= trusted
                (fenced if waits else loose).setdefault(unit.device, []).append(unit)
        parts.gathered = {device: gather(units) for device, units in fenced.items()}
        parts.gathered_now = [one for units in loose.values() for one in gather(units)]
        return parts


def plan_copies(blocks: Blocks, watched: list[WatchedOptimizer], small_bytes: int) -> CopyPlan:
    """Classify every block by size and by who writes it."""
    encoded = blocks.layout.encode()
    plan = CopyPlan(blocks.layout, encoded, digest(encoded))
    owned = [w.storages() for w in watched]
    for block in blocks.blocks:
        if block.entry.size_bytes == 0:
            continue
        owners = _owners(block, owned)
        unit = CopyOp(block.source(), block.entry.offset, block.entry.size_bytes, block.entry.path, owners, block)
        _classify(plan, unit, small_bytes)
    for shared in blocks.shared:
        _plan_shared(plan, shared, owned, small_bytes)
    # Where one optimizer's tensors are copied together, it can step while the next one's are still copied.
    plan.fenced.sort(key=lambda unit: (sorted(unit.owners), unit.offset))
    return plan


def _classify(plan: CopyPlan, unit: CopyOp, small_bytes: int) -> None:
    """By the block's size: a small end of a large tensor is fenced like the rest of it."""
    size = unit.block.entry.size_bytes
    if unit.block.materialise or not (unit.owners or size <= small_bytes):
        plan.loose.append(unit)
    elif size <= small_bytes:
        plan.small.append(unit)
    else:
        plan.fenced.append(unit)


def _plan_shared(plan: CopyPlan, shared: SharedBlocks, owned: list[set[int]], small_bytes: int) -> None:
    """The parts of a stream's tensors that this rank stores, and the parity that it computes."""
    blocks, stream = shared.blocks, shared.stream
    sources = [block.source() for block in blocks]
    owners = [_owners(block, owned) for block in blocks]
    for run in runs(stream):
        for index, begin, end in cut(stream.entries, run.start, run.start + run.size_bytes):
            place, block = run.offset + blocks[index].entry.offset + begin - run.start, blocks[index]
            unit = CopyOp(sources[index][begin:end], place, end - begin, block.entry.path, owners[index], block)
            _classify(plan, unit, small_bytes)
    for coded in coded_units(stream, sources, owners):
        (plan.fenced if coded.fenced else plan.loose).append(coded)
    plan.gaps += gaps(stream)


def _owners(block: Block, owned: list[set[int]]) -> frozenset[int]:
    storage = block.tensors[0].untyped_storage().data_ptr()
    return frozenset(index for index, storages in enumerate(owned) if storage in storages)
