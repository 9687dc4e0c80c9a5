"""Which instants are chosen."""

from __future__ import annotations

from dataclasses import replace

from runs import life, one_rank, taken

from keepstep.check.kill_plan import choose_kills
from keepstep.check.trajectory import TakeRecord
from keepstep.control.check_events import AFTER, EVALUATION, StepTrace


def epochs(num: int, length: int) -> list[TakeRecord]:
    return [taken(step, around={"variable epoch": str(step // length)}) for step in range(num * length)]


def evaluating(take: TakeRecord) -> TakeRecord:
    trace = StepTrace(take.trace.state, take.trace.around, take.trace.inputs, evaluations=2, stepped=True)
    return replace(take, trace=trace)


def test_both_sides_of_an_epoch_end_come_before_random_steps() -> None:
    kills = choose_kills(one_rank(life(*epochs(3, 5))), 3, seed=1)
    assert [kill.step for kill in kills] == [0, 4, 5]
    assert kills[0].moment == AFTER


def test_first_epoch_end_and_first_evaluation_come_first() -> None:
    takes = epochs(3, 5)
    takes[8], takes[13] = evaluating(takes[8]), evaluating(takes[13])
    kills = choose_kills(one_rank(life(*takes)), 5, seed=1)
    assert [kill.step for kill in kills] == [0, 4, 5, 7, 8]
    assert [kill.step for kill in kills if kill.moment == EVALUATION] == [7]


def test_program_that_evaluates_at_each_step_has_no_chosen_evaluation() -> None:
    takes = [evaluating(take) for take in epochs(1, 8)]
    kills = choose_kills(one_rank(life(*takes)), 4, seed=1)
    assert all(kill.moment != EVALUATION for kill in kills)
    assert len(kills) == 4


def test_no_kill_at_the_last_step() -> None:
    for seed in range(20):
        assert all(kill.step < 4 for kill in choose_kills(one_rank(life(*epochs(1, 5))), 9, seed))
