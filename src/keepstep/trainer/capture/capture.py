"""Capture of one snapshot: eager copies inside `take`, lazy copies after it, the commit last.

    take (training thread)    header WRITING → layout, eager copies → gates armed → return
    copy thread               device copies queued; values encoded, plan validated; host copies
    commit thread             copies complete → fingerprints compared → header COMMITTED → outcome reported

Invariants:
- The threads copy with calls that release the GIL, and wait.
- A fault anywhere voids this snapshot and nothing else: the previous version is in another slot.
- With three slots or more the next snapshot may begin before this one is copied. They are committed in order.
- Every capture that begins has one outcome: committed or voided.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from keepstep import faults
from keepstep.arena import records as h
from keepstep.arena.records import TrainerHeader
from keepstep.config import TakeConfig
from keepstep.errors import CaptureError
from keepstep.layout import SnapshotSize
from keepstep.trainer.capture.device_copy import DeviceTransfer, TransferPlans
from keepstep.trainer.capture.device_lane import DeviceLanes
from keepstep.trainer.capture.host_copy import CaptureCost, EagerCopier, HostCopier, RateCap, StagedCopy
from keepstep.trainer.capture.next_checks import FULL_CHECKS, NextChecks
from keepstep.trainer.capture.small_tensors import SmallTensorBatches
from keepstep.trainer.connection.environment import RankPlace
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.integrity.fingerprints import frame
from keepstep.trainer.memory.arena_view import ArenaView, SlotTargets, TargetCache
from keepstep.trainer.plan.copy_plan import CopyOp, CopyPlan, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp
from keepstep.trainer.plan.plan_cache import CachedPlan, PlanCache
from keepstep.trainer.state.optimizer_fence import CopyGate, OptimizerFence, ReadCounter
from keepstep.types import Version

log = logging.getLogger("keepstep")

DRAIN_S = 600.0  # An arena is replaced only when no capture uses it: copies take this long at the very most.
QUEUE_WAIT_S = 5.0  # A `take` that must check for unfenced writes waits this long until fingerprints are queued.
MAX_READERS = 8  # Threads that compare: one of them takes seconds for a large state, and the next snapshot may wait.


def most_in_flight(num_slots: int) -> int:
    """Return how many captures may be copied at the same time."""
    return 2 if num_slots >= 3 else 1


class CaptureListener(Protocol):
    """Receives the outcome of each capture, once. Called from the commit thread."""

    def committed(self, arena_id: str, slot: int, version: Version) -> None: ...

    def voided(self, arena_id: str, slot: int, version: Version, reason: str) -> None: ...


@dataclass
class CaptureJob:
    """A capture in flight."""

    version: Version
    view: ArenaView
    slot: int
    header: TrainerHeader
    cached: CachedPlan
    schedule: CopySchedule
    targets: SlotTargets
    gates: dict[int, CopyGate]
    checks: SnapshotChecks
    transfers: Sequence[DeviceTransfer]  # One per device.
    # Set when everything that devices have to do is queued, or nothing more will be.
    queued: threading.Event = field(default_factory=threading.Event)
    void: str = ""

    @property
    def plan(self) -> CopyPlan:
        return self.cached.plan


@dataclass(frozen=True)
class Outgrown:
    """A state that did not fit into its arena."""

    plan: CopyPlan
    size: SnapshotSize


class Capture:
    """Runs captures one at a time, in order."""

    def __init__(
        self, place: RankPlace, config: TakeConfig, fence: OptimizerFence, plans: PlanCache, listener: CaptureListener
    ) -> None:
        self._place, self._config, self._fence, self._plans, self._listener = place, config, fence, plans, listener
        # Two may be in flight, and the thread may have begun neither: one that was staged whole has no gate to wait at.
        self._queue: queue.Queue[CaptureJob | None] = queue.Queue(maxsize=2)
        self._copied: queue.Queue[tuple[CaptureJob, str] | None] = queue.Queue(maxsize=2)
        self.lanes = DeviceLanes(config)
        self._small = SmallTensorBatches()
        self._targets, self._transfers = TargetCache(), TransferPlans(self._small)
        self._prepared = NextChecks(config, self.lanes, self._small)
        self.spent = CaptureCost()
        self._cap = RateCap(config.rate_bytes_s)
        self._host, self._eager = HostCopier(self._cap, self.spent), EagerCopier(config, self.spent)
        self._outgrown: Outgrown | None = None
        # Held while a job leaves _in_flight and its outcome is reported, so that drain() cannot return in between.
        self._reporting = threading.Lock()
        self._in_flight: list[CaptureJob] = []  # Oldest first.
        num_readers = max(1, min(MAX_READERS, len(os.sched_getaffinity(0)) // 2))
        # Its threads start when there is something to compare with the fingerprints of a device.
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="keepstep-compare")
        self._threads = [
            threading.Thread(target=self._copy_all, name="keepstep-copy", daemon=True),
            threading.Thread(target=self._commit_all, name="keepstep-commit", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def current(self) -> CaptureJob | None:
        """The newest capture in flight."""
        in_flight = self._in_flight
        return in_flight[-1] if in_flight else None

    def take_outgrown(self) -> Outgrown | None:
        """Return what did not fit into the arena since the last call."""
        outgrown, self._outgrown = self._outgrown, None
        return outgrown

    def is_full(self, num_slots: int) -> bool:
        """Whether the next capture must wait: there is no third slot, or the newest one still reads live tensors.

        An optimizer waits for the newest snapshot only.
        """
        current = self.current
        if current is None:
            return False
        return len(self._in_flight) >= most_in_flight(num_slots) or any(gate.open for gate in current.gates.values())

    # On the caller's thread

    def begin(
        self,
        view: ArenaView,
        slot: int,
        version: Version,
        cached: CachedPlan,
        *,
        inexact: bool,
    ) -> None:
        """Start one snapshot. Raises CaptureError when it cannot be captured now; the caller then voids its grant."""
        plan = cached.plan
        self._check_room(view, cached, cached.reading.least_values_bytes)
        schedule = plan.schedule(self._fence.watched)
        self._eager.check_budget(schedule.eager)
        arena = view.arena
        header = TrainerHeader(
            state=h.WRITING, rank=self._place.rank, world_size=self._place.world_size,
            local_index=self._place.local_index, local_world_size=self._place.local_world_size,
            flags=h.INEXACT if inexact else 0, version=version, layout_bytes=len(plan.encoded), values_bytes=0,
            payload_bytes=plan.payload_bytes, layout_digest=plan.layout_digest, written_at=time.time(),
            shared_offset=plan.layout.shared_offset,
        )  # fmt: skip
        arena.write_trainer_header(slot, header)
        view.write_layout(slot, plan)
        checks = self._prepared.next_checks(plan, schedule)
        targets = self._targets.targets(view, slot, schedule)
        self._host.copy_small(schedule, arena.segment.fd, arena.payload_span(slot).offset)
        staged = self._eager.copy(schedule.eager, targets.eager)
        staged += self._small.clone_eager(schedule, targets.payload)
        transfers = [
            self._transfer(device, schedule, targets, staged, checks)
            for device in schedule.devices | {source.device for _, source in staged}
        ]
        gates = {index: CopyGate(index, [t for t in transfers if index in t.owners]) for index in schedule.owners}
        job = CaptureJob(version, view, slot, header, cached, schedule, targets, gates, checks, transfers)
        self._in_flight.append(job)
        try:
            faults.point("capture.queue")
            self._queue.put_nowait(job)
        except BaseException:
            self._in_flight.remove(job)
            raise
        self._fence.arm(gates)

    def _check_room(self, view: ArenaView, cached: CachedPlan, values_bytes: int) -> None:
        plan = cached.plan
        if view.arena.fits(SnapshotSize(len(plan.encoded), values_bytes, plan.payload_bytes)):
            return
        values_bytes = len(cached.reading.values)
        self._outgrown = Outgrown(plan, SnapshotSize(len(plan.encoded), values_bytes, plan.payload_bytes))
        size = plan.payload_bytes + values_bytes
        raise CaptureError(f"the state has outgrown its arena ({size:,} bytes); a larger one is made")

    def _transfer(
        self,
        device: torch.device,
        schedule: CopySchedule,
        targets: SlotTargets,
        staged: Sequence[StagedCopy],
        checks: SnapshotChecks,
    ) -> DeviceTransfer:
        """Plan the copies from one device. They begin at the current end of its compute stream."""
        transfer_plan = self._transfers.of(targets, schedule, device)
        clones = [pair for pair in staged if pair[1].device == device]
        return DeviceTransfer(self.lanes.of(device), transfer_plan, clones, checks)

    def check_unfenced_write(self) -> None:
        """Void the newest capture when an optimizer whose hook did not fire wrote what is still being copied."""
        job = self.current
        if job is None or job.void:
            return
        silent = {i for i, gate in job.gates.items() if gate.open and not self._fence.watched[i].fired}
        if not silent:
            return
        if job.transfers and not self._fingerprints_queued(job, silent):
            job.void = "an optimizer may have written before fingerprints of its tensors were taken"
            return
        op = job.checks.changed_at_source(silent)
        changed = f"{op.path} changed without its optimizer's hook" if op else ""
        if not job.checks:
            changed = "its samples were not taken"
        if changed:
            job.void = changed
            for index in silent:
                self._fence.watched[index].untrusted_reason = changed

    def _fingerprints_queued(self, job: CaptureJob, silent: set[int]) -> bool:
        """Wait until the copy thread has queued the fingerprints: it may be waiting for the previous snapshot."""
        for index in silent:
            job.gates[index].waited_for.set()
        return job.queued.wait(QUEUE_WAIT_S) and job.checks.fingerprints_queued

    def drain(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until nothing is in flight, and release the arena."""
        deadline = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(0.002)
        with self._reporting:
            if not self._in_flight:
                self._targets.clear()
            return not self._in_flight

    def close(self) -> None:
        self.drain(timeout_s=60)
        try:
            self._queue.put(None, timeout=5)
        except queue.Full:
            log.error("the copy thread does not end; it is abandoned")
            return
        for thread in self._threads:
            thread.join(timeout=5)
        self._readers.shutdown(wait=False)

    # On the copy thread

    def _copy_all(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._copy(job)
                reason = ""
            except CaptureError as error:
                reason = str(error)
            except Exception as error:
                log.exception("the copy of step %d failed", job.version.step)
                reason = f"the copy failed: {error!r}"
            finally:
                job.queued.set()
                for gate in job.gates.values():
                    gate.done.set()
            self._copied.put((job, reason))
        self._copied.put(None)

    def _copy(self, job: CaptureJob) -> None:
        readers = [op.owners for op in job.schedule.lazy_on_host] + [transfer.owners for transfer in job.transfers]
        reads = ReadCounter(job.gates, readers)
        waits = any(transfer.must_wait for transfer in job.transfers)
        if waits:  # There is time while the snapshot before it is copied.
            self._finish_take(job)
        for transfer in job.transfers:
            transfer.wait_for_turn(reads)
            transfer.issue(reads, self._cap)
        job.queued.set()
        if not waits:
            self._finish_take(job)
        self._copy_host(job, reads)

    def _copy_host(self, job: CaptureJob, reads: ReadCounter) -> None:
        ops, targets = job.schedule.lazy_on_host, job.targets.lazy_on_host
        in_full = self._config.fingerprint != "off" and job.plan.history.snapshots < FULL_CHECKS
        for op in self._host.copy(ops, targets, job.gates):
            if not in_full:
                for index in op.owners:
                    reads.release(index)
        if in_full:
            changed = self._host.first_change(ops, targets, job.gates)
            if changed is not None:
                self._mark_violated(job, changed)
            for index in (index for op in ops for index in op.owners):
                reads.release(index)

    def _finish_take(self, job: CaptureJob) -> None:
        """Do what need not be done inside `take`: encode the values, validate all that the plan relied on."""
        values, arena = job.cached.reading.values, job.view.arena
        self._check_room(job.view, job.cached, len(values))
        arena.segment.write(arena.values_span(job.slot).offset, values)
        job.header = replace(job.header, values_bytes=len(values))
        reason = self._plans.validate(job.cached)
        if reason:  # Otherwise it stays: `check_unfenced_write` may have set it meanwhile.
            job.void = reason

    # On the commit thread

    def _commit_all(self) -> None:
        while (copied := self._copied.get()) is not None:
            job, reason = copied
            try:
                reason = reason or self._wait_for_copies(job)
                if not reason:
                    self._commit(job)
            except Exception as error:
                log.exception("the end of step %d failed", job.version.step)
                reason = f"the copy failed: {error!r}"
            if reason:
                self.lanes.settle()
            whole = self._prepared.is_whole(job.plan)
            if not reason and whole:  # The next snapshot must not begin without them.
                self._choose_checks(job)
            self._report(job, reason)
            if not reason and not whole:  # A sample may be missed: the keeper can begin before it is drawn.
                self._choose_checks(job)
            if not reason:
                self._prepared.prepare_small(job.schedule)

    def _choose_checks(self, job: CaptureJob) -> None:
        if job.checks:
            count = most_in_flight(job.view.arena.num_slots)
            self._prepared.choose(job.plan, job.schedule, count=count)

    def _wait_for_copies(self, job: CaptureJob) -> str:
        """Wait for all copies, and compare them. Returns why the snapshot is void, if it is."""
        for transfer in job.transfers:
            copied_bytes, took_s = transfer.finish()
            self.spent.copied_bytes += copied_bytes
            self.spent.copy_s += took_s
        return job.void or next((g.broken for g in job.gates.values() if g.broken), "") or self._compare(job)

    def _compare(self, job: CaptureJob) -> str:
        """Compare fingerprints and samples of the sources with the copies. Returns what is wrong."""
        job.plan.history.snapshots += 1
        if not job.checks:
            return ""
        faults.point("capture.compare")
        with self.lanes.aside():
            op = job.checks.changed_in_transit(job.view.payload(job.slot), self._readers)
            if op is not None:
                self._mark_violated(job, op)
        return job.void

    def _mark_violated(self, job: CaptureJob, op: CopyOp | ParityOp) -> None:
        writes = " and ".join(self._fence.watched[index].writes for index in sorted(op.owners))
        job.void = f"{op.path} changed while it was copied: something writes it outside {writes}"
        log.error("%s; it is copied inside take from now on", job.void)
        for index in op.owners:
            self._fence.watched[index].untrusted_reason = job.void

    def _commit(self, job: CaptureJob) -> None:
        """Write COMMITTED, the last write of a snapshot: from here on it is valid without this process."""
        header = replace(job.header, state=h.COMMITTED)
        fingerprints = job.checks.encode()
        if fingerprints:
            header = self._write_fingerprints(job, header, fingerprints)
        job.view.arena.write_trainer_header(job.slot, header)

    def _write_fingerprints(self, job: CaptureJob, header: TrainerHeader, fingerprints: bytes) -> TrainerHeader:
        """Write fingerprints after the values, as far as they fit."""
        span = job.view.arena.values_span(job.slot)
        suffix = frame(fingerprints, span.size_bytes - header.values_bytes)
        if not suffix:
            return header
        job.view.arena.segment.write(span.offset + header.values_bytes, suffix)
        return replace(header, flags=header.flags | h.PRINTS, values_bytes=header.values_bytes + len(suffix))

    def _report(self, job: CaptureJob, reason: str) -> None:
        arena_id = job.view.arena.arena_id
        with self._reporting:
            self._in_flight.remove(job)
            try:
                if reason:
                    self._listener.voided(arena_id, job.slot, job.version, reason)
                else:
                    self._listener.committed(arena_id, job.slot, job.version)
            except Exception:
                log.exception("the outcome of step %d could not be reported", job.version.step)
