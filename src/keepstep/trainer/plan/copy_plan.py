"""Copy plan: which bytes a snapshot copies, and when. Made once per layout, used by every `take`. Data only.

eager        inside `take`: everything whose writer is not fenced
lazy         after `take`, by the copy thread; the optimizer that owns the bytes waits at its gate
small_eager  like `eager`: small tensors, copied together
small_lazy   like `lazy`: small tensors of a device, which are collected on the device first

Of a replica set only the stored chunks are copied, each from the tensors that it consists of. Parity chunks are
computed from the tensors (`parity_ops`). What executes a plan (buffers, views of the arena, streams) is in `capture`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from keepstep.layout import Layout, digest
from keepstep.trainer.plan.parity_ops import ParityOp, coded_units
from keepstep.trainer.plan.ranges import cut, gaps, runs
from keepstep.trainer.plan.tensor_blocks import Block, Blocks, SharedBlocks
from keepstep.trainer.plan.units import CopyOp
from keepstep.trainer.state.optimizer_fence import WatchedOptimizer

SMALL_BYTES = 65536  # tensors up to this size are copied inside `take`, all together: the gates of a copy cost more


@dataclass
class PlanHistory:
    """Shared by all plans of one layout, whatever the turn of its replica sets."""

    snapshots: int = 0


@dataclass(eq=False)
class CopySchedule:
    """The operations of a plan by the time at which they run. Compared by identity: the key of caches in `capture`."""

    eager: list[CopyOp | ParityOp] = field(default_factory=list)
    lazy: list[CopyOp | ParityOp] = field(default_factory=list)
    small_eager: list[CopyOp] = field(default_factory=list)
    small_lazy: list[CopyOp] = field(default_factory=list)

    @cached_property
    def small_on_host(self) -> list[CopyOp]:
        return [op for op in self.small_eager if op.device.type == "cpu"]

    @cached_property
    def lazy_on_host(self) -> list[CopyOp | ParityOp]:
        return [op for op in self.lazy if op.device.type == "cpu"]

    @cached_property
    def devices(self) -> set[torch.device]:
        """Source devices of lazy copies."""
        return {op.device for op in [*self.lazy, *self.small_lazy] if op.device.type != "cpu"}

    @cached_property
    def owners(self) -> frozenset[int]:
        """Optimizers that must wait for lazy copies."""
        return frozenset[int]().union(*(op.owners for op in [*self.lazy, *self.small_lazy]))


@dataclass
class CopyPlan:
    """All operations of a layout. Valid while addresses and shapes of the tensors are unchanged."""

    layout: Layout
    encoded: bytes
    layout_digest: bytes
    small: list[CopyOp] = field(default_factory=list)
    # Unfenced, or to be materialised.
    unfenced: list[CopyOp | ParityOp] = field(default_factory=list)
    fenced: list[CopyOp | ParityOp] = field(default_factory=list)
    # (offset, size) in the stored chunks of replica sets that no operation writes: zero on all ranks that store them.
    gaps: list[tuple[int, int]] = field(default_factory=list)
    history: PlanHistory = field(default_factory=PlanHistory)
    _schedules: dict[frozenset[int], CopySchedule] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        return self.layout.payload_bytes

    @property
    def ops(self) -> list[CopyOp | ParityOp]:
        return [*self.small, *self.unfenced, *self.fenced]

    def schedule(self, watched: list[WatchedOptimizer]) -> CopySchedule:
        """The schedule for this moment: it depends on which optimizers have a trusted fence."""
        trusted = frozenset(index for index, w in enumerate(watched) if w.trusted)
        if trusted not in self._schedules:
            self._schedules[trusted] = self._make_schedule(trusted)
        return self._schedules[trusted]

    def _make_schedule(self, trusted: frozenset[int]) -> CopySchedule:
        schedule = CopySchedule(eager=list(self.unfenced))
        for op in self.fenced:
            (schedule.lazy if op.owners <= trusted else schedule.eager).append(op)
        for small in self.small:
            is_lazy = small.device.type != "cpu" and small.owners and small.owners <= trusted
            (schedule.small_lazy if is_lazy else schedule.small_eager).append(small)
        return schedule


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
        plan.unfenced.append(unit)
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
        (plan.fenced if coded.fenced else plan.unfenced).append(coded)
    plan.gaps += gaps(stream)


def _owners(block: Block, owned: list[set[int]]) -> frozenset[int]:
    storage = block.tensors[0].untyped_storage().data_ptr()
    return frozenset(index for index, storages in enumerate(owned) if storage in storages)
