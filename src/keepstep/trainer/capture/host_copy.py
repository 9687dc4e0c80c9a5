"""Copies of host memory: small tensors inside `take`, all else on the copy thread, at a capped rate if one is set."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from keepstep import faults
from keepstep.errors import CaptureError
from keepstep.layout import ALIGN
from keepstep.trainer.capture.device_lane import PIECE_BYTES
from keepstep.trainer.capture.rate_cap import RateCap
from keepstep.trainer.capture.small_tensors import adjacent_runs
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp
from keepstep.trainer.state.optimizer_fence import CopyGate

THROTTLED_PIECE_BYTES = 1 << 20
MAX_BUFFERS_PER_CALL = 1024  # IOV_MAX
MAX_BYTES_PER_CALL = 1 << 30  # The system writes at most 2 GiB per call, and reports the rest only by a short count.

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
