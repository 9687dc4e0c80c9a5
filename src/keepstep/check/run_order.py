"""The order of a check: an undisturbed run, one with kills, and a second undisturbed one where those differ.

The second tells a program that is not deterministic by itself from one that is not restored exactly. Where nothing
differs there is nothing to tell apart, and it is left out.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.check.causes import Cause, cause_of, failure_cause, undisturbed_cause
from keepstep.check.command_run import FAILED, LOOPING, STALLED, STOPPED, CommandRun, RunOutcome, adopting_orphans
from keepstep.check.comparison import Difference, RunComparison
from keepstep.check.kill_plan import choose_kills
from keepstep.check.trajectory import RankRun, rank_runs
from keepstep.control.check_events import WITHIN, CheckOrders, KillOrder, TrainerEvent

Progress = Callable[[str, int], None]  # the name of a run, and its steps so far
MAX_EXTRA = 3  # A run with kills may make this many times the steps of the undisturbed one.
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
    last_lines: str = ""
    duration_s: float = 0.0


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
        struck = self._run("with kills", self._orders(calm, reference, kills), comparison)
        runs = rank_runs(struck.events)
        difference = comparison.first_difference(runs)
        return self._judge(calm, reference, comparison, struck, difference)

    def _judge(
        self,
        calm: RunOutcome,
        reference: list[RankRun],
        comparison: RunComparison,
        struck: RunOutcome,
        difference: Difference | None,
    ) -> CheckResult:
        runs = rank_runs(struck.events)
        steps = tuple(take.step for take in reference[0].takes)
        restored = tuple(life.restored for life in runs[0].lives[1:])
        if difference is None:
            return CheckResult(True, len(reference), steps, (), restored)
        again = self._run("undisturbed again", self._orders(calm, reference, []))
        by_itself = comparison.first_difference(rank_runs(again.events))
        if by_itself is not None and by_itself.step <= difference.step:
            return CheckResult(
                False, len(reference), steps, (), restored, undisturbed_cause(by_itself), by_itself
            )  # fmt: skip
        return CheckResult(False, len(reference), steps, (), restored, cause_of(difference), difference)

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
