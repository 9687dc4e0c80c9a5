"""Which printed numbers count."""

from __future__ import annotations

import pytest

from keepstep.check.printed_numbers import changed_numbers, unknown_numbers


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("iter 3: loss 1.5000, time 20.1ms", "iter 3: loss 1.5001, time 20.1ms"),
        ("{'loss': 1.5, 'grad_norm': 2.0}", "{'loss': 1.5, 'grad_norm': 2.5}"),
        ("step=3 train_loss=0.25 lr=1e-3", "step=3 train_loss=nan lr=1e-3"),
        ("val acc: 0.91", "val acc: 0.92"),
    ],
)
def test_numbers_with_the_name_of_a_loss_count(line: str, other: str) -> None:
    assert changed_numbers((line,), (other,), is_first=False)
    assert not changed_numbers((line,), (line,), is_first=False)


def test_times_and_speeds_do_not_count() -> None:
    assert not changed_numbers(("loss 1.5 time 20.1ms mfu 1.2",), ("loss 1.5 time 90.1ms mfu 0.2",), is_first=False)


def test_first_step_of_a_life_does_not_print_what_followed_the_take_before() -> None:
    assert not changed_numbers(("loss 9.0", "loss 1.5"), ("loss 1.5",), is_first=True)
    assert not changed_numbers(("val loss 9.0", "loss 1.5"), ("loss 1.5",), is_first=True)
    assert changed_numbers(("loss 9.0", "loss 1.5"), ("loss 1.6",), is_first=True)


def test_unknown_output_is_not_compared() -> None:
    assert not changed_numbers(None, ("loss 1.5",), is_first=False)


def test_lines_of_several_ranks_may_be_in_any_order() -> None:
    near = [("rank 0 loss 1.5",), ("rank 1 loss 1.6", "rank 0 loss 1.4"), ("rank 1 loss 1.3",)]
    assert not unknown_numbers(near, ("rank 0 loss 1.4", "rank 1 loss 1.3"))
    changed = unknown_numbers(near, ("rank 0 loss 1.4", "rank 1 loss 9.9"))
    assert [value.found for value in changed] == ["9.9"]
    assert not unknown_numbers([None], ("rank 0 loss 1.4",))
