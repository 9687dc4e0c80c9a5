"""One snapshot: what is copied inside `take`, what behind it, and the commit, last.

    take (caller's thread)    header WRITING → values, layout, eager copies → gates armed → return
    copy thread               lazy copies → samples compared → header COMMITTED → the keeper is told

The thread only moves bytes with calls that release the GIL, and waits. A fault anywhere voids this
snapshot and nothing else: the version before is in another slot. CPU and CUDA tensors take the same
way; a device copy is queued on a side stream behind the compute stream and its gate is an event.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep import faults
from keepstep.arena import header as h
from keepstep.arena.header import TrainerHeader
from keepstep.config import TakeConfig
from keepstep.errors import CaptureError
from keepstep.trainer.coding import Coded
from keepstep.trainer.copies import PIECE_BYTES, CopyPlan
from keepstep.trainer.fence import Fence, Gate
from keepstep.trainer.samples import Samples
from keepstep.trainer.units import Unit
from keepstep.trainer.view import ArenaView
from keepstep.trainer.world import Place as Place
from keepstep.types import Version

log = logging.getLogger("keepstep")

# Compared in full behind `take`, as long as nobody waits: the first snapshots of a layout.
FULL_CHECKS = 3
FIRST_GUESS_BYTES_S = 2e9
THROTTLED_PIECE_BYTES = 1 << 20


@dataclass
class Job:
    """A capture in flight."""

    version: Version
    view: ArenaView
    slot: int
    header: TrainerHeader
    plan: CopyPlan
    lazy: list[Unit | Coded]
    gates: dict[int, Gate]
    samples: Samples | None
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(target, device clone) made inside `take`"""
    ready: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    void: str = ""


@dataclass
class Spent:
    """What captures have cost so far."""

    eager_bytes: int = 0
    eager_s: float = 0.0
    copied_bytes: int = 0
    copy_s: float = 0.0


