"""Transfer plans are made once for each slot and device, and hold no memory of a slot whose targets are gone."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from keepstep.trainer.capture.device_copy import TransferPlans
from keepstep.trainer.capture.small_tensors import SmallTensorBatches
from keepstep.trainer.memory.arena_view import SlotTargets
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule

HERE, SIZE = torch.device("cpu"), 1000


def schedule() -> CopySchedule:
    nobody: Any = None
    source = torch.zeros(SIZE, dtype=torch.uint8)
    return CopySchedule(lazy=[CopyOp(source, 0, SIZE, "weight", frozenset({0}), nobody)])


def payload() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8)


def test_a_plan_is_made_once_for_each_slot() -> None:
    lazy, plans = schedule(), TransferPlans(SmallTensorBatches())
    slots = [SlotTargets(payload(), lazy) for _ in range(2)]
    first = plans.of(slots[0], lazy, HERE)
    assert [piece.size_bytes for piece in first.pieces] == [SIZE]
    assert first.pieces[0].target.data_ptr() == slots[0].payload.data_ptr()
    assert plans.of(slots[0], lazy, HERE) is first
    assert plans.of(slots[1], lazy, HERE).payload is slots[1].payload


def test_a_plan_is_freed_with_the_targets_of_its_slot() -> None:
    lazy, plans = schedule(), TransferPlans(SmallTensorBatches())
    targets = SlotTargets(payload(), lazy)
    memory = weakref.ref(targets.payload)
    plans.of(targets, lazy, HERE)
    del targets
    assert memory() is None, "the arena would stay mapped"
