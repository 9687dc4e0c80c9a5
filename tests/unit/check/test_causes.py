"""The cause that is named for each kind of evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from runs import life, one_rank, taken

from keepstep.check.causes import cause_of, crash_cause, failure_cause, undisturbed_cause
from keepstep.check.command_run import ENDED, FAILED, LOOPING, RunOutcome
from keepstep.check.comparison import AT_TAKE, Difference
from keepstep.check.evidence import ChangedValue, Evidence

RANDOM = ChangedValue("rng.torch", "#a", "#b")
RATE = ChangedValue("scheduler._last_lr.0", "0.1", "0.2")
WEIGHT = ChangedValue("model.w", "#a float32", "#b float32")


def step_difference(**evidence: Any) -> Difference:
    return Difference(AT_TAKE, 0, 1, 5, 4, True, "after", (WEIGHT,), Evidence(start_seen=True, **evidence))


def outside(kind: str) -> tuple[ChangedValue, ...]:
    return (ChangedValue(f"{kind} x", "1", "2"), ChangedValue("variable y", "1", "2"))


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        ({"inputs_differ": True, "held": ("X",), "start": (RANDOM,)}, "data fetched ahead"),
        ({"start": (RANDOM,), "inputs_differ": True, "draws_first": True}, "random"),
        ({"start": (RANDOM,), "evaluates": True, "draws_first": True}, "random"),
        ({"start": (RANDOM,), "drawn_before_take": True}, "random"),
        ({"start": (RATE, RANDOM), "moved": (RATE, RANDOM)}, "scheduler after take"),
        ({"start": (WEIGHT,), "moved": (WEIGHT,)}, "changed after take"),
        ({"start": (WEIGHT,)}, "changed after restore"),
        ({"inputs_differ": True}, "position"),
        ({"inputs_differ": True, "batch_of": 0, "start": (RANDOM,)}, "position"),
        ({"inputs_differ": True, "workers": True}, "workers"),
        ({"inputs_differ": True, "around_start": outside("generator")}, "generator outside"),
        ({"around_start": outside("buffer")}, "buffer outside"),
        ({"around_start": outside("module")}, "module outside"),
        ({"around_start": outside("variable")}, "variable outside"),
        ({"no_step": True}, "take before step"),
        ({"no_step_before": True}, "gradients"),
        ({}, "outside"),
    ],
)
def test_cause_follows_from_how_the_step_began(evidence: dict[str, Any], name: str) -> None:
    cause = cause_of(step_difference(**evidence), 1)
    assert cause.name == name
    assert cause.text
    assert cause.remedy


@pytest.mark.parametrize("value", [RATE, WEIGHT])
def test_remedy_can_be_followed_in_a_loop_over_batches(value: ChangedValue) -> None:
    own_loop = cause_of(step_difference(start=(value,), moved=(value,)), 1)
    assert "before take()" in own_loop.remedy
    evidence = {"start": (value,), "moved": (value,), "in_batches": True, "carried": ("last",)}
    in_batches = cause_of(step_difference(**evidence), 1)
    assert in_batches.name == own_loop.name
    assert "the body of the last batch of the epoch" in in_batches.remedy
    assert "(here last) in a dict of the state" in in_batches.remedy


def test_three_ranks_need_a_rehearsal() -> None:
    assert cause_of(step_difference(), 3).name == "rehearsal"
    assert cause_of(replace(step_difference(), is_first_step=False), 3).name == "outside"


def test_kernels_are_told_apart_from_what_is_not_seeded() -> None:
    difference = replace(step_difference(), life=0, restored=None)
    assert undisturbed_cause(difference).name == "kernels"
    unseeded = replace(difference, evidence=Evidence(start_seen=True, start=(WEIGHT,)))
    assert undisturbed_cause(unseeded).name == "not deterministic"


def test_kernels_are_named_only_where_a_tensor_of_floating_point_differs() -> None:
    changed = (ChangedValue("progress.seen", "5", "6"), ChangedValue("progress.ids", "#a", "#b"))
    cause = undisturbed_cause(replace(step_difference(), life=0, restored=None, changed=changed))
    assert cause.name == "not deterministic"
    assert "progress.seen" in cause.text
    scalar = (ChangedValue("model.bias", "0.5 float32", "0.6 float32"),)
    assert undisturbed_cause(replace(step_difference(), life=0, restored=None, changed=scalar)).name == "kernels"


def test_paths_that_differ_between_undisturbed_runs_are_of_the_output_directory() -> None:
    changed = (
        ChangedValue("fit.best_model_path", "'/runs/version_0/a.ckpt'", "'/runs/version_1/a.ckpt'"),
        ChangedValue("fit.best_k_models./runs/version_0/a.ckpt", "0.5", ""),
        ChangedValue("fit.best_k_models./runs/version_1/a.ckpt", "", "0.5"),
    )
    difference = replace(step_difference(), life=0, restored=None, changed=changed)
    cause = undisturbed_cause(difference)
    assert cause.name == "output directory"
    assert "'/runs/version_1/a.ckpt' instead of '/runs/version_0/a.ckpt'" in cause.text
    weights = replace(difference, changed=(*changed, WEIGHT))
    assert undisturbed_cause(weights).name == "kernels"


def test_keys_that_differ_in_each_process_are_told_apart() -> None:
    changed = (ChangedValue("optimizer.140", "#a", ""), ChangedValue("optimizer.150", "", "#a"))
    difference = replace(step_difference(), life=0, restored=None, changed=changed)
    assert undisturbed_cause(difference).name == "keys"


def outcome(ending: str, refusal: str = "") -> RunOutcome:
    return RunOutcome(ending, [], "", 1.0, 1, refusal)


def test_run_that_cannot_be_compared_has_a_cause() -> None:
    assert failure_cause(outcome(ENDED), []).name == "no snapshotter"  # type: ignore[union-attr]
    assert failure_cause(outcome(FAILED), []).name == "failed"  # type: ignore[union-attr]
    refused = failure_cause(outcome(FAILED, "loader is a DataLoader"), [])
    assert refused is not None
    assert (refused.name, "loader is a DataLoader" in refused.text) == ("refused", True)
    assert failure_cause(outcome(ENDED), one_rank(life(taken(1), taken(1)))).name == "steps"  # type: ignore[union-attr]
    assert failure_cause(outcome(ENDED), one_rank(life(taken(1), taken(2)))) is None
    assert crash_cause(outcome(LOOPING)).name == "fails after restore"
