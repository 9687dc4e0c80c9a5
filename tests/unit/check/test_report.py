"""The verdict as text."""

from __future__ import annotations

from keepstep.check.comparison import LostNumber
from keepstep.check.report import describe
from keepstep.check.run_order import CheckResult

EXACT = CheckResult(True, ranks=1, steps=tuple(range(20)))


def test_number_that_a_restore_loses_is_in_the_first_line() -> None:
    assert describe(EXACT) == "exact: 20 steps are equal bit for bit, with 0 kills"
    numbers = (LostNumber("epoch", 19, "2", "1"), LostNumber("seen", 3, "5", "0"))
    lost = CheckResult(True, steps=EXACT.steps, lost_variables=("epoch", "seen"), lost_numbers=numbers)
    first = describe(lost).splitlines()[0]
    assert first.startswith("exact so far: 20 steps")
    assert "but `epoch` was 1 instead of 2 at step 19 (and so were seen)" in first
    assert first.endswith("run it to its end with --steps")


def test_times_that_are_not_compared_are_listed() -> None:
    assert "not compared: times (eval_runtime)" in describe(CheckResult(True, times=("eval_runtime",)))
    assert "not compared: times (eval_runtime)" in describe(CheckResult(False, times=("eval_runtime",)))
    assert "not compared" not in describe(EXACT)
