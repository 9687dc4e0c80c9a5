"""What is gathered about a step that differs."""

from __future__ import annotations

from dataclasses import replace

from runs import taken

from keepstep.check.evidence import gather_evidence
from keepstep.check.trajectory import TakeRecord
from keepstep.control.check_events import StepTrace

EARLIER = taken(4, around={"tensor X": "#x5", "tensor whole": "#all"}, model="w4")


def with_trace(take: TakeRecord, **trace: object) -> TakeRecord:
    return replace(take, trace=StepTrace(**trace))  # type: ignore[arg-type]


def test_variable_that_held_the_batch_at_the_take_before_is_named() -> None:
    evidence = gather_evidence(EARLIER, taken(5, model="w5"), with_trace(taken(5), inputs=("#other",)))
    assert evidence.inputs_differ
    assert evidence.held == ("X",)


def test_data_that_each_step_is_called_with_is_not_fetched_ahead() -> None:
    earlier = with_trace(EARLIER, inputs=("#x5",))
    assert gather_evidence(earlier, taken(5), with_trace(taken(5), inputs=("#other",))).held == ()


def test_change_between_take_and_forward_pass_is_told_from_a_lost_value() -> None:
    expected = with_trace(taken(5), state={"rate": "0.5", "weight": "#a"})
    other = with_trace(taken(5), state={"rate": "1.0", "weight": "#b"})
    earlier = replace(EARLIER, state={"rate": "1.0", "weight": "#a"})
    evidence = gather_evidence(earlier, expected, other)
    assert [value.path for value in evidence.start] == ["rate", "weight"]
    assert [value.path for value in evidence.moved] == ["rate"]


def test_variable_that_a_new_process_has_not_set_yet_explains_nothing() -> None:
    expected = with_trace(taken(5), around={"variable loss": "1", "optimizer o.state.0": "#a", "variable n.count": "4"})
    other = with_trace(taken(5), around={"variable n.count": "1"})
    evidence = gather_evidence(EARLIER, expected, other)
    assert [value.path for value in evidence.around_start] == ["optimizer o.state.0", "variable n.count"]
    constant = gather_evidence(EARLIER, expected, other, constant={"variable n.count"})
    assert [value.path for value in constant.around_start] == ["optimizer o.state.0"]


def test_number_that_a_loop_over_batches_carries_is_named() -> None:
    earlier = taken(4, around={"variable epoch": "0", "variable last": "0", "variable rate": "0.5"})
    around = {"variable epoch": "1", "variable last": "1", "variable rate": "0.5"}
    evidence = gather_evidence(earlier, with_trace(taken(5), around=around, in_batches=True), taken(5))
    assert evidence.in_batches
    assert evidence.carried == ("last",)


def test_evaluation_and_workers_are_seen() -> None:
    expected = with_trace(taken(5, around={"workers loader": "2"}), evaluations=3, evaluated_first=True)
    evidence = gather_evidence(EARLIER, expected, taken(5))
    assert evidence.evaluates
    assert evidence.workers


def test_batch_that_comes_again_has_its_step() -> None:
    batches = {("#x3",): 3, ("#x5",): 5}
    found = with_trace(taken(5), inputs=("#x3",))
    assert gather_evidence(EARLIER, taken(5), found, batches=batches).batch_of == 3
    assert gather_evidence(EARLIER, taken(5), taken(5), batches=batches).batch_of == -1
