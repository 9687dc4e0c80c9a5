"""Copies that finish inside `take`: of tensors whose writer is not fenced. Called by the training thread only."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from keepstep import faults
from keepstep.config import TakeConfig
from keepstep.errors import CaptureError
from keepstep.trainer.capture.host_copy import CaptureCost
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.plan.parity_ops import ParityOp

FIRST_GUESS_BYTES_S = 2e9  # Until a rate was measured.
MIN_MEASURED_S = 0.01  # Shorter copies say little about the rate.

StagedCopy = tuple[torch.Tensor, torch.Tensor]  # (target, clone on the device)


class EagerCopier:
    """Copies host tensors into the arena, and clones those of devices; the clones are copied behind `take`."""

    def __init__(self, config: TakeConfig, spent: CaptureCost) -> None:
        self._config, self._spent = config, spent

    def check_budget(self, ops: Sequence[CopyOp | ParityOp]) -> None:
        """Raise CaptureError when these copies would hold `take` for longer than `take.budget_ms`."""
        size = sum(op.read_bytes for op in ops if op.device.type == "cpu")
        spent = self._spent
        rate = spent.eager_bytes / spent.eager_s if spent.eager_s > MIN_MEASURED_S else FIRST_GUESS_BYTES_S
        expected_ms = 1000 * size / rate
        if expected_ms > self._config.budget_ms:
            largest = max(ops, key=lambda op: op.size_bytes)
            raise CaptureError(
                f"{size:,} bytes whose writer is not fenced would hold take for {expected_ms:.0f} ms "
                f"(largest: {largest.path})",
                hint="put the optimizer that writes them into the state, or raise KEEPSTEP_TAKE_BUDGET_MS",
            )

    def copy(self, ops: Sequence[CopyOp | ParityOp], targets: Sequence[torch.Tensor]) -> list[StagedCopy]:
        """Copy what is on the host, clone what is on devices. Returns the clones."""
        if not ops:
            return []
        started = time.perf_counter()
        staged: list[StagedCopy] = []
        host_targets: list[torch.Tensor] = []
        host_sources: list[torch.Tensor] = []
        coded_bytes = 0
        for op, target in zip(ops, targets, strict=True):
            if isinstance(op, ParityOp):
                coded_bytes += self._encode(op, target, staged)
                continue
            source = op.block.source() if op.block.materialise else op.source
            if source.device.type == "cpu":
                host_targets.append(target)
                host_sources.append(source)
            else:
                staged.append((target, source.clone()))
        if host_targets:
            faults.point("capture.eager")
            torch._foreach_copy_(host_targets, host_sources)
        if host_targets or coded_bytes:
            self._spent.eager_bytes += sum(source.numel() for source in host_sources) + coded_bytes
            self._spent.eager_s += time.perf_counter() - started
        return staged

    def _encode(self, op: ParityOp, target: torch.Tensor, staged: list[StagedCopy]) -> int:
        """Returns the bytes that were read on the host."""
        if op.device.type == "cpu":
            op.compute(target)
            return op.read_bytes
        staged.append((target, op.compute(torch.empty_like(target, device=op.device))))
        return 0
