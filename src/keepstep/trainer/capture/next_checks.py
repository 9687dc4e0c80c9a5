"""Checks and small-tensor tables for the next snapshots, prepared beside training.

`next_checks` is called inside `take`; everything else on the commit thread, when no thread waits for it.
"""

from __future__ import annotations

import logging
import random

from keepstep import faults
from keepstep.config import TakeConfig
from keepstep.trainer.capture.device_lane import DeviceLanes
from keepstep.trainer.capture.small_tensors import SmallTensorBatches
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.plan.copy_plan import CopyPlan, CopySchedule

log = logging.getLogger("keepstep")

FULL_CHECKS = 3  # Of the first snapshots of a layout, this many are compared in full.
# A full comparison reads the snapshot from host memory while the keeper seals the one before it. One behind the other
# would delay the seals until a snapshot at every step finds no slot.
FULL_CHECK_SPACING = 3


class NextChecks:
    """Prepared checks, by plan: a layout has one plan per turn of its replica sets."""

    def __init__(self, config: TakeConfig, lanes: DeviceLanes, small: SmallTensorBatches) -> None:
        self._config, self._lanes, self._small = config, lanes, small
        self._random = random.Random()
        self._checks: dict[int, tuple[CopyPlan, CopySchedule, list[SnapshotChecks]]] = {}

    def next_checks(self, plan: CopyPlan, schedule: CopySchedule) -> SnapshotChecks:
        """Checks of the bytes that will be copied after `take`; samples are taken now."""
        if self._config.fingerprint == "off" or not schedule.lazy:
            return SnapshotChecks()
        faults.point("capture.sample")
        prepared = self._checks.get(id(plan))
        ready = prepared is not None and prepared[1] is schedule and prepared[2]
        checks = ready.pop(0) if ready else SnapshotChecks.first(schedule, self._random)
        checks.take()
        return checks

    def is_whole(self, plan: CopyPlan) -> bool:
        """Whether the checks that are drawn next for this plan cover everything."""
        turn, offset = divmod(plan.history.checks, FULL_CHECK_SPACING)
        return self._config.fingerprint == "all" or (offset == 0 and turn < FULL_CHECKS)

    def choose(self, plan: CopyPlan, schedule: CopySchedule, *, count: int) -> None:
        """Draw chunks for the next snapshots with this plan: as many as may begin before the next call."""
        for key, (other, _, _) in list(self._checks.items()):
            if other.history is not plan.history:
                del self._checks[key]
        prepared = self._checks.get(id(plan))
        if prepared is None or prepared[1] is not schedule:
            plan.history.checks -= len(prepared[2]) if prepared else 0  # Those are never used.
            prepared = self._checks[id(plan)] = (plan, schedule, [])
        while len(prepared[2]) < count:
            try:
                with self._lanes.aside():
                    prepared[2].append(SnapshotChecks.next(schedule, self._random, whole=self.is_whole(plan)))
                plan.history.checks += 1
            except Exception as error:  # For example no device memory; the snapshots themselves stay complete.
                log.warning("the next snapshot is only sampled: %s", error)
                return

    def prepare_small(self, schedule: CopySchedule) -> None:
        """Copy the addresses of small tensors to their device."""
        try:
            with self._lanes.aside():
                for batch in self._small.lazy(schedule):
                    batch.prepare()
        except Exception as error:
            log.warning("small tensors are collected by the host: %s", error)
