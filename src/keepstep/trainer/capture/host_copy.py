"""Copies that the host makes. Inside `take`: small tensors, and tensors whose writer is not fenced (eager copies).

All else is copied by the copy thread, at a capped rate if one is set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from keepstep import faults
from keepstep.config import TakeConfig
from keepstep.errors import CaptureError
from keepstep.layout import ALIGN
from keepstep.trainer.capture.device_lane import PIECE_BYTES
from keepstep.trainer.capture.small_tensors import adjacent_runs
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp
from keepstep.trainer.state.optimizer_fence import CopyGate

THROTTLED_PIECE_BYTES = 1 << 20
MAX_BUFFERS_PER_CALL = 1024  # IOV_MAX
MAX_BYTES_PER_CALL = 1 << 30  # The system writes at most 2 GiB per call, and reports the rest only by a short count.
FIRST_GUESS_BYTES_S = 2e9  # Until a rate was measured.
MIN_MEASURED_S = 0.01  # Shorter copies say little about the rate.

StagedCopy = tuple[torch.Tensor, torch.Tensor]  # (target, clone on the device)
_ZEROS = memoryview(bytes(ALIGN))


@dataclass(frozen=True)
class _Call:
    buffers: list[memoryview]
    offset: int
    size_bytes: int


class SmallHostTensors:
    """Small tensors of the host, and the system calls that write them into the arena.

    The list of buffers is made once per schedule. One copy per tensor takes ten times as long, inside `take`. The
    buffers keep the memory of the tensors alive. Not by `Tensor.numpy()`, after which a tensor cannot be resized.
    """

    def __init__(self, ops: Sequence[CopyOp]) -> None:
        self._first_path = ops[0].path
        self._calls = [call for run in adjacent_runs(ops) for call in _calls(run)]

    def write(self, fd: int, start: int) -> None:
        """Write into the payload that begins at `start` in the memory behind `fd`."""
        for call in self._calls:
            faults.point("capture.eager")
            try:
                written = os.pwritev(fd, call.buffers, start + call.offset)
            except OSError as error:
                raise self._failure(os.strerror(error.errno or 0)) from error
            if written != call.size_bytes:
                raise self._failure(f"{written:,} of {call.size_bytes:,} bytes were written")

    def _failure(self, reason: str) -> CaptureError:
        return CaptureError(f"small tensors from {self._first_path} on could not be copied: {reason}")


def _calls(run: list[CopyOp]) -> list[_Call]:
    """Padding between two operations is written as zeros."""
    ends = [*(op.offset for op in run[1:]), run[-1].offset + run[-1].size_bytes]
    buffers, calls, start = list[memoryview](), list[_Call](), run[0].offset
    for op, end in zip(run, ends, strict=True):
        if buffers and (len(buffers) + 2 > MAX_BUFFERS_PER_CALL or end - start > MAX_BYTES_PER_CALL):
            calls.append(_Call(buffers, start, op.offset - start))
            buffers, start = [], op.offset
        buffers.append(memoryview(np.from_dlpack(op.source)))  # type: ignore[arg-type]
        if padding := end - op.offset - op.size_bytes:
            buffers.append(_ZEROS[:padding])
    return [*calls, _Call(buffers, start, ends[-1] - start)]


@dataclass
class CaptureCost:
    """What captures have cost so far."""

    eager_bytes: int = 0
    eager_s: float = 0.0
    copied_bytes: int = 0
    copy_s: float = 0.0


class RateCap:
    """Bytes per second that copies after `take` may read (`take.rate_bytes_s`); 0: no cap."""

    def __init__(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s

    def pace(self, size_bytes: int, gates: Iterable[CopyGate]) -> None:
        """Pause for as long as a copy of this size may take, unless an optimizer waits at one of these gates."""
        if self.rate_bytes_s:
            gate = min(gates, key=id)
            if not gate.waited_for.is_set():
                gate.waited_for.wait(size_bytes / self.rate_bytes_s)


class EagerCopier:
    """Inside `take`: copies host tensors into the arena, and clones those of devices, which are copied behind it."""

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


class HostCopier:
    """Executes the host part of a schedule."""

    def __init__(self, cap: RateCap, spent: CaptureCost) -> None:
        self._cap, self._spent = cap, spent
        self._small: WeakKeyDictionary[CopySchedule, SmallHostTensors] = WeakKeyDictionary()

    def copy_small(self, schedule: CopySchedule, fd: int, start: int) -> None:
        """Inside `take`: into the payload that begins at `start` in the memory behind `fd`."""
        if schedule.small_on_host:
            if schedule not in self._small:
                self._small[schedule] = SmallHostTensors(schedule.small_on_host)
            self._small[schedule].write(fd, start)

    def copy(
        self, ops: Sequence[CopyOp | ParityOp], targets: Sequence[torch.Tensor], gates: Mapping[int, CopyGate]
    ) -> Iterator[CopyOp | ParityOp]:
        """On the copy thread: copy in order. Yields each operation when its source is no longer read."""
        started = time.perf_counter()
        for op, target in zip(ops, targets, strict=True):
            waiting = [gates[index] for index in op.owners]
            if isinstance(op, ParityOp):
                faults.point("capture.copy")
                op.compute(target)
                self._cap.pace(op.size_bytes, waiting)
            else:
                self._copy_pieces(target, op.source, waiting)
            yield op
        if ops:
            self._spent.copied_bytes += sum(op.read_bytes for op in ops)
            self._spent.copy_s += time.perf_counter() - started

    def first_change(
        self, ops: Sequence[CopyOp | ParityOp], targets: Sequence[torch.Tensor], gates: Mapping[int, CopyGate]
    ) -> CopyOp | ParityOp | None:
        """Compare the copies with the live tensors, until an optimizer waits. Returns what changed meanwhile."""
        for op, target in zip(ops, targets, strict=True):
            if any(gate.waited_for.is_set() for gate in gates.values()):
                return None
            now = op.compute(torch.empty_like(target)) if isinstance(op, ParityOp) else op.source
            if not torch.equal(now, target):
                return op
        return None

    def _copy_pieces(self, target: torch.Tensor, source: torch.Tensor, gates: list[CopyGate]) -> None:
        piece = THROTTLED_PIECE_BYTES if self._cap.rate_bytes_s else PIECE_BYTES
        for start in range(0, target.numel(), piece):
            faults.point("capture.copy")
            part = target[start : start + piece]
            part.copy_(source[start : start + piece])
            self._cap.pace(part.numel(), gates)
