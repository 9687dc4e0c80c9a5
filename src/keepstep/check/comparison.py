"""The first difference between an undisturbed run and another one (pure).

Lives are compared in order, steps in order. A step that was done again after a restore is compared again. Random states
that no step ever draws from may differ: a program need not seed what it does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.check.trajectory import RankRun, TakeRecord, TrainerLife

AT_TAKE, AT_RESTORE, OF_STEPS, NOT_RESTORED, REFUSED, PRINTED = (
    "take", "restore", "steps", "not restored", "refused", "printed"
)  # fmt: skip
RNG = "rng."


@dataclass(frozen=True)
class ChangedValue:
    """One path with its value in the undisturbed run and in the other; empty where it is missing."""

    path: str
    expected: str
    found: str


@dataclass(frozen=True)
class Difference:
    """The first place where a run is not the undisturbed one."""

    kind: str  # one of the words above
    rank: int
    life: int  # 0: before the first kill
    step: int
    restored: int | None  # what this life began with
    is_first_step: bool  # of its life
    killed: str = ""  # the moment of the kill before this life
    changed: tuple[ChangedValue, ...] = ()
    around: tuple[ChangedValue, ...] = ()  # the same of what is not in the state
    expected_step: int = -1
    text: str = ""


class RunComparison:
    """Compares runs with one undisturbed run."""

    def __init__(self, reference: Sequence[RankRun]) -> None:
        self.reference = {run.rank: run for run in reference}
        self.steps = {run.rank: [take.step for take in run.takes] for run in reference}
        self._states = {run.rank: {take.step: take for take in run.takes} for run in reference}

    def first_difference(self, other: Sequence[RankRun]) -> Difference | None:
        """The earliest by life, then by step."""
        firsts = [first for run in other if (first := next(self._differences(run), None)) is not None]
        return min(firsts, key=lambda difference: (difference.life, difference.step), default=None)

    def _differences(self, run: RankRun) -> Iterator[Difference]:
        if run.rank not in self.reference:
            return
        unused = unused_random_states([self.reference[run.rank], run])
        for index, life in enumerate(run.lives):
            yield from self._of_life(run, index, life, unused)

    def _of_life(self, run: RankRun, index: int, life: TrainerLife, unused: set[str]) -> Iterator[Difference]:
        states, steps = self._states[run.rank], self.steps[run.rank]
        killed = run.lives[index - 1].killed if index else ""

        def differs(kind: str, step: int, **more: object) -> Difference:
            first = not life.takes or step <= life.takes[0].step
            return Difference(kind, run.rank, index, step, life.restored, first, killed, **more)  # type: ignore[arg-type]

        if life.refused:
            yield differs(REFUSED, _last_step(run, index), text=life.refused)
            return
        begun_anew = index > 0 and life.restored is None and bool(life.takes)
        if begun_anew and any(earlier.kept for earlier in run.lives[:index]):
            text = "" if life.asked else "never asked"
            yield differs(NOT_RESTORED, life.takes[0].step, expected_step=_last_step(run, index), text=text)
            return
        if life.restored in states:
            changed = compare_values(states[life.restored].state, life.state, unused, only=set(life.state))
            if changed:
                yield differs(AT_RESTORE, life.restored, changed=changed)
        wanted = steps[: len(life.takes)] if life.restored is None else [s for s in steps if s > life.restored]
        for take, step in zip(life.takes, wanted, strict=False):
            if take.step != step:
                yield differs(OF_STEPS, take.step, expected_step=step)
                return
            changed = compare_values(states[step].state, take.state, unused)
            if changed:
                around = compare_values(states[step].around, take.around, set())
                yield differs(AT_TAKE, step, changed=changed, around=around)


def _last_step(run: RankRun, index: int) -> int:
    return max((take.step for life in run.lives[:index] for take in life.takes), default=-1)


def compare_values(
    expected: dict[str, str], found: dict[str, str], unused: set[str], *, only: set[str] | None = None
) -> tuple[ChangedValue, ...]:
    """Every path whose value differs, in the order of the state."""
    paths = [path for path in {**expected, **found} if path not in unused and (only is None or path in only)]
    return tuple(
        ChangedValue(path, expected.get(path, ""), found.get(path, ""))
        for path in paths
        if expected.get(path) != found.get(path)
    )


def unused_random_states(runs: Sequence[RankRun]) -> set[str]:
    """Paths of random states that stay the same through each whole run."""
    unused: set[str] | None = None
    for run in runs:
        takes: list[TakeRecord] = run.takes
        if takes:
            same = {
                path
                for path, value in takes[0].state.items()
                if path.startswith(RNG) and all(take.state.get(path) == value for take in takes)
            }
            unused = same if unused is None else unused & same
    return unused or set()
