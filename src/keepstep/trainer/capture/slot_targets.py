"""Targets of a schedule in one slot of the arena: views and copy pieces, made once for thousands of snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import torch

from keepstep.trainer.capture.device_copy import TransferPlan
from keepstep.trainer.capture.small_tensors import SmallTensorBatches
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp


class SlotTargets:
    """Target of each operation, in the order of the schedule, and a transfer plan per source device."""

    def __init__(self, payload: torch.Tensor, schedule: CopySchedule) -> None:
        # Its lists, not the schedule: that is the weak key of the cache which holds this object.
        self.payload, self._eager, self._lazy_on_host = payload, schedule.eager, schedule.lazy_on_host
        self.transfers: dict[torch.device, TransferPlan] = {}

    @cached_property
    def eager(self) -> list[torch.Tensor]:
        return _places(self.payload, self._eager)

    @cached_property
    def lazy_on_host(self) -> list[torch.Tensor]:
        """For the copy thread: thousands of views take milliseconds to make."""
        return _places(self.payload, self._lazy_on_host)


class TargetCache:
    """Targets by schedule and slot, of one arena at a time; they are freed with the schedule."""

    def __init__(self, batches: SmallTensorBatches) -> None:
        self._batches = batches
        self._view: ArenaView | None = None
        self._targets: WeakKeyDictionary[CopySchedule, dict[int, SlotTargets]] = WeakKeyDictionary()

    def targets(self, view: ArenaView, slot: int, schedule: CopySchedule) -> SlotTargets:
        if view is not self._view:
            self.clear()
            self._view = view
        by_slot = self._targets.setdefault(schedule, {})
        if slot not in by_slot:
            by_slot[slot] = SlotTargets(view.payload(slot), schedule)
        return by_slot[slot]

    def transfer(self, targets: SlotTargets, schedule: CopySchedule, device: torch.device) -> TransferPlan:
        if device not in targets.transfers:
            batches = [batch for batch in self._batches.lazy(schedule) if batch.buffer.device == device]
            targets.transfers[device] = TransferPlan.build(targets.payload, schedule, device, batches)
        return targets.transfers[device]

    def clear(self) -> None:
        """Call it before the arena is closed: as long as a view of it exists, its memory stays mapped."""
        self._view = None
        self._targets.clear()


def _places(payload: torch.Tensor, ops: Sequence[CopyOp | ParityOp]) -> list[torch.Tensor]:
    return [payload[op.offset : op.offset + op.size_bytes] for op in ops]
