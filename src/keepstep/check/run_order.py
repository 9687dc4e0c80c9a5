"""The order of a check: an undisturbed run, one with kills, and a second undisturbed one where those differ.

The second tells a program that is not deterministic by itself from one that is not restored exactly, and a time from a
counter that a restore loses. Where nothing differs there is nothing to tell apart, and it is left out.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.check.causes import Cause, cause_of, crash_cause, ended_early, failure_cause, undisturbed_cause
from keepstep.check.command_run import FAILED, LOOPING, STALLED, STOPPED, CommandRun, RunOutcome, adopting_orphans
from keepstep.check.comparison import Difference, LostNumber, RunComparison
from keepstep.check.kill_plan import choose_kills
from keepstep.check.trajectory import RankRun, rank_runs
from keepstep.control.check_events import WITHIN, CheckOrders, KillOrder, TrainerEvent

Progress = Callable[[str, int], None]  # the name of a run, and its steps so far
MAX_PARENT = 30  # characters: the path of a unix socket has at most 107
LOST = (FAILED, STALLED, LOOPING)


@dataclass(frozen=True)
class CheckSettings:
    """What the user asked for."""

    command: Sequence[str]
    steps: int
    kills: int
    seed: int
    timeout_s: float


@dataclass(frozen=True)
class CheckResult:
    """What a check found. `exact` is None where it could not be made."""

    exact: bool | None
    ranks: int = 0
    steps: tuple[int, ...] = ()
    kills: tuple[KillOrder, ...] = ()
    restored: tuple[int | None, ...] = ()  # by life after the first
    cause: Cause | None = None
    difference: Difference | None = None
    lost_variables: tuple[str, ...] = ()  # that have other values after a restore, and do not show in the state
    lost_numbers: tuple[LostNumber, ...] = ()  # of these, where the command would have gone on behind the last step
    last_lines: str = ""
    times: tuple[str, ...] = ()  # keys of the state that hold times, which are not compared


def check(settings: CheckSettings, progress: Progress) -> CheckResult:
    """Make the runs and compare them. Nothing of them is left, whatever happens."""
    parent = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="ks-check-", dir=parent if len(parent) <= MAX_PARENT else "/tmp"))
    try:
        with adopting_orphans():
            return RunOrder(settings, directory, progress).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class RunOrder:
    """The runs of one check."""

    def __init__(self, settings: CheckSettings, directory: Path, progress: Progress) -> None:
        self._settings, self._directory, self._progress = settings, directory, progress

    def run(self) -> CheckResult:
        calm = self._run("undisturbed", CheckOrders(takes=self._settings.steps))
        reference = rank_runs(calm.events)
        cause = failure_cause(calm, reference)
        if cause is not None:
            return CheckResult(None, cause=cause, last_lines=calm.last_lines)
        comparison = RunComparison(reference)
        kills = choose_kills(reference, self._settings.kills, self._settings.seed)
        orders = self._orders(calm, reference, kills)
        struck = self._run("with kills", orders, comparison)
        result = self._judge(comparison, struck, len(reference))
        if result.exact is False and result.difference is not None:
            result = self._tell_apart(reference, struck, result)
        elif result.lost_numbers and calm.ending == STOPPED:
            # A time differs in each run: without those, the rest may show in the state later.
            result = self._judge(self._without_noise(reference), struck, len(reference))
        if calm.ending != STOPPED:
            result = replace(result, lost_numbers=())  # It has come to its end: nothing shows later.
        steps = tuple(take.step for take in reference[0].takes)
        restored = tuple(life.restored for life in rank_runs(struck.events)[0].lives[1:])
        done = tuple(order for order in kills if order.number in struck.kills)
        times = comparison.changed_times(rank_runs(struck.events))
        return replace(result, ranks=len(reference), steps=steps, kills=done, restored=restored, times=times)

    def _judge(self, comparison: RunComparison, struck: RunOutcome, num_ranks: int) -> CheckResult:
        """Compare the run with kills. What surrounds the state counts only when another run is made."""
        runs = rank_runs(struck.events)
        difference = comparison.first_difference(runs)
        if difference is not None:
            return CheckResult(False, cause=cause_of(difference, num_ranks), difference=difference)
        if struck.ending in LOST:
            return CheckResult(False, cause=crash_cause(struck), last_lines=struck.last_lines)
        steps, last = comparison.last_steps(runs)
        if last < steps[-1]:
            return CheckResult(False, cause=ended_early(steps, last), last_lines=struck.last_lines)
        beside = comparison.difference_beside(runs)
        if beside is not None:
            return CheckResult(False, cause=cause_of(beside, num_ranks), difference=beside)
        lost, numbers = comparison.lost_variables(runs), comparison.lost_numbers(runs)
        return CheckResult(True, lost_variables=lost, lost_numbers=numbers)

    def _tell_apart(self, reference: list[RankRun], struck: RunOutcome, result: CheckResult) -> CheckResult:
        """Run undisturbed again: does the program differ by itself?"""
        assert result.difference is not None
        again, plain = self._undisturbed_again(reference), RunComparison(reference)
        by_itself = plain.first_difference(again)
        if by_itself is not None and by_itself.step <= result.difference.step:
            return CheckResult(False, cause=undisturbed_cause(by_itself), difference=by_itself)
        return self._judge(RunComparison(reference, plain.noise_of(again)), struck, len(reference))

    def _without_noise(self, reference: list[RankRun]) -> RunComparison:
        return RunComparison(reference, RunComparison(reference).noise_of(self._undisturbed_again(reference)))

    def _undisturbed_again(self, reference: list[RankRun]) -> list[RankRun]:
        last = max(take.step for take in reference[0].takes)
        return rank_runs(self._run("undisturbed again", CheckOrders(last_step=last)).events)

    def _orders(self, calm: RunOutcome, reference: list[RankRun], kills: list[KillOrder]) -> CheckOrders:
        last = max(take.step for take in reference[0].takes)
        return CheckOrders(last_step=last if calm.ending == STOPPED else -1, kills=tuple(kills))

    def _run(self, name: str, orders: CheckOrders, comparison: RunComparison | None = None) -> RunOutcome:
        draw = random.Random(self._settings.seed)
        pauses = {order.number: draw.random() * 0.05 for order in orders.kills if order.moment == WITHIN}
        directory = self._directory / name.replace(" ", "-")
        run = CommandRun(self._settings.command, directory, orders, self._settings.timeout_s, pauses)

        def is_enough(events: list[TrainerEvent]) -> bool:
            return comparison is not None and comparison.first_difference(rank_runs(events)) is not None

        return run.execute(lambda steps: self._progress(name, steps), is_enough)
