"""One snapshot: what is copied inside `take`, what behind it, and the commit, last.

    take (caller's thread)    header WRITING → layout, eager copies → gates armed → return
    copy thread               lazy copies: of devices, queued (`leaving`); values; of the host, in place
    commit thread             all has landed → samples compared → header COMMITTED → the keeper is told

The threads only move bytes with calls that release the GIL, and wait. A fault anywhere voids this
snapshot and nothing else: the version before is in another slot. With three slots or more the next
snapshot may begin while the end of this one is still on its way; they land and are committed in order.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from keepstep import faults
from keepstep.arena import records as h
from keepstep.arena.records import TrainerHeader
from keepstep.config import TakeConfig
from keepstep.errors import CaptureError
from keepstep.trainer.capture.device_copy import DeviceTransfer
from keepstep.trainer.capture.device_lane import DeviceLanes
from keepstep.trainer.capture.host_copy import HostCopier
from keepstep.trainer.capture.job import CaptureCost, CaptureJob
from keepstep.trainer.capture.next_checks import NextChecks
from keepstep.trainer.capture.slot_targets import TargetCache
from keepstep.trainer.capture.small_tensors import SmallTensorBatches
from keepstep.trainer.connection.environment import RankPlace
from keepstep.trainer.integrity.fingerprints import frame
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.plan.copy_plan import CopyOp, CopyPlan
from keepstep.trainer.plan.parity_ops import ParityOp
from keepstep.trainer.state.optimizer_fence import CopyGate, OptimizerFence
from keepstep.types import Version

log = logging.getLogger("keepstep")

FIRST_GUESS_BYTES_S = 2e9
LOOK_S = 5.0
"""that long a `take` waits for the copy thread to queue what there is to do, in the rare case that it must know"""
MOST_READERS = 8
"""threads that compare: all of a large state takes one of them seconds, and the next snapshot may have to wait"""


def most_in_flight(num_slots: int) -> int:
    """Captures whose bytes are on their way at once."""
    return 2 if num_slots >= 3 else 1


class Capture:
    """Runs captures one at a time, in order. `committed` and `voided` are called from its threads."""

    def __init__(
        self,
        place: RankPlace,
        config: TakeConfig,
        fence: OptimizerFence,
        *,
        committed: Callable[[CaptureJob], None],
        voided: Callable[[CaptureJob, str], None],
    ) -> None:
        self._place, self._config, self._fence = place, config, fence
        self._committed, self._voided = committed, voided
        # Two may be in flight, and the thread may have begun neither: one that was staged whole has no gate to wait at.
        self._queue: queue.Queue[CaptureJob | None] = queue.Queue(maxsize=2)
        self._copied: queue.Queue[tuple[CaptureJob, str] | None] = queue.Queue(maxsize=2)
        self.lanes = DeviceLanes(config)
        self._small = SmallTensorBatches()
        self._targets = TargetCache(self._small)
        self._prepared = NextChecks(config, self.lanes, self._small)
        self.spent = CaptureCost()
        self._moving = HostCopier(config, self.spent, violated=self._violated)
        self._saying = threading.Lock()
        """held from the moment a capture is not in flight any more until the keeper was told"""
        self._flying: list[CaptureJob] = []
        """oldest first"""
        most = max(1, min(MOST_READERS, len(os.sched_getaffinity(0)) // 2))
        self._readers = ThreadPoolExecutor(most, thread_name_prefix="keepstep-compare")
        """started when there is something to compare with fingerprints of a device"""
        self._threads = [
            threading.Thread(target=self._copy_all, name="keepstep-copy", daemon=True),
            threading.Thread(target=self._commit_all, name="keepstep-commit", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def current(self) -> CaptureJob | None:
        """The newest capture in flight."""
        flying = self._flying
        return flying[-1] if flying else None

    def is_full(self, num_slots: int) -> bool:
        """Whether the next one must wait: there is no third slot, or what is copied now still reads live tensors.

        An optimizer waits for the newest snapshot only.
        """
        current = self.current
        if current is None:
            return False
        return len(self._flying) >= most_in_flight(num_slots) or any(gate.open for gate in current.gates.values())

    # On the caller's thread

    def begin(
        self,
        view: ArenaView,
        slot: int,
        version: Version,
        plan: CopyPlan,
        *,
        inexact: bool,
        behind: Callable[[], bytes],
        look: Callable[[], str] = lambda: "",
    ) -> None:
        """Start one snapshot. Raises CaptureError when it cannot be done now; the slot is then nobody's.

        On the copy thread: `behind` gives the encoded values, or raises; `look` says why the snapshot is void.
        """
        schedule = plan.schedule(self._fence.watched)
        self._check_budget(schedule.eager)
        arena = view.arena
        header = TrainerHeader(
            state=h.WRITING, rank=self._place.rank, world_size=self._place.world_size,
            local_index=self._place.local_index, local_world_size=self._place.local_world_size,
            flags=h.INEXACT if inexact else 0, version=version, layout_bytes=len(plan.encoded), values_bytes=0,
            payload_bytes=plan.payload_bytes, layout_digest=plan.layout_digest, written_at=time.time(),
            shared_offset=plan.layout.shared_offset,
        )  # fmt: skip
        sequence = arena.write_trainer_header(slot, header)
        view.write_layout(slot, plan)
        gates = {index: CopyGate() for index in schedule.owners}
        checks = self._prepared.next_checks(plan, schedule)
        targets = self._targets.targets(view, slot, schedule)
        job = CaptureJob(
            version, view, slot, header, sequence, plan, schedule, targets, gates, checks, behind, look,
        )  # fmt: skip
        self._moving.copy_small(schedule, arena.segment.fd, arena.payload_span(slot).offset)
        self._copy_eager(job, schedule.eager)
        self._gather_now(job)
        for device in schedule.devices | {source.device for _, source in job.staged}:
            self._depart(job, device)
        self._flying.append(job)
        try:
            faults.point("capture.queue")
            self._queue.put_nowait(job)
        except BaseException:
            self._flying.remove(job)
            raise
        self._fence.arm(gates)

    def _gather_now(self, job: CaptureJob) -> None:
        for batch in self._small.eager(job.schedule):
            batch.collect()
            target = job.targets.payload[batch.offset : batch.offset + batch.buffer.numel()]
            job.staged.append((target, batch.buffer.clone()))

    def _depart(self, job: CaptureJob, device: torch.device) -> None:
        """Copies of this device begin where its compute stream stands now."""
        cargo = self._targets.transfer(job.targets, job.schedule, device)
        staged = [pair for pair in job.staged if pair[1].device == device]
        checks = (partial(job.checks.look, device), partial(job.checks.leave, device))
        departure = DeviceTransfer(self.lanes.of(device), cargo, staged, *checks)
        job.departures.append(departure)
        for owner in departure.owners:
            job.gates[owner].overtake.append(partial(departure.overtake, owner))

    def _check_budget(self, eager: list[CopyOp | ParityOp]) -> None:
        size = sum(unit.read_bytes for unit in eager if unit.device.type == "cpu")
        rate = self.spent.eager_bytes / self.spent.eager_s if self.spent.eager_s > 0.01 else FIRST_GUESS_BYTES_S
        expected_ms = 1000 * size / rate
        if expected_ms > self._config.budget_ms:
            largest = max(eager, key=lambda unit: unit.size_bytes)
            raise CaptureError(
                f"{size:,} bytes whose writer is not fenced would hold take for {expected_ms:.0f} ms "
                f"(largest: {largest.path})",
                hint="put the optimizer that writes them into the state, or raise KEEPSTEP_TAKE_BUDGET_MS",
            )

    def _copy_eager(self, job: CaptureJob, units: Sequence[CopyOp | ParityOp]) -> None:
        if not units:
            return
        started = time.perf_counter()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        coded_bytes = 0
        for unit, target in zip(units, job.targets.eager, strict=True):
            if isinstance(unit, ParityOp):
                coded_bytes += self._encode_eager(job, unit, target)
                continue
            source = unit.block.source() if unit.block.materialise else unit.source
            if source.device.type == "cpu":
                targets.append(target)
                sources.append(source)
            else:
                job.staged.append((target, source.clone()))
        if targets:
            faults.point("capture.eager")
            torch._foreach_copy_(targets, sources)
        if targets or coded_bytes:
            self.spent.eager_bytes += sum(source.numel() for source in sources) + coded_bytes
            self.spent.eager_s += time.perf_counter() - started

    def _encode_eager(self, job: CaptureJob, unit: ParityOp, target: torch.Tensor) -> int:
        """Returns the bytes that were read on the host."""
        if unit.device.type == "cpu":
            unit.compute(target)
            return unit.read_bytes
        job.staged.append((target, unit.compute(torch.empty_like(target, device=unit.device))))
        return 0

    def suspect(self) -> None:
        """A `take` finds the last capture unfinished and an optimizer whose hook did not fire: has it written?"""
        job = self.current
        if job is None or job.void:
            return
        silent = {i for i, gate in job.gates.items() if gate.open and not self._fence.watched[i].fired}
        if not silent:
            return
        if job.departures and not self._have_looked(job, silent):
            job.void = "an optimizer may have written before the devices had looked at what it owns"
            return
        unit = job.checks.changed_at_source(silent)
        changed = f"{unit.path} changed without its optimizer's hook" if unit else ""
        if not job.checks:
            changed = "its samples were not taken"
        if changed:
            job.void = changed
            for index in silent:
                self._fence.watched[index].distrusted = changed

    def _have_looked(self, job: CaptureJob, silent: set[int]) -> bool:
        """The copy thread may be waiting for its turn."""
        for index in silent:
            job.gates[index].wanted.set()
        return job.queued.wait(LOOK_S) and job.checks.have_looked

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, and release the arena."""
        deadline = time.monotonic() + timeout_s
        while self._flying and time.monotonic() < deadline:
            time.sleep(0.002)
        with self._saying:
            if not self._flying:
                self._targets.clear()
            return not self._flying

    def close(self) -> None:
        self.drain(timeout_s=60)
        try:
            self._queue.put(None, timeout=5)
        except queue.Full:
            log.error("the copy thread is stuck; left behind")
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
                    gate.passed.set()
            self._copied.put((job, reason))
        self._copied.put(None)

    def _copy(self, job: CaptureJob) -> None:
        host = job.schedule.lazy_on_host
        left = {
            index: sum(index in unit.owners for unit in host) + sum(index in one.owners for one in job.departures)
            for index in job.gates
        }

        def passed(index: int) -> None:
            left[index] -= 1
            if left[index] == 0:
                job.gates[index].passed.set()

        waits = any(departure.must_wait for departure in job.departures)
        if waits:  # for the snapshot before it: there is time now
            self._look(job)
        for departure in job.departures:
            departure.wait_for_turn(lambda: any(gate.wanted.is_set() for gate in job.gates.values()))
            departure.issue(passed, lambda size: self._moving.pace(size, job.gates.values()))
        job.queued.set()
        if not waits:
            self._look(job)
        self._moving.copy(job, passed)

    def _look(self, job: CaptureJob) -> None:
        """What `take` has left to do."""
        self._write_values(job)
        moved = job.look()
        if moved:  # not otherwise: `suspect` may have said something meanwhile
            job.void = moved

    def _write_values(self, job: CaptureJob) -> None:
        values, arena = job.behind(), job.view.arena
        arena.segment.write(arena.values_span(job.slot).offset, values)
        job.header = replace(job.header, values_bytes=len(values))

    # On the commit thread

    def _commit_all(self) -> None:
        while (copied := self._copied.get()) is not None:
            job, reason = copied
            try:
                reason = reason or self._land(job)
                if not reason:
                    self._commit(job)
            except Exception as error:
                log.exception("the end of step %d failed", job.version.step)
                reason = f"the copy failed: {error!r}"
            if reason:
                self.lanes.settle()
            whole = self._prepared.is_whole(job.plan)
            if not reason and whole:  # the next one must not begin without
                self._choose_checks(job, whole=True)
            self._finish(job, reason)
            if not reason and not whole:  # a sample may be missed now and then: the keeper can begin before it is drawn
                self._choose_checks(job, whole=False)
            if not reason:
                self._prepared.prepare_small(job.schedule)

    def _choose_checks(self, job: CaptureJob, *, whole: bool) -> None:
        if job.checks:
            count = most_in_flight(job.view.arena.num_slots)
            self._prepared.choose(job.plan, job.schedule, count=count, whole=whole)

    def _land(self, job: CaptureJob) -> str:
        """Wait until all of it is there. Returns why the snapshot is void, if it is."""
        for departure in job.departures:
            moved, took_s = departure.finish()
            self.spent.copied_bytes += moved
            self.spent.copy_s += took_s
        return job.void or next((g.broken for g in job.gates.values() if g.broken), "") or self._compare(job)

    def _compare(self, job: CaptureJob) -> str:
        """What was seen at the source against what landed. Returns what is wrong."""
        job.plan.history.snapshots += 1
        if not job.checks:
            return ""
        faults.point("capture.compare")
        with self.lanes.aside():
            unit = job.checks.changed_on_the_way(job.view.payload(job.slot), self._over)
            if unit is not None:
                self._violated(job, unit)
        return job.void

    def _over(self, look: Any, starts: Iterable[int]) -> Iterable[Any]:
        try:
            return self._readers.map(look, starts)
        except RuntimeError:  # the interpreter ends and starts no threads any more: the last snapshot counts too
            return map(look, starts)

    def _violated(self, job: CaptureJob, unit: CopyOp | ParityOp) -> None:
        names = [self._fence.watched[index].name for index in sorted(unit.owners)]
        job.void = f"{unit.path} changed while it was copied: something writes it outside {', '.join(names)}.step()"
        log.error("%s; it is copied inside take from now on", job.void)
        for index in unit.owners:
            self._fence.watched[index].distrusted = job.void

    def _commit(self, job: CaptureJob) -> None:
        """The last act: from here on the snapshot is whole."""
        header = replace(job.header, state=h.COMMITTED)
        prints = job.checks.encode()
        if prints:
            header = self._keep_prints(job, header, prints)
        job.view.arena.write_trainer_header(job.slot, header)

    def _keep_prints(self, job: CaptureJob, header: TrainerHeader, prints: bytes) -> TrainerHeader:
        """Behind the values, as far as there is room."""
        span = job.view.arena.values_span(job.slot)
        suffix = frame(prints, span.size_bytes - header.values_bytes)
        if not suffix:
            return header
        job.view.arena.segment.write(span.offset + header.values_bytes, suffix)
        return replace(header, flags=header.flags | h.PRINTS, values_bytes=header.values_bytes + len(suffix))

    def _finish(self, job: CaptureJob, reason: str) -> None:
        with self._saying:
            self._flying.remove(job)
            try:
                if reason:
                    self._voided(job, reason)
                else:
                    self._committed(job)
            except Exception:
                log.exception("the keeper could not be told about step %d", job.version.step)
