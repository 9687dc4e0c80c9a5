"""The first difference between an undisturbed run and another one (pure).

Lives are compared in order, steps in order. A step that was done again after a restore is compared again. Random states
that no step ever draws from may differ: a program need not seed what it does not use. Where the state is equal at every
step, what evolves beside it is compared (an EMA that nobody gave), and then the losses that were printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from keepstep.check.evidence import ChangedValue, Evidence, compare_values, gather_evidence, is_number, is_time
from keepstep.check.printed_numbers import changed_numbers, unknown_numbers
from keepstep.check.trajectory import RankRun, TakeRecord, TrainerLife
from keepstep.control.check_events import VARIABLE, WORKERS

AT_TAKE, AT_RESTORE, OF_STEPS, NOT_RESTORED, REFUSED, BESIDE, PRINTED = (
    "take", "restore", "steps", "not restored", "refused", "beside", "printed"
)  # fmt: skip
RNG = "rng."


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
    evidence: Evidence = field(default_factory=Evidence)
    expected_step: int = -1
    text: str = ""


@dataclass(frozen=True)
class LostNumber:
    """A variable with another number after a restore than in the undisturbed run at the same step."""

    name: str
    step: int
    expected: str
    found: str


class RunComparison:
    """Compares runs with one undisturbed run. `noise`: what of the surroundings differs between undisturbed runs."""

    def __init__(self, reference: Sequence[RankRun], noise: Collection[str] = ()) -> None:
        self._reference = {run.rank: run for run in reference}
        self._steps = {run.rank: [take.step for take in run.takes] for run in reference}
        self._states = {run.rank: {take.step: take for take in run.takes} for run in reference}
        self._noise = frozenset(noise)

    def first_difference(self, other: Sequence[RankRun]) -> Difference | None:
        """The earliest by life, then by step, of the state."""
        return self._first([self._of_state(run) for run in other])

    def difference_beside(self, other: Sequence[RankRun]) -> Difference | None:
        """The same of what evolves beside the state, then of what was printed. For runs whose states are equal."""
        return self._first([self._of_surroundings(run) for run in other]) or self._first(
            [self._of_numbers(run) for run in other]
        )

    def last_steps(self, other: Sequence[RankRun]) -> tuple[list[int], int]:
        """The steps of the undisturbed run, and the last one of the other."""
        rank = min(self._steps)
        return self._steps[rank], max(
            (take.step for run in other for take in run.takes if run.rank == rank), default=-1
        )

    def lost_variables(self, other: Sequence[RankRun]) -> tuple[str, ...]:
        """Variables of the program that evolve, and have other values after a restore. No difference by themselves."""
        return tuple(dict.fromkeys(value.path.partition(" ")[2] for _, value in self._lost(other)))

    def lost_numbers(self, other: Sequence[RankRun]) -> tuple[LostNumber, ...]:
        """The first step of each such variable that is a number; those of epochs first."""
        numbers: dict[str, LostNumber] = {}
        for step, value in self._lost(other):
            name = value.path.partition(" ")[2]
            if is_number(value.expected) and is_number(value.found):
                numbers.setdefault(name, LostNumber(name, step, value.expected, value.found))
        return tuple(sorted(numbers.values(), key=lambda number: "epoch" not in number.name.lower()))

    def _lost(self, other: Sequence[RankRun]) -> Iterator[tuple[int, ChangedValue]]:
        for run in other:
            evolving = self._evolving(run.rank, {VARIABLE})
            for _, _, reference, take in self._pairs(run):
                yield from ((take.step, value) for value in self._beside(reference, take, evolving))

    def changed_times(self, other: Sequence[RankRun]) -> tuple[str, ...]:
        """Keys of the state that hold times, which differ and are not compared."""
        return tuple(
            dict.fromkeys(
                path.rpartition(".")[2]
                for run in other
                for _, _, reference, take in self._pairs(run)
                for path in reference.state.keys() & take.state.keys()
                if reference.state[path] != take.state[path] and is_time(path, reference.state[path], take.state[path])
            )
        )

    def noise_of(self, other: Sequence[RankRun]) -> set[str]:
        """Surroundings that differ at any step of another undisturbed run, or that only one of the runs has."""
        noise: set[str] = set()
        for run in other:
            for _, _, reference, take in self._pairs(run):
                noise |= {value.path for value in compare_values(reference.around, take.around, set())}
                noise |= {value.path for value in compare_values(reference.trace.around, take.trace.around, set())}
            noise |= {f"{PRINTED} {value.path}" for each in self._of_numbers(run) for value in each.changed}
        return noise

    def _first(self, differences: Sequence[Iterator[Difference]]) -> Difference | None:
        firsts = [first for each in differences if (first := next(each, None)) is not None]
        return min(firsts, key=lambda difference: (difference.life, difference.step), default=None)

    # The state

    def _of_state(self, run: RankRun) -> Iterator[Difference]:
        if run.rank not in self._reference:
            return
        unused = unused_random_states([self._reference[run.rank], run])
        for index, life in enumerate(run.lives):
            yield from self._of_life(run, index, life, unused)

    def _of_life(self, run: RankRun, index: int, life: TrainerLife, unused: set[str]) -> Iterator[Difference]:
        states, steps = self._states[run.rank], self._steps[run.rank]
        if life.refused:
            yield differs(REFUSED, run, index, _last_step(run, index), text=life.refused)
            return
        begun_anew = index > 0 and life.restored is None and bool(life.takes)
        if begun_anew and any(earlier.kept for earlier in run.lives[:index]):
            text = "" if life.asked else "never asked"
            last = _last_step(run, index)
            yield differs(NOT_RESTORED, run, index, life.takes[0].step, expected_step=last, text=text)
            return
        if life.restored in states:
            changed = compare_values(states[life.restored].state, life.state, unused, only=set(life.state))
            if changed:
                yield differs(AT_RESTORE, run, index, life.restored, changed=changed)
        wanted = steps if life.restored is None else [step for step in steps if step > life.restored]
        for number, take in enumerate(life.takes):
            expected = wanted[number] if number < len(wanted) else -1
            if take.step != expected:
                yield differs(OF_STEPS, run, index, take.step, expected_step=expected)
                return
            changed = compare_values(states[expected].state, take.state, unused)
            if changed:
                before = steps.index(expected)
                earlier = states[steps[before - 1]] if before else None
                evidence = gather_evidence(
                    earlier,
                    states[expected],
                    take,
                    ignored=self._noise | unused,
                    constant=self._constant(run.rank),
                    batches={reference.trace.inputs: step for step, reference in reversed(states.items())},
                )
                yield differs(AT_TAKE, run, index, expected, changed=changed, evidence=evidence)

    # Beside the state

    def _of_surroundings(self, run: RankRun) -> Iterator[Difference]:
        evolving = self._evolving(run.rank, set()) - self._evolving(run.rank, {VARIABLE, WORKERS})
        for index, _, reference, take in self._pairs(run):
            changed = self._beside(reference, take, evolving)
            if changed:
                yield differs(BESIDE, run, index, take.step, changed=changed)

    def _of_numbers(self, run: RankRun) -> Iterator[Difference]:
        takes = self._reference[run.rank].takes if run.rank in self._reference else []
        for index, life, reference, take in self._pairs(run):
            if take.prints_alone:
                is_first = index > 0 and take is life.takes[0]
                changed = changed_numbers(reference.printed, take.printed, is_first=is_first)
            else:
                place = takes.index(reference)
                # What came before the first `take` is not known; nor is what follows the last.
                near = [other.printed or () for other in takes[max(0, place - 1) : place + 2]]
                is_known = 0 < place < len(takes) - 1
                changed = unknown_numbers(near, take.printed) if is_known else ()
            changed = tuple(value for value in changed if f"{PRINTED} {value.path}" not in self._noise)
            if changed:
                yield differs(PRINTED, run, index, take.step, changed=changed)

    def _pairs(self, run: RankRun) -> Iterator[tuple[int, TrainerLife, TakeRecord, TakeRecord]]:
        states = self._states.get(run.rank, {})
        for index, life in enumerate(run.lives):
            for take in life.takes:
                if take.step in states:
                    yield index, life, states[take.step], take

    def _evolving(self, rank: int, kinds: set[str]) -> set[str]:
        """Paths that change from step to step of the undisturbed run; of all kinds where none is given."""
        takes = self._reference[rank].takes if rank in self._reference else []
        return {
            path
            for before, after in pairwise(takes)
            for path, text in after.around.items()
            if before.around.get(path, text) != text and (not kinds or path.partition(" ")[0] in kinds)
        }

    def _constant(self, rank: int) -> set[str]:
        """Variables that no step changes: they explain nothing."""
        takes = self._reference[rank].takes
        paths = {path for take in takes for path in take.around if path.startswith(f"{VARIABLE} ")}
        return paths - self._evolving(rank, {VARIABLE}) if len(takes) > 1 else set()

    def _beside(self, reference: TakeRecord, take: TakeRecord, evolving: set[str]) -> tuple[ChangedValue, ...]:
        both = (evolving & reference.around.keys() & take.around.keys()) - self._noise
        return compare_values(reference.around, take.around, set(), only=both)


def differs(kind: str, run: RankRun, index: int, step: int, **more: object) -> Difference:
    """A difference in one life of a run."""
    life = run.lives[index]
    first = not life.takes or step <= life.takes[0].step
    killed = run.lives[index - 1].killed if index else ""
    return Difference(kind, run.rank, index, step, life.restored, first, killed, **more)  # type: ignore[arg-type]


def _last_step(run: RankRun, index: int) -> int:
    return max((take.step for life in run.lives[:index] for take in life.takes), default=-1)


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
