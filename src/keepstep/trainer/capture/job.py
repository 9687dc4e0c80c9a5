"""One capture in flight, and what captures have cost so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from keepstep.arena.records import TrainerHeader
from keepstep.trainer.capture.device_copy import DeviceTransfer
from keepstep.trainer.capture.slot_targets import SlotTargets
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.plan.copy_plan import CopyPlan, CopySchedule
from keepstep.trainer.state.optimizer_fence import CopyGate
from keepstep.types import Version


@dataclass
class CaptureJob:
    """A capture in flight."""

    version: Version
    view: ArenaView
    slot: int
    header: TrainerHeader
    sequence: int
    """of that header in the arena"""
    plan: CopyPlan
    schedule: CopySchedule
    targets: SlotTargets
    gates: dict[int, CopyGate]
    checks: SnapshotChecks
    behind: Callable[[], bytes]
    """work that `take` has left to the copy thread; gives the encoded values"""
    look: Callable[[], str]
    """all that `take` has relied on, again: why the snapshot is void, or nothing"""
    queued: threading.Event = field(default_factory=threading.Event)
    """all that its devices have to do is queued, or nothing more will be"""
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(target, device clone) made inside `take`"""
    departures: list[DeviceTransfer] = field(default_factory=list)
    """one for each device"""
    void: str = ""


@dataclass
class CaptureCost:
    """What captures have cost so far."""

    eager_bytes: int = 0
    eager_s: float = 0.0
    copied_bytes: int = 0
    copy_s: float = 0.0
