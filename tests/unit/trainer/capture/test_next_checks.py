"""Which of the first snapshots are compared in full."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.config import TakeConfig
from keepstep.layout import Layout
from keepstep.trainer.capture.device_lane import DeviceLanes
from keepstep.trainer.capture.next_checks import FULL_CHECK_SPACING, FULL_CHECKS, NextChecks
from keepstep.trainer.capture.small_tensors import SmallTensorBatches
from keepstep.trainer.plan.copy_plan import CopyOp, CopyPlan, CopySchedule


def _schedule() -> CopySchedule:
    nobody: Any = None
    source = torch.zeros(1 << 20, dtype=torch.uint8)
    return CopySchedule(lazy=[CopyOp(source, 0, source.numel(), "weight", frozenset({0}), nobody)])


class Draws:
    """Draws checks as the commit thread does, one for each snapshot."""

    def __init__(self, config: TakeConfig) -> None:
        self.checks = NextChecks(config, DeviceLanes(config), SmallTensorBatches())
        self.plan = CopyPlan(Layout((), ()), b"", b"")

    def whole(self, schedule: CopySchedule, num: int) -> list[bool]:
        """Take `num` snapshots with this schedule. Returns which of their checks cover everything."""
        drawn = list[bool]()
        for _ in range(num):
            drawn.append(self.checks.is_whole(self.plan))
            self.checks.choose(self.plan, schedule, count=1)
            self.checks.next_checks(self.plan, schedule)
        return drawn


def test_full_checks_are_spread_over_the_first_snapshots() -> None:
    whole = Draws(TakeConfig()).whole(_schedule(), 30)
    assert whole[: 3 * FULL_CHECK_SPACING] == [True, False, False] * FULL_CHECKS
    assert not any(whole[3 * FULL_CHECK_SPACING :])


def test_every_snapshot_is_compared_in_full_where_that_is_set() -> None:
    assert all(Draws(TakeConfig(fingerprint="all")).whole(_schedule(), 30))


def test_a_full_check_that_no_snapshot_used_is_drawn_again() -> None:
    """The schedule changes when the first step of an optimizer has been seen."""
    draws, before = Draws(TakeConfig()), _schedule()
    draws.checks.choose(draws.plan, before, count=2)
    assert not draws.checks.is_whole(draws.plan)
    after = _schedule()
    draws.checks.choose(draws.plan, after, count=0)
    assert draws.whole(after, 4) == [True, False, False, True]
