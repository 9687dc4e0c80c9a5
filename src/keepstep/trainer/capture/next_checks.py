"""What the next snapshots need and the last ones make ready, behind the training: what is looked at, and how small
tensors are collected.

`next_checks` is called inside `take`; all else on the commit thread, while nobody waits for it.
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

FULL_CHECKS = 3
"""the first snapshots of a layout are compared in full"""


class NextChecks:
    """By plan: a layout has one for each turn of its shares."""

    def __init__(self, config: TakeConfig, lanes: DeviceLanes, small: SmallTensorBatches) -> None:
        self._config, self._lanes, self._small = config, lanes, small
        self._random = random.Random()
        self._checks: dict[int, tuple[CopyPlan, CopySchedule, list[SnapshotChecks]]] = {}

    def next_checks(self, plan: CopyPlan, parts: CopySchedule) -> SnapshotChecks:
        """Something of what will be copied behind `take`, as it is now."""
        if self._config.fingerprint == "off" or not parts.lazy:
            return SnapshotChecks()
        faults.point("capture.sample")
        prepared = self._checks.get(id(plan))
        known = prepared is not None and prepared[1] is parts and prepared[2]
        checks = known.pop(0) if known else SnapshotChecks.first(parts, self._random)
        checks.take()
        return checks

    def is_whole(self, plan: CopyPlan) -> bool:
        """Whether the next snapshot with this plan is looked at in full."""
        return self._config.fingerprint == "all" or plan.history.snapshots <= FULL_CHECKS

    def choose(self, plan: CopyPlan, parts: CopySchedule, *, count: int, whole: bool) -> None:
        """Other places for the next snapshots with this plan: as many as may begin before this is called again."""
        for key, (other, _, _) in list(self._checks.items()):
            if other.history is not plan.history:
                del self._checks[key]
        prepared = self._checks.get(id(plan))
        if prepared is None or prepared[1] is not parts:
            prepared = self._checks[id(plan)] = (plan, parts, [])
        while len(prepared[2]) < count:
            try:
                with self._lanes.aside():
                    prepared[2].append(SnapshotChecks.next(parts, self._random, whole=whole))
            except Exception as error:  # a device without memory, say: the snapshots themselves are whole all the same
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
