"""When restarting is given up: how incarnations ended, and what follows."""

from __future__ import annotations

from keepstep.control.membership import IncarnationEnd
from keepstep.launcher.crash_loops import FailureHistory
from keepstep.types import Incarnation, Version

NINE = Version(Incarnation(1, 7), 9)
TEN = Version(Incarnation(2, 7), 10)
AGENTS = {"a/1", "b/1"}


def end(round_: int, *, exit: str = "exit code 1", complete: Version | None = NINE, **more: object) -> IncarnationEnd:
    return IncarnationEnd(round_, complete, more.pop("progressed", False), exit, **more)  # type: ignore[arg-type]


def history(*starts: list[IncarnationEnd]) -> FailureHistory:
    made = FailureHistory()
    for ends in starts:
        made.add(ends, agents=AGENTS, agents_before=AGENTS)
    return made


def test_third_fruitless_start_from_the_same_step_is_the_last() -> None:
    starts = [[end(1)], [end(2)], [end(3, error="ValueError: a bad batch")]]
    assert history(*starts[:2]).crash_loop() is None
    loop = history(*starts).crash_loop()
    assert loop is not None
    assert loop.version == NINE
    assert "started 3 times from step 9" in loop.problem
    assert "exit code 1: ValueError: a bad batch" in loop.problem


def test_trainers_that_never_complete_a_snapshot_start_three_times_too() -> None:
    loop = history(*([end(n, complete=None)] for n in (1, 2, 3))).crash_loop()
    assert loop is not None
    assert "from the beginning" in loop.problem


def test_a_snapshot_in_between_ends_the_row() -> None:
    starts = [[end(1)], [end(2)], [end(3, complete=TEN, progressed=True)], [end(4, complete=TEN)]]
    assert history(*starts).crash_loop() is None
    assert history(*starts, [end(5, complete=TEN)], [end(6, complete=TEN)]).crash_loop() is not None


def test_a_version_that_was_sealed_only_after_the_crash_ends_the_row() -> None:
    assert history([end(1)], [end(2)], [end(3, complete=TEN)]).crash_loop() is None


def test_kills_from_outside_are_no_crash_loop() -> None:
    killed = [[end(n, exit="", killed=True)] for n in range(1, 9)]
    assert history(*killed).crash_loop() is None
    assert history([end(1)], [end(2)], [end(3, exit="", killed=True)], [end(4)]).crash_loop() is None


def test_survivors_of_a_killed_trainer_on_another_node_are_no_crash_loop() -> None:
    """They fail by themselves, since the connection to it is reset."""
    assert history(*([end(n), end(n, exit="", killed=True)] for n in range(1, 9))).crash_loop() is None


def test_lost_nodes_are_no_crash_loop() -> None:
    made = FailureHistory()
    for number in range(1, 9):
        made.add([end(number)], agents={"a/1", f"b/{number}"}, agents_before={"a/1", f"b/{number - 1}"})
        assert made.crash_loop() is None


def test_a_node_whose_workers_were_stopped_waits_for_the_verdict_of_the_others() -> None:
    stopped = [end(n, exit="") for n in (1, 2, 3)]
    assert history(*([one] for one in stopped)).crash_loop() is None
    both = [[one, end(one.round, exit="SIGSEGV")] for one in stopped]
    loop = history(*both).crash_loop()
    assert loop is not None
    assert "SIGSEGV" in loop.problem


def test_different_ends_are_no_crash_loop() -> None:
    assert history([end(1)], [end(2, exit="SIGSEGV")], [end(3)]).crash_loop() is None


def test_restore_that_fails_twice_alike_is_not_tried_again() -> None:
    problem = "RecoveryError: optimizer is another one"
    first, second = end(1, restore_error=problem), end(2, restore_error=problem)
    assert history([first]).crash_loop() is None
    assert history([first], [end(2, restore_error="RecoveryError: something else")]).crash_loop() is None
    assert history([first], [end(2, complete=TEN, restore_error=problem)]).crash_loop() is None
    loop = history([first], [second]).crash_loop()
    assert loop is not None
    assert problem in loop.problem


def test_a_round_that_ends_before_it_begins_counts_once() -> None:
    assert history([end(1)], [end(1)], [end(1)]).crash_loop() is None


def test_errors_of_restore_that_differ_in_an_address_only_are_the_same() -> None:
    text = "RecoveryError: data.load_state_dict() refused: KeyError(<Sampler object at 0x7f3a{}>)"
    loop = history(*([end(n, restore_error=text.format(n))] for n in (1, 2))).crash_loop()
    assert loop is not None
    assert "KeyError(<Sampler object at 0x...>)" in loop.problem
