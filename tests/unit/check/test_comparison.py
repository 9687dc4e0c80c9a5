"""What counts as a difference between an undisturbed run and one with kills."""

from __future__ import annotations

import pytest
from runs import life, one_rank, taken

from keepstep.check.comparison import AT_RESTORE, BESIDE, NOT_RESTORED, OF_STEPS, PRINTED, LostNumber, RunComparison
from keepstep.check.trajectory import TakeRecord

CALM = one_rank(life(*(taken(step, model=f"w{step}") for step in range(4))))


def test_run_that_goes_on_where_it_was_restored_is_equal() -> None:
    other = one_rank(
        life(taken(0, model="w0"), taken(1, model="w1"), killed="within"),
        life(taken(1, model="w1"), taken(2, model="w2"), taken(3, model="w3"), restored=0),
    )
    comparison = RunComparison(CALM)
    assert comparison.first_difference(other) is None
    assert comparison.difference_beside(other) is None


def test_first_step_and_path_that_differ_are_named() -> None:
    other = one_rank(
        life(taken(0, model="w0"), killed="after"),
        life(taken(1, model="w1"), taken(2, model="other"), taken(3, model="other"), restored=0),
    )
    difference = RunComparison(CALM).first_difference(other)
    assert difference is not None
    assert (difference.step, difference.life, difference.killed) == (2, 1, "after")
    assert [value.path for value in difference.changed] == ["model"]


def test_restored_state_is_compared_with_the_captured_one() -> None:
    other = one_rank(life(taken(0, model="w0")), life(taken(1, model="w1"), restored=0, state={"model": "zero"}))
    difference = RunComparison(CALM).first_difference(other)
    assert difference is not None
    assert difference.kind == AT_RESTORE


def test_step_that_is_made_twice_or_left_out_is_a_difference() -> None:
    for steps in ((2, 3), (0, 1, 2)):
        other = one_rank(life(taken(0, model="w0")), life(*(taken(s, model=f"w{s}") for s in steps), restored=0))
        difference = RunComparison(CALM).first_difference(other)
        assert difference is not None
        assert difference.kind == OF_STEPS


def test_step_after_the_last_one_is_a_difference() -> None:
    other = one_rank(life(*(taken(step, model=f"w{step}") for step in range(5))))
    difference = RunComparison(CALM).first_difference(other)
    assert difference is not None
    assert (difference.kind, difference.step) == (OF_STEPS, 4)


def test_run_that_begins_anew_is_a_difference() -> None:
    other = one_rank(life(taken(0, model="w0")), life(taken(0, model="w0")))
    difference = RunComparison(CALM).first_difference(other)
    assert difference is not None
    assert difference.kind == NOT_RESTORED


def test_random_states_that_nobody_draws_from_may_differ() -> None:
    calm = one_rank(life(*(taken(step, model=f"w{step}", **{"rng.numpy": "a"}) for step in range(2))))
    other = one_rank(life(*(taken(step, model=f"w{step}", **{"rng.numpy": "b"}) for step in range(2))))
    assert RunComparison(calm).first_difference(other) is None


def test_times_in_the_state_are_not_compared_and_are_reported() -> None:
    key = "progress.history.rest.1.eval_runtime"
    calm = one_rank(life(taken(0, model="w0", **{key: "0.0086"})))
    other = one_rank(life(taken(0, model="w0", **{key: "0.0047"})))
    comparison = RunComparison(calm)
    assert comparison.first_difference(other) is None
    assert comparison.changed_times(other) == ("eval_runtime",)
    slower = one_rank(life(taken(0, model="other", **{key: "0.0047"})))
    difference = comparison.first_difference(slower)
    assert difference is not None
    assert [value.path for value in difference.changed] == ["model"]


@pytest.mark.parametrize(
    ("path", "found", "is_compared"),
    [
        ("rest.1.train_samples_per_second", "2.5", False),
        ("epoch_time.3", "1e-05", False),
        ("elapsed_s", "2.5", False),
        ("lifetime", "2.5", True),
        ("eval_loss", "2.5", True),
        ("step_time", "2", True),  # a count
        ("step_time", "2.5 float32", True),  # a tensor
        ("step_time", "", True),  # missing
    ],
)
def test_only_floats_under_the_name_of_a_time_are_times(path: str, found: str, is_compared: bool) -> None:
    calm, other = one_rank(life(taken(0, **{path: "1.5"}))), one_rank(life(taken(0, **{path: found})))
    assert (RunComparison(calm).first_difference(other) is not None) == is_compared


def evolving(*averages: str, key: str = "tensor average.w") -> list[TakeRecord]:
    return [taken(step, model=f"w{step}", around={key: text}) for step, text in enumerate(averages)]


def test_what_evolves_beside_the_state_is_a_difference() -> None:
    calm, other = evolving("#a", "#b", "#c"), evolving("#a", "#b", "#z")
    runs = one_rank(life(*other[:2]), life(other[2], restored=1))
    difference = RunComparison(one_rank(life(*calm))).difference_beside(runs)
    assert difference is not None
    assert (difference.kind, difference.changed[0].path) == (BESIDE, "tensor average.w")
    assert RunComparison(one_rank(life(*calm)), {"tensor average.w"}).difference_beside(runs) is None


def test_variables_are_reported_and_are_no_difference() -> None:
    calm, other = (evolving("0", "1", last, key="variable best") for last in ("2", "0"))
    runs = one_rank(life(*other[:2]), life(other[2], restored=1))
    comparison = RunComparison(one_rank(life(*calm)))
    assert comparison.difference_beside(runs) is None
    assert comparison.lost_variables(runs) == ("best",)
    assert comparison.lost_numbers(runs) == (LostNumber("best", 2, "2", "0"),)
    noisy = RunComparison(one_rank(life(*calm)), {"variable best"})
    assert noisy.lost_numbers(runs) == ()


def test_texts_and_lists_are_no_lost_numbers() -> None:
    for before, after, other_text in (("'a'", "'b'", "'c'"), ("[1, 2]", "[1, 3]", "[1, 4]"), ("#a", "#b", "#c")):
        calm, other = (evolving(before, before, last, key="variable x") for last in (after, other_text))
        runs = one_rank(life(*other[:2]), life(other[2], restored=1))
        comparison = RunComparison(one_rank(life(*calm)))
        assert comparison.lost_variables(runs) == ("x",)
        assert comparison.lost_numbers(runs) == ()


def test_what_never_changes_beside_the_state_may_differ() -> None:
    calm, other = evolving("#a", "#a"), evolving("#b", "#b")
    assert RunComparison(one_rank(life(*calm))).difference_beside(one_rank(life(*other))) is None


def printing(*losses: str) -> list[TakeRecord]:
    return [taken(step, model=f"w{step}", printed=(f"step {step} loss {loss}",)) for step, loss in enumerate(losses)]


def test_printed_losses_are_compared() -> None:
    calm, other = printing("3.0", "2.0", "1.5"), printing("3.0", "2.0", "9.5")
    runs = one_rank(life(*other[:2]), life(other[2], restored=1))
    difference = RunComparison(one_rank(life(*calm))).difference_beside(runs)
    assert difference is not None
    assert (difference.kind, difference.step, difference.changed[0].found) == (PRINTED, 2, "9.5")
