"""The demo's story without its processes: what it makes of events, when a failure is due, and what it lets pass."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from keepstep.demo.comparison import VERDICT, Judgement, judge
from keepstep.demo.report import Summary, report
from keepstep.demo.run_record import (
    FAULTS,
    Event,
    FailureOutcome,
    FinalState,
    PlannedFailure,
    RestoreRecord,
    RunRecord,
    Started,
    StepRecord,
    find_due,
)
from keepstep.demo.script import check_steps, find_script
from keepstep.errors import ConfigError

STEPS = 20
A_TRAINER, KEEPER, A_NODE, _ = FAULTS
LAST_BIT = "0x1.a000000000000p+0 undisturbed, 0x1.a000000000001p+0 struck"


def step(number: int, *, time: float, loss: float | None = None) -> StepRecord:
    value = 4.0 - number / 8 if loss is None else loss
    return StepRecord(step=number, loss=value, loss_hex=value.hex(), incarnation=1, time=time)


def started(*pids: int, time: float = 0.0) -> Started:
    return Started(incarnation=1, pids=list(pids), nodes=[f"node{rank}" for rank in range(len(pids))], time=time)


def restored(number: int, *, time: float = 0.0, source: str = "memory") -> RestoreRecord:
    return RestoreRecord(step=number, sources=["memory", source], seconds=0.02, time=time)


def observed(*events: Event, run: RunRecord | None = None) -> RunRecord:
    run = run or RunRecord()
    for event in events:
        run.observe(event)
    return run


def strike(run: RunRecord, fault: PlannedFailure, *, at: float) -> FailureOutcome:
    outcome = FailureOutcome(fault=fault, killed_at=at, last_step=run.steps[-1].step)
    run.outcomes.append(outcome)
    return outcome


def results(**changed: str) -> list[FinalState]:
    parts = {"model": "aa", "optimizer": "bb", **changed}
    return [FinalState(sha256="".join(parts.values()), parts=parts), FinalState(sha256="cc", parts={"model": "cc"})]


def calm_run() -> RunRecord:
    run = observed(started(1, 2), *(step(number, time=float(number)) for number in range(STEPS)))
    run.results = results()
    return run


def struck_run() -> RunRecord:
    """Every failure strikes when it is due, and is survived without a lost step."""
    run, now = observed(started(1, 2)), 0.0
    for number in range(STEPS):
        now += 1.0
        event = step(number, time=now)
        run.observe(event)
        if fault := find_due(run, event, faults=FAULTS, steps=STEPS):
            outcome = strike(run, fault, at=now + 0.5)
            if outcome.expected_source is not None:
                now += 5.0
                source = outcome.expected_source
                observed(started(3, 4, time=now), restored(number, time=now, source=source), run=run)
    run.results = results()
    return run


def told(calm: RunRecord, struck: RunRecord, judgement: Judgement, *, out: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    report(calm, struck, judgement, out=out, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Observing


def test_lines_of_the_example_are_understood_and_unknown_fields_ignored() -> None:
    line = b'{"event": "restored", "step": 7, "sources": ["memory", "parity"], "seconds": 0.5, "more": 2, "time": 3.0}'
    event = msgspec.json.decode(line, type=Event)
    assert event == RestoreRecord(step=7, sources=["memory", "parity"], seconds=0.5, time=3.0)
    assert event.source == "parity", "the furthest that any rank had to go"


def test_a_first_start_is_not_a_restart() -> None:
    run = observed(started(11, 12))
    assert (run.pids, run.settled, run.unprovoked) == ([11, 12], True, 0)


def test_a_restart_without_a_failure_of_ours_is_unprovoked() -> None:
    run = observed(started(1, 2), step(0, time=1.0), started(3, 4))
    assert (run.pids, run.unprovoked) == ([3, 4], 1)


def test_an_outcome_is_completed_by_the_first_step_after_the_restart() -> None:
    run = observed(started(1, 2), step(0, time=1.0), step(1, time=2.0))
    outcome = strike(run, A_TRAINER, at=2.5)
    assert not run.settled
    observed(started(3, 4), restored(1), run=run)
    assert not run.settled
    observed(step(2, time=9.0), run=run)
    assert run.settled
    assert (outcome.restarts, outcome.restored, outcome.resumed_at) == (1, restored(1), 9.0)
    assert outcome.steps_lost == 0


def test_a_step_that_ended_before_the_signal_landed_is_not_the_resumption() -> None:
    run = observed(started(1, 2), step(0, time=1.0))
    outcome = strike(run, A_TRAINER, at=1.5)
    observed(step(1, time=1.6), run=run)
    assert outcome.resumed_at is None
    observed(started(3, 4), restored(0), step(1, time=9.0), run=run)
    assert outcome.last_step == 1
    assert outcome.steps_lost == 1, "step 1 was finished and done again"


def test_after_the_death_of_the_keeper_the_next_step_counts_and_no_restart_is_expected() -> None:
    run = observed(started(1, 2), step(0, time=1.0))
    outcome = strike(run, KEEPER, at=1.5)
    observed(step(1, time=1.4), run=run)
    assert not run.settled, "logged late, but done before the kill"
    observed(step(2, time=2.0), run=run)
    assert outcome.resumed_at == 2.0
    assert (outcome.restarts, outcome.steps_lost) == (0, 0)


def test_beginning_anew_loses_every_step() -> None:
    run = observed(started(1, 2), step(0, time=1.0), step(1, time=2.0))
    outcome = strike(run, A_NODE, at=2.5)
    observed(started(3, 4), step(0, time=9.0), run=run)
    assert outcome.steps_lost == 2


def test_the_median_pause_between_steps_is_the_length_of_a_step() -> None:
    times = (0.0, 1.0, 2.0, 30.0)
    assert observed(*(step(number, time=time) for number, time in enumerate(times))).median_step_s() == 1.0
    assert RunRecord().median_step_s() == 0.0


# When a failure is due


def due(run: RunRecord, event: Event) -> PlannedFailure | None:
    run.observe(event)
    return find_due(run, event, faults=FAULTS, steps=STEPS)


def test_a_fault_is_due_once_its_part_of_the_run_is_done() -> None:
    run = observed(started(1, 2))
    assert [due(run, step(number, time=float(number))) for number in range(4)] == [None] * 3 + [A_TRAINER]


def test_no_fault_is_due_before_the_one_before_is_over() -> None:
    run = observed(started(1, 2))
    assert due(run, step(4, time=4.0)) is A_TRAINER
    strike(run, A_TRAINER, at=4.5)
    assert due(run, step(10, time=4.6)) is None, "done before the signal landed"
    assert due(run, started(3, 4)) is None
    assert due(run, restored(10)) is None
    assert due(run, step(11, time=9.0)) is KEEPER


def test_an_undisturbed_run_has_no_fault_due_and_a_struck_one_each_fault_once() -> None:
    calm = calm_run()
    assert find_due(calm, calm.steps[-1], faults=(), steps=STEPS) is None
    struck = struck_run()
    assert [outcome.fault for outcome in struck.outcomes] == list(FAULTS)
    assert find_due(struck, struck.steps[-1], faults=FAULTS, steps=STEPS) is None


# Judging


def test_a_run_that_kept_everything_passes_and_says_so(tmp_path: Path) -> None:
    calm, struck = calm_run(), struck_run()
    judgement = judge(calm, struck)
    assert judgement == Judgement(verdict=VERDICT, differences=[], leftovers=[])
    assert judgement.exit_code == 0
    assert told(calm, struck, judgement, out=tmp_path).rstrip().endswith(VERDICT)


def break_loss(struck: RunRecord) -> None:
    last = struck.steps[-1]
    struck.steps[-1] = step(last.step, time=last.time, loss=math.nextafter(last.loss, 4.0))


def break_digest(struck: RunRecord) -> None:
    struck.results = results(optimizer="b0")


def break_total(struck: RunRecord) -> None:
    struck.results[1] = FinalState(sha256="c0", parts=struck.results[1].parts)


def break_steps(struck: RunRecord) -> None:
    struck.steps = [event for event in struck.steps if event.step != 6]


def break_restore(struck: RunRecord) -> None:
    struck.outcomes[2].restored = None


def break_source(struck: RunRecord) -> None:
    struck.outcomes[2].restored = restored(5, source="memory")


def break_resumption(struck: RunRecord) -> None:
    struck.outcomes[-1].resumed_at = None


def break_keeper(struck: RunRecord) -> None:
    struck.outcomes[1].restarts = 1


def break_faults(struck: RunRecord) -> None:
    del struck.outcomes[1]


def break_peace(struck: RunRecord) -> None:
    struck.unprovoked = 1


@pytest.mark.parametrize(
    ("tamper", "sentence"),
    [
        (break_loss, "1 losses differ, first at step 19: " + LAST_BIT),
        (break_digest, "rank 0 ends with another state: optimizer"),
        (break_total, "rank 1 ends with another state: parts"),
        (break_steps, "1 steps were never done, first step 6"),
        (break_restore, "nothing was restored after the death of a node"),
        (break_source, "parity was to be the source after the death of a node"),
        (break_resumption, "no step followed the death of two nodes at once"),
        (break_keeper, "training restarted after the death of a keeper"),
        (break_faults, "a keeper was never killed"),
        (break_peace, "training restarted 1 times without the death of a trainer"),
    ],
)
def test_each_difference_is_told_and_fails_the_demo(
    tamper: Callable[[RunRecord], None], sentence: str, tmp_path: Path
) -> None:
    calm, struck = calm_run(), struck_run()
    tamper(struck)
    judgement = judge(calm, struck)
    assert (judgement.differences, judgement.exit_code) == ([sentence], 1)
    text = told(calm, struck, judgement, out=tmp_path)
    assert sentence in text
    assert VERDICT not in text


@pytest.mark.parametrize("left_by", ["calm", "struck"])
def test_a_keeper_left_behind_fails_the_demo_although_nothing_differs(left_by: str, tmp_path: Path) -> None:
    runs = {"calm": calm_run(), "struck": struck_run()}
    runs[left_by].leftovers = ["4711 python -m keepstep.keeper"]
    judgement = judge(**runs)
    assert (judgement.verdict, judgement.differences) == ("something was left behind", [])
    assert judgement.exit_code == 1
    text = told(**runs, judgement=judgement, out=tmp_path)
    assert "left behind, and ended by the demo: 4711 python -m keepstep.keeper" in text
    assert VERDICT not in text


# The summary


def write_summary(tmp_path: Path, summary: Summary) -> dict[str, Any]:
    summary.write(tmp_path / "summary.json")
    content: dict[str, Any] = json.loads((tmp_path / "summary.json").read_bytes())
    return content


def test_the_summary_of_two_runs_holds_every_failure_and_result(tmp_path: Path) -> None:
    calm, struck = calm_run(), struck_run()
    summary = Summary(steps=STEPS, nodes=4, losses=2, seed=0, judgement=judge(calm, struck), calm=calm, struck=struck)
    content = write_summary(tmp_path, summary)
    assert (content["schema"], content["verdict"], content["identical"]) == (2, VERDICT, True)
    assert [row["failure"] for row in content["failures"]] == [fault.name for fault in FAULTS]
    assert content["runs"]["undisturbed"]["results"] == content["runs"]["struck"]["results"]


def test_the_summary_of_a_demo_that_could_not_finish_says_why_and_claims_nothing(tmp_path: Path) -> None:
    content = write_summary(tmp_path, Summary(steps=STEPS, nodes=4, losses=2, seed=0, error="the training stood still"))
    assert (content["verdict"], content["identical"]) == ("the training stood still", False)
    assert (content["failures"], content["runs"]) == ([], {})


# What it takes


def test_too_few_steps_and_a_missing_script_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 24") as refused:
        check_steps(23)
    assert refused.value.hint == "omit --steps"
    with pytest.raises(ConfigError, match="no training script"):
        find_script(tmp_path / "nothing.py")
    assert find_script(None).name == "gpt.py"
