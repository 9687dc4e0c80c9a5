"""Lazy copies of host memory: on the copy thread, in place, piece by piece, at a capped rate if that is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from keepstep import faults
from keepstep.config import TakeConfig
from keepstep.trainer.capture.device_copy import PIECE_BYTES
from keepstep.trainer.capture.job import CaptureCost, CaptureJob
from keepstep.trainer.capture.next_checks import FULL_CHECKS
from keepstep.trainer.plan.parity_ops import ParityOp
from keepstep.trainer.plan.units import CopyOp
from keepstep.trainer.state.optimizer_fence import CopyGate

THROTTLED_PIECE_BYTES = 1 << 20


class HostCopier:
    """`violated` is called with what has changed while it was copied."""

    def __init__(
        self,
        config: TakeConfig,
        spent: CaptureCost,
        *,
        violated: Callable[[CaptureJob, CopyOp | ParityOp], None],
    ) -> None:
        self._config, self._spent = config, spent
        self._violated = violated

    def copy(self, job: CaptureJob, passed: Callable[[int], None]) -> None:
        """`passed` is told of an optimizer for each unit of its that is no longer read."""
        units = job.parts.lazy_on_host
        started = time.perf_counter()
        targets = job.view.targets(job.slot, job.plan, units)
        held: list[int] = []
        """optimizers that may write once everything was compared"""
        for unit, target in zip(units, targets, strict=True):
            if isinstance(unit, ParityOp):
                faults.point("capture.copy")
                unit.compute(target)
                self.pace(unit.size_bytes, [job.gates[index] for index in unit.owners])
            else:
                self._move(target, unit.source, [job.gates[index] for index in unit.owners])
            for index in unit.owners:
                if self._checks_in_full(job):
                    held.append(index)
                else:
                    passed(index)
        if held:
            self._compare_in_full(job, units, targets)
        for index in held:
            passed(index)
        if units:
            self._spent.copied_bytes += sum(unit.read_bytes for unit in units)
            self._spent.copy_s += time.perf_counter() - started

    def _move(self, target: torch.Tensor, source: torch.Tensor, gates: list[CopyGate]) -> None:
        piece = THROTTLED_PIECE_BYTES if self._config.rate_bytes_s else PIECE_BYTES
        for start in range(0, target.numel(), piece):
            faults.point("capture.copy")
            part = target[start : start + piece]
            part.copy_(source[start : start + piece])
            self.pace(part.numel(), gates)

    def pace(self, size_bytes: int, gates: Iterable[CopyGate]) -> None:
        """Keep to the cap, unless an optimizer waits."""
        rate = self._config.rate_bytes_s
        if rate:
            gate = min(gates, key=id)
            if not gate.wanted.is_set():
                gate.wanted.wait(size_bytes / rate)

    def _checks_in_full(self, job: CaptureJob) -> bool:
        return self._config.fingerprint != "off" and job.plan.history.snapshots < FULL_CHECKS

    def _compare_in_full(self, job: CaptureJob, units: list[CopyOp | ParityOp], targets: list[torch.Tensor]) -> None:
        """While nobody waits: is what landed still what stands in the live tensors?"""
        for unit, target in zip(units, targets, strict=True):
            if any(gate.wanted.is_set() for gate in job.gates.values()):
                return
            now = unit.compute(torch.empty_like(target)) if isinstance(unit, ParityOp) else unit.source
            if not torch.equal(now, target):
                self._violated(job, unit)
                return
