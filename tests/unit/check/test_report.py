"""The verdict as text."""

from __future__ import annotations

from keepstep.check.report import describe
from keepstep.check.run_order import CheckResult

EXACT = CheckResult(True, ranks=1, steps=tuple(range(20)))


def test_times_that_are_not_compared_are_listed() -> None:
    assert "not compared: times (eval_runtime)" in describe(CheckResult(True, times=("eval_runtime",)))
    assert "not compared: times (eval_runtime)" in describe(CheckResult(False, times=("eval_runtime",)))
    assert "not compared" not in describe(EXACT)
