"""Small tensors of a device: collected on the device by one call, copied to the host by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from keepstep.layout import ALIGN
from keepstep.parity.gpu.batches import CopyBatch, is_word_aligned
from keepstep.trainer.memory import pinned
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule

MAX_TENSORS_PER_CALL = 2048  # A call with more of them holds the interpreter for milliseconds.


@dataclass
class SmallTensorBatch:
    """Operations that are adjacent in the payload, and a buffer on their device with the same content."""

    offset: int
    buffer: torch.Tensor
    ops: Sequence[CopyOp]
    # (places in the buffer, sources) of each call
    calls: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    owners: frozenset[int]
    prepared: CopyBatch | None = None

    def prepare(self) -> None:
        """Copy all addresses to the device, which then collects without the host: otherwise thousands of tensors cost
        the host tens of milliseconds per snapshot. Waits for the device at first use."""
        if self.prepared is None and self.buffer.is_cuda:
            starts = [op.offset - self.offset for op in self.ops]
            places = [self.buffer[start : start + op.size_bytes] for start, op in zip(starts, self.ops, strict=True)]
            self.prepared = CopyBatch([op.source for op in self.ops], places)

    def collect(self) -> None:
        """Queue the copies into the buffer on the current stream."""
        if self.prepared is not None:
            self.prepared.run()
            return
        for places, sources in self.calls:
            torch._foreach_copy_(places, sources)

    def copy_to_host(self, payload: torch.Tensor) -> None:
        """Queue the copy of the buffer on the current stream."""
        pinned.copy_to_host(payload[self.offset : self.offset + self.buffer.numel()], self.buffer)


class SmallTensorBatches:
    """The batches of each schedule, made at first use; they are freed with the schedule."""

    def __init__(self) -> None:
        self._eager: WeakKeyDictionary[CopySchedule, list[SmallTensorBatch]] = WeakKeyDictionary()
        self._lazy: WeakKeyDictionary[CopySchedule, list[SmallTensorBatch]] = WeakKeyDictionary()

    def eager(self, schedule: CopySchedule) -> list[SmallTensorBatch]:
        """Copied inside `take`; for all devices."""
        if schedule not in self._eager:
            self._eager[schedule] = _by_device([op for op in schedule.small_eager if op.device.type != "cpu"])
        return self._eager[schedule]

    def clone_eager(self, schedule: CopySchedule, payload: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inside `take`: collect the eager batches. Returns (target, clone on the device) of each."""
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in self.eager(schedule):
            batch.collect()
            target = payload[batch.offset : batch.offset + batch.buffer.numel()]
            staged.append((target, batch.buffer.clone()))
        return staged

    def lazy(self, schedule: CopySchedule) -> list[SmallTensorBatch]:
        """Copied after `take`; for all devices."""
        if schedule not in self._lazy:
            self._lazy[schedule] = _by_device(schedule.small_lazy)
        return self._lazy[schedule]


def _by_device(ops: Sequence[CopyOp]) -> list[SmallTensorBatch]:
    by_device: dict[torch.device, list[CopyOp]] = {}
    for op in ops:
        by_device.setdefault(op.device, []).append(op)
    return [batch for device_ops in by_device.values() for batch in make_batches(device_ops)]


def make_batches(ops: Sequence[CopyOp]) -> list[SmallTensorBatch]:
    """All operations are of one device. A gap in the payload begins a new batch."""
    batches: list[SmallTensorBatch] = []
    for run in adjacent_runs(ops):
        start, end = run[0].offset, run[-1].offset + run[-1].size_bytes
        buffer = torch.zeros(end - start, dtype=torch.uint8, device=run[0].device)
        places = [buffer[op.offset - start : op.offset - start + op.size_bytes] for op in run]
        owners = frozenset[int]().union(*(op.owners for op in run))
        calls = foreach_copies(places, [op.source for op in run])
        batches.append(SmallTensorBatch(start, buffer, run, calls, owners))
    return batches


def adjacent_runs(ops: Sequence[CopyOp]) -> list[list[CopyOp]]:
    """Operations that are adjacent in the payload: only padding lies between them."""
    runs: list[list[CopyOp]] = []
    end = -1
    for op in sorted(ops, key=lambda op: op.offset):
        if not runs or op.offset - end >= ALIGN:
            runs.append([])
        runs[-1].append(op)
        end = op.offset + op.size_bytes
    return runs


def foreach_copies(
    targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Arguments for `torch._foreach_copy_`. In words of eight bytes where both sides are aligned: a device copies them
    several times as fast."""
    words: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    rest: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        aligned = is_word_aligned(target) and is_word_aligned(source)
        into, out_of = words if aligned else rest
        into.append(target.view(torch.int64) if aligned else target)
        out_of.append(source.view(torch.int64) if aligned else source)
    return [
        (into[start : start + MAX_TENSORS_PER_CALL], out_of[start : start + MAX_TENSORS_PER_CALL])
        for into, out_of in (words, rest)
        for start in range(0, len(into), MAX_TENSORS_PER_CALL)
    ]
