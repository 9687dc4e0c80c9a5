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
import xxhash

from keepstep.layout import SHARE, Layout, digest
from keepstep.trainer.plan.parity_ops import ParityOp, parity_ops
from keepstep.trainer.plan.replica_shares import ReplicaShares, chunk_runs, entry_ranges, gaps
from keepstep.trainer.plan.tensor_blocks import Block, Blocks, SharedBlocks, turned
from keepstep.trainer.state.optimizer_fence import WatchedWriter

SMALL_BYTES = 65536  # Tensors up to this size are copied inside `take`, all together: the gates of a copy cost more.


@dataclass(frozen=True)
class CopyOp:
    """Bytes of one block, and their place in the payload. Of a block of a replica set, perhaps a part only."""

    source: torch.Tensor
    offset: int
    size_bytes: int
    path: str
    owners: frozenset[int]  # optimizers (by index) that write it; empty: nothing fences it
    block: Block

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def read_bytes(self) -> int:
        return self.size_bytes


@dataclass
class PlanHistory:
    """Shared by all plans of one layout, whatever the turn of its replica sets."""

    snapshots: int = 0
    checks: int = 0  # Drawn for snapshots after the first one.


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

    def schedule(self, watched: list[WatchedWriter]) -> CopySchedule:
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


class PlanTurns:
    """The plans of one layout, one per turn of its replica sets; `first` is the plan at turn 0."""

    def __init__(
        self, blocks: Blocks, sharing: ReplicaShares | None, watched: list[WatchedWriter], small_bytes: int
    ) -> None:
        self._blocks, self._sharing = blocks, sharing
        self._watched, self._small_bytes = watched, small_bytes
        self.first = plan_copies(blocks, watched, small_bytes)
        sizes = [shared.replica_set.n for shared in blocks.shared if shared.replica_set.mode == SHARE]
        self._num_turns = max(sizes, default=1)
        self._plans = {0: self.first}

    def at(self, step: int) -> CopyPlan:
        turn = _turn_of(step, self._num_turns)
        if turn not in self._plans:
            assert self._sharing is not None
            plan = plan_copies(turned(self._blocks, self._sharing, turn), self._watched, self._small_bytes)
            plan.history = self.first.history
            self._plans[turn] = plan
        return self._plans[turn]


def _turn_of(step: int, num_turns: int) -> int:
    """Drawn from the step, on which all ranks agree. Hashed: a step may share a factor with the number of nodes."""
    return xxhash.xxh3_64_intdigest(step.to_bytes(8, "little")) % num_turns


def plan_copies(blocks: Blocks, watched: list[WatchedWriter], small_bytes: int) -> CopyPlan:
    """Classify every block by its size and its writers."""
    encoded = blocks.layout.encode()
    plan = CopyPlan(blocks.layout, encoded, digest(encoded))
    owned = [w.storages(small_bytes) for w in watched]
    for block in blocks.blocks:
        if block.entry.size_bytes == 0:
            continue
        owners = _owners(block, owned)
        op = CopyOp(block.source(), block.entry.offset, block.entry.size_bytes, block.entry.path, owners, block)
        _classify(plan, op, small_bytes)
    for shared in blocks.shared:
        _plan_shared(plan, shared, owned, small_bytes)
    # With one optimizer's tensors copied together, it can step while the next one's are still being copied.
    plan.fenced.sort(key=lambda op: (sorted(op.owners), op.offset))
    return plan


def _classify(plan: CopyPlan, op: CopyOp, small_bytes: int) -> None:
    """By the block's size: a small end of a large tensor is fenced like the rest of it."""
    size = op.block.entry.size_bytes
    if op.block.materialise or not (op.owners or size <= small_bytes):
        plan.unfenced.append(op)
    elif size <= small_bytes:
        plan.small.append(op)
    else:
        plan.fenced.append(op)


def _plan_shared(plan: CopyPlan, shared: SharedBlocks, owned: list[set[int]], small_bytes: int) -> None:
    """The parts of a replica set's tensors that this rank stores, and the parity that it computes."""
    blocks, replica_set = shared.blocks, shared.replica_set
    sources = [block.source() for block in blocks]
    owners = [_owners(block, owned) for block in blocks]
    for run in chunk_runs(replica_set):
        for index, begin, end in entry_ranges(replica_set.entries, run.start, run.start + run.size_bytes):
            offset, block = run.offset + blocks[index].entry.offset + begin - run.start, blocks[index]
            op = CopyOp(sources[index][begin:end], offset, end - begin, block.entry.path, owners[index], block)
            _classify(plan, op, small_bytes)
    for parity_op in parity_ops(replica_set, sources, owners):
        (plan.fenced if parity_op.fenced else plan.unfenced).append(parity_op)
    plan.gaps += gaps(replica_set)


def _owners(block: Block, owned: list[set[int]]) -> frozenset[int]:
    storage = block.tensors[0].untyped_storage().data_ptr()
    return frozenset(index for index, storages in enumerate(owned) if storage in storages)
