"""Copies from a CUDA device to the arena while training goes on.

    take          an event on the compute stream; all copies begin after it
    copy thread   small tensors are collected, fingerprints computed and staged pieces cloned on the device, beside the
                  computation; then the direct pieces are copied from the live tensors, one by one, the clones last
    pre-hook      the update waits, on the device, for whatever still reads live tensors: direct copies and cloning

All of it is queued at once. The host usually runs far ahead of the device, so nothing that the host observes can tell
how far the copies will be at the update: which pieces are staged is decided in advance, from how the last snapshots
went (`StagingPolicy`).

Nothing here blocks the training thread except for the time of a few calls; the device waits for events. All copies to
the host are queued one behind the other, the smallest too, on two streams in turn (`CopyStreams`): one engine of the
device does them all, and serves two streams that have work at the same time more slowly than one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch

from keepstep import faults
from keepstep.layout import align
from keepstep.trainer.capture.device_lane import PIECE_BYTES, DeviceLane, timing_event
from keepstep.trainer.capture.host_copy import RateCap
from keepstep.trainer.capture.small_tensors import SmallTensorBatch, SmallTensorBatches, foreach_copies
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.memory.arena_view import SlotTargets
from keepstep.trainer.memory.pinned import copy_to_host
from keepstep.trainer.plan.copy_plan import CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp, ParityRun, parity_runs
from keepstep.trainer.state.optimizer_fence import ReadCounter

log = logging.getLogger("keepstep")

FIRST_PIECES = 8  # Small tensors are copied after these: by then the device has collected them.
TURN_S = 0.005  # Polling interval for the direct copies of the last snapshot.


@dataclass(frozen=True)
class CopyPiece:
    """Part of an operation, small enough for one copy."""

    target: torch.Tensor
    source: torch.Tensor | ParityRun
    owners: frozenset[int]

    @property
    def size_bytes(self) -> int:
        return self.target.numel()

    def copy_to_host(self, lane: DeviceLane) -> None:
        """Queue the copy on the current stream; parity is computed just before."""
        faults.point("capture.copy")
        source = self.source
        if isinstance(source, ParityRun):
            source = source.compute(lane.scratch(self.size_bytes), lane.checking)
        copy_to_host(self.target, source)


def cut(target: torch.Tensor, source: torch.Tensor, owners: frozenset[int]) -> list[CopyPiece]:
    starts = range(0, target.numel(), PIECE_BYTES)
    return [CopyPiece(target[a : a + PIECE_BYTES], source[a : a + PIECE_BYTES], owners) for a in starts]


@dataclass(frozen=True)
class TransferPlan:
    """The copies from one device into one slot. Made once, executed by every `DeviceTransfer`."""

    payload: torch.Tensor
    batches: Sequence[SmallTensorBatch]
    pieces: Sequence[CopyPiece]

    @classmethod
    def build(
        cls, payload: torch.Tensor, schedule: CopySchedule, device: torch.device, batches: Sequence[SmallTensorBatch]
    ) -> TransferPlan:
        """Cut the lazy operations of a device into pieces. `batches`: its small tensors."""
        pieces: list[CopyPiece] = []
        parity_ops: list[ParityOp] = []
        for op in schedule.lazy:
            if op.device != device:
                continue
            if isinstance(op, ParityOp):
                parity_ops.append(op)
            else:
                pieces += cut(payload[op.offset : op.offset + op.size_bytes], op.source, op.owners)
        for run in parity_runs(parity_ops):
            pieces.append(CopyPiece(payload[run.offset : run.offset + run.size_bytes], run, run.owners))
        return cls(payload, batches, pieces)

    @cached_property
    def staging_bytes(self) -> int:
        """Staging memory for all pieces."""
        return sum(align(piece.size_bytes) for piece in self.pieces)

    @cached_property
    def owners(self) -> frozenset[int]:
        sets = {piece.owners for piece in self.pieces} | {batch.owners for batch in self.batches}
        return frozenset[int]().union(*sets)


class TransferPlans:
    """Transfer plans by slot and source device; they are freed with the targets of the slot."""

    def __init__(self, batches: SmallTensorBatches) -> None:
        self._batches = batches
        self._plans: WeakKeyDictionary[SlotTargets, dict[torch.device, TransferPlan]] = WeakKeyDictionary()

    def of(self, targets: SlotTargets, schedule: CopySchedule, device: torch.device) -> TransferPlan:
        plans = self._plans.setdefault(targets, {})
        if device not in plans:
            batches = [batch for batch in self._batches.lazy(schedule) if batch.buffer.device == device]
            plans[device] = TransferPlan.build(targets.payload, schedule, device, batches)
        return plans[device]


class DeviceTransfer:
    """The copies of one snapshot from one device."""

    def __init__(
        self,
        lane: DeviceLane,
        plan: TransferPlan,
        clones: Sequence[tuple[torch.Tensor, torch.Tensor]],
        checks: SnapshotChecks,
    ) -> None:
        """Made inside `take`: begins at the current position of the compute stream.

        `clones`: (target, clone) that `take` has made. `checks`: their fingerprints of this device are computed from
        the live tensors and copied to the host.
        """
        self.lane = lane
        self.begin = torch.cuda.current_stream(lane.device).record_event(timing_event())
        self._plan, self._clones, pieces = plan, clones, plan.pieces
        self._checks = checks
        staged_bytes, cut_at = lane.policy.staged_of(plan.staging_bytes), len(pieces)
        while cut_at and align(pieces[cut_at - 1].size_bytes) <= staged_bytes:
            cut_at -= 1
            staged_bytes -= align(pieces[cut_at].size_bytes)
        self._direct, self._staged = pieces[:cut_at], pieces[cut_at:]
        self._reads: dict[int, list[torch.cuda.Event]] = {
            owner: [] for owner in plan.owners
        }  # Ends of reads, by optimizer.
        self._computed = self._cloned = self._started = self._direct_end = self._done = timing_event()
        self._hooked: torch.cuda.Event | None = None
        self._small_queued = False

    @property
    def owners(self) -> frozenset[int]:
        return self._plan.owners

    # On the copy thread

    @property
    def must_wait(self) -> bool:
        """Whether direct copies of the last snapshot are still running."""
        direct_end = self.lane.direct_end
        return direct_end is not None and not direct_end.query()  # type: ignore[no-untyped-call]

    def wait_for_turn(self, reads: ReadCounter) -> None:
        """Queueing the next snapshot slows the current copy by about 3 %, so wait until its direct copies are done,
        unless an optimizer already waits. There is time to queue while its clones are copied.
        """
        while self.must_wait and not reads.waited_for:
            time.sleep(TURN_S)

    def issue(self, reads: ReadCounter, cap: RateCap) -> None:
        """Queue everything; releases each optimizer in `reads` when all that it must wait for is queued."""
        copies, clones, ends = self.lane.copies, self._clone(), self._ends()
        copies.current.wait_event(self.begin)
        for target, clone in self._clones:
            self._copy_clone(target, clone)
        self._started = copies.current.record_event(timing_event())
        self._end_reads(ends.get(-1, ()), reads)
        for index, piece in enumerate(self._direct):
            with torch.cuda.stream(copies.current):
                piece.copy_to_host(self.lane)
            copies.count(piece.size_bytes)
            cap.pace(piece.size_bytes, reads.gates.values())
            self._end_reads(ends.get(index, ()), reads)
            if index + 1 == FIRST_PIECES:
                self._copy_small()
        self._copy_small()
        self._direct_end = self.lane.direct_end = copies.current.record_event(timing_event())
        copies.current.wait_event(self._cloned)
        for piece, clone in zip(self._staged, clones, strict=True):
            faults.point("capture.copy")
            self._copy_clone(piece.target, clone)
        self._done = self.lane.staged_end = copies.current.record_event(_blocking_event())

    def _copy_clone(self, target: torch.Tensor, clone: torch.Tensor) -> None:
        with torch.cuda.stream(self.lane.copies.current):
            copy_to_host(target, clone)
        self.lane.copies.count(target.numel())

    def _clone(self) -> list[torch.Tensor]:
        """Clone the staged pieces beside the computation, long before the update. Returns the clones."""
        stream, staged = self.lane.cloning, frozenset[int]().union(*(piece.owners for piece in self._staged))
        with torch.cuda.stream(stream):
            stream.wait_event(self.begin)
            if self._plan.batches and self.lane.direct_end is not None:
                stream.wait_event(self.lane.direct_end)  # until the last snapshot has copied the buffers
            for batch in self._plan.batches:
                batch.collect()
            self._checks.compute_fingerprints(self.lane.device)
            self._computed = stream.record_event()
            if self._staged and self.lane.staged_end is not None:
                stream.wait_event(self.lane.staged_end)
            clones = self._fill_staging()
            self._cloned = stream.record_event()
            self._reads = {owner: [self._cloned if owner in staged else self._computed] for owner in self.owners}
        return clones

    def _fill_staging(self) -> list[torch.Tensor]:
        """By kernels: a copy would use the engine that copies to the host."""
        clones: list[torch.Tensor] = []
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        offset = 0
        for piece in self._staged:
            clones.append(self.lane.memory[offset : offset + piece.size_bytes])
            offset += align(piece.size_bytes)
            if isinstance(piece.source, ParityRun):
                piece.source.compute(clones[-1], self.lane.checking)
            else:
                copied[0].append(clones[-1])
                copied[1].append(piece.source)
        for targets, sources in foreach_copies(*copied):
            torch._foreach_copy_(targets, sources)
        return clones

    def _copy_small(self) -> None:
        """Copy small tensors and fingerprints. Not first: their kernels wait beside the computation, and the link would
        wait with them."""
        if self._small_queued:
            return
        self._small_queued = True
        stream = self.lane.copies.current
        stream.wait_event(self._computed)
        with torch.cuda.stream(stream):
            for batch in self._plan.batches:
                batch.copy_to_host(self._plan.payload)
            self._checks.copy_fingerprints(self.lane.device)

    def _ends(self) -> dict[int, list[int]]:
        """Index of a direct piece (-1: none) -> the optimizers that own no later one."""
        last = {owner: index for index, piece in enumerate(self._direct) for owner in piece.owners}
        ends: dict[int, list[int]] = {}
        for owner in self.owners:
            ends.setdefault(last.get(owner, -1), []).append(owner)
        return ends

    def _end_reads(self, owners: Sequence[int], reads: ReadCounter) -> None:
        if owners:
            event = self.lane.copies.current.record_event()
            for owner in owners:
                self._reads[owner].append(event)
                reads.release(owner)

    # On the training thread

    def wait_on_device(self, owner: int) -> None:
        """Make the compute stream wait for all reads of what this optimizer is about to write."""
        stream = torch.cuda.current_stream(self.lane.device)
        if self._hooked is None:
            self._hooked = stream.record_event(timing_event())
        for event in self._reads[owner]:
            stream.wait_event(event)

    # On the thread that commits

    def finish(self) -> tuple[int, float]:
        """Wait until everything is copied, and learn from it. Returns the direct bytes and the seconds they took."""
        self._done.synchronize()
        direct_bytes = sum(piece.size_bytes for piece in self._direct)
        took_s = self._at_s(self._direct_end) - self._at_s(self._started)
        if direct_bytes and took_s > 0:
            policy, spare_s = self.lane.policy, self._spare_s()
            log.debug(
                "direct: %d bytes in %.4f s, %.4f s to spare; staged: %d",
                direct_bytes,
                took_s,
                spare_s,
                policy.staged_bytes,
            )
            policy.learn(spare_s, direct_bytes / took_s)
        return direct_bytes, took_s

    def _spare_s(self) -> float:
        """From the end of the direct copies to the update, in device time."""
        if self._hooked is None or not self._hooked.query():  # type: ignore[no-untyped-call]
            return self._at_s(self._direct_end)  # The update is still to come: there was time for more.
        return self._at_s(self._hooked) - self._at_s(self._direct_end)

    def _at_s(self, event: torch.cuda.Event) -> float:
        return float(self.begin.elapsed_time(event)) / 1000


def _blocking_event() -> torch.cuda.Event:
    """An event that a thread can sleep on."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