class Capture:
    """Runs captures one at a time, in order. `committed` and `voided` are called from the copy thread."""

    def __init__(
        self,
        place: Place,
        config: TakeConfig,
        fence: Fence,
        *,
        committed: Callable[[Job], None],
        voided: Callable[[Job, str], None],
    ) -> None:
        self._place, self._config, self._fence = place, config, fence
        self._committed, self._voided = committed, voided
        self._queue: queue.Queue[Job | None] = queue.Queue(maxsize=1)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._random = random.Random()
        self._next_samples: dict[int, tuple[CopyPlan, int, Samples]] = {}
        """chosen behind the capture before, by plan: a layout has one for each turn of its shares"""
        self.spent = Spent()
        self.current: Job | None = None
        self._thread = threading.Thread(target=self._run, name="keepstep-copy", daemon=True)
        self._thread.start()

    # On the caller's thread

    def begin(
        self, view: ArenaView, slot: int, version: Version, plan: CopyPlan, values: bytes, *, inexact: bool
    ) -> None:
        """Start one snapshot. Raises CaptureError when it cannot be done now; the slot is then nobody's."""
        watched = self._fence.watched
        eager, lazy = plan.split(watched)
        self._check_budget(eager)
        arena = view.arena
        header = TrainerHeader(
            h.WRITING, self._place.rank, self._place.world_size, self._place.local_index,
            self._place.local_world_size, h.INEXACT if inexact else 0, version, len(plan.encoded), len(values),
            plan.payload_bytes, plan.layout_digest, time.time(), plan.layout.shared_offset,
        )  # fmt: skip
        arena.write_trainer_header(slot, header)
        arena.segment.write(arena.values_span(slot).offset, values)
        view.write_layout(slot, plan)
        gates = {index: Gate() for index in frozenset[int]().union(*{unit.owners for unit in lazy})}
        job = Job(version, view, slot, header, plan, lazy, gates, self._sample(plan, lazy))
        self._copy_eager(job, plan.small, "small")
        self._copy_eager(job, eager, "eager")
        job.ready = _record_events({unit.device for unit in lazy} | {source.device for _, source in job.staged})
        self.current = job
        try:
            faults.point("capture.queue")
            self._queue.put_nowait(job)
        except BaseException:
            self.current = None
            raise
        self._fence.arm(gates)

    def _check_budget(self, eager: list[Unit | Coded]) -> None:
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

    def _sample(self, plan: CopyPlan, lazy: list[Unit | Coded]) -> Samples | None:
        if not self._config.fingerprint or not lazy:
            return None
        faults.point("capture.sample")
        prepared = self._next_samples.pop(id(plan), None)
        if prepared is not None and prepared[1] == len(lazy):
            samples = prepared[2]
        else:
            samples = Samples.choose(lazy, self._random)
        samples.take()
        return samples

    def _copy_eager(self, job: Job, units: Sequence[Unit | Coded], name: str) -> None:
        if not units:
            return
        started = time.perf_counter()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        coded_bytes = 0
        for unit, target in zip(units, job.view.targets(job.slot, job.plan, units), strict=True):
            if isinstance(unit, Coded):
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
        if name == "eager" and (targets or coded_bytes):
            self.spent.eager_bytes += sum(source.numel() for source in sources) + coded_bytes
            self.spent.eager_s += time.perf_counter() - started

    def _encode_eager(self, job: Job, unit: Coded, target: torch.Tensor) -> int:
        """Returns the bytes that were read on the host."""
        if unit.device.type == "cpu":
            unit.compute(target)
            return unit.read_bytes
        job.staged.append((target, unit.compute(torch.empty_like(target, device=unit.device))))
        return 0

    def suspect(self) -> None:
        """A `take` finds the last capture unfinished and an optimizer whose hook did not fire: has it written?"""
        job = self.current
        if job is None or job.void or all(gate.passed.is_set() for gate in job.gates.values()):
            return
        silent = {i for i in job.gates if not self._fence.watched[i].fired and not job.gates[i].passed.is_set()}
        if not silent:
            return
        changed = "its samples were not taken"
        if job.samples is not None:
            unit = job.samples.changed_at_source(silent)
            changed = f"{unit.path} changed without its optimizer's hook" if unit else ""
        if changed:
            job.void = changed
            for index in silent:
                self._fence.watched[index].distrusted = changed

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight."""
        deadline = time.monotonic() + timeout_s
        while self.current is not None and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.current is None

    def close(self) -> None:
        self.drain(timeout_s=60)
        try:
            self._queue.put(None, timeout=5)
        except queue.Full:
            log.error("the copy thread is stuck; left behind")
            return
        self._thread.join(timeout=5)

    # On the copy thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._copy(job)
                reason = job.void or next((g.broken for g in job.gates.values() if g.broken), "") or self._compare(job)
                if not reason:
                    self._commit(job)
            except Exception as error:
                log.exception("the copy of step %d failed", job.version.step)
                reason = f"the copy failed: {error!r}"
            finally:
                for gate in job.gates.values():
                    gate.passed.set()
            self._finish(job, reason)

    def _copy(self, job: Job) -> None:
        started = time.perf_counter()
        devices = set(job.ready)
        for device in devices:
            self._stream(device).wait_event(job.ready[device])
        for target, source in job.staged:
            self._move(target, source, None)
        targets = job.view.targets(job.slot, job.plan, job.lazy)
        left = {index: sum(index in unit.owners for unit in job.lazy) for index in job.gates}
        for unit, target in zip(job.lazy, targets, strict=True):
            gate = min((job.gates[i] for i in unit.owners), key=id)
            if isinstance(unit, Coded):
                self._encode(target, unit, gate)
            else:
                self._move(target, unit.source, gate)
            for index in unit.owners:
                left[index] -= 1
                if left[index] == 0 and not self._checks_in_full(job):
                    self._pass(job.gates[index])
        if self._checks_in_full(job):
            self._synchronise(devices)
            self._compare_in_full(job, targets)
            for gate in job.gates.values():
                self._pass(gate)
        self._synchronise(devices)
        self.spent.copied_bytes += sum(unit.read_bytes for unit in job.lazy)
        self.spent.copy_s += time.perf_counter() - started

    def _move(self, target: torch.Tensor, source: torch.Tensor, gate: Gate | None) -> None:
        rate = self._config.rate_bytes_s
        piece = THROTTLED_PIECE_BYTES if rate else PIECE_BYTES
        with self._on_stream(source.device):
            for start in range(0, target.numel(), piece):
                faults.point("capture.copy")
                part = target[start : start + piece]
                part.copy_(source[start : start + piece], non_blocking=True)
                if rate and gate is not None and not gate.wanted.is_set():
                    gate.wanted.wait(part.numel() / rate)

    def _encode(self, target: torch.Tensor, unit: Coded, gate: Gate) -> None:
        """Parity is computed where the tensors are; only the result leaves a device."""
        faults.point("capture.copy")
        with self._on_stream(unit.device):
            if unit.device.type == "cpu":
                unit.compute(target)
            else:
                target.copy_(unit.compute(torch.empty_like(target, device=unit.device)), non_blocking=True)
        rate = self._config.rate_bytes_s
        if rate and not gate.wanted.is_set():
            gate.wanted.wait(unit.size_bytes / rate)

    def _on_stream(self, device: torch.device) -> Any:
        return torch.cuda.stream(self._stream(device)) if device.type == "cuda" else nullcontext()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _pass(self, gate: Gate) -> None:
        for stream in self._streams.values():
            gate.events.append(stream.record_event())
        gate.passed.set()

    def _synchronise(self, devices: set[torch.device]) -> None:
        for device in devices:
            self._stream(device).synchronize()

    def _checks_in_full(self, job: Job) -> bool:
        return self._config.fingerprint and job.plan.history.snapshots < FULL_CHECKS

    def _compare_in_full(self, job: Job, targets: list[torch.Tensor]) -> None:
        """While nobody waits: is what landed still what stands in the live tensors?"""
        for unit, target in zip(job.lazy, targets, strict=True):
            if any(gate.wanted.is_set() for gate in job.gates.values()):
                return
            if unit.device.type != "cpu":
                continue
            now = unit.compute(torch.empty_like(target)) if isinstance(unit, Coded) else unit.source
            if not torch.equal(now, target):
                self._violated(job, unit)
                return

    def _compare(self, job: Job) -> str:
        """Samples taken at the source against what landed. Returns what is wrong."""
        job.plan.history.snapshots += 1
        if job.samples is None:
            return ""
        faults.point("capture.compare")
        unit = job.samples.changed_on_the_way(job.view.payload(job.slot))
        if unit is not None:
            self._violated(job, unit)
            return job.void
        self._prepare_samples(job)
        return job.void

    def _prepare_samples(self, job: Job) -> None:
        """Other windows for the next snapshot with this plan, while nobody waits."""
        for key, (plan, _, _) in list(self._next_samples.items()):
            if plan.history is not job.plan.history:
                del self._next_samples[key]
        self._next_samples[id(job.plan)] = (job.plan, len(job.lazy), Samples.choose(job.lazy, self._random))

    def _violated(self, job: Job, unit: Unit | Coded) -> None:
        names = [self._fence.watched[index].name for index in sorted(unit.owners)]
        job.void = f"{unit.path} changed while it was copied: something writes it outside {', '.join(names)}.step()"
        log.error("%s; it is copied inside take from now on", job.void)
        for index in unit.owners:
            self._fence.watched[index].distrusted = job.void

    def _commit(self, job: Job) -> None:
        """The last act: from here on the snapshot is whole."""
        fields = {**job.header.__dict__, "state": h.COMMITTED}
        job.view.arena.write_trainer_header(job.slot, TrainerHeader(**fields))

    def _finish(self, job: Job, reason: str) -> None:
        self.current = None
        try:
            if reason:
                self._voided(job, reason)
            else:
                self._committed(job)
        except Exception:
            log.exception("the keeper could not be told about step %d", job.version.step)


def _record_events(devices: set[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """Where the compute stream of each device stands now: copies begin behind it."""
    return {device: torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"}
