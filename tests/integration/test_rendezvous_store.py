"""Agents with a real store, in one process, without workers: rounds, spares, verdicts, a lost store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rendezvous_agents import DEAD_S, THREE, Agent, Job

from keepstep.control.membership import NodeClaim
from keepstep.launcher.agent import (
    ClosedError,
    DuplicateError,
    StoreLostError,
)
from keepstep.launcher.store import serve


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    try:
        yield made
    finally:
        made.close()


def test_nodes_are_ranked_by_name_and_a_failed_node_takes_all_into_the_next_round(job: Job) -> None:
    job.start("c", "a", "b")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    job.agents["b"].rendezvous.end_round(1, "its workers failed")
    job.wait("a b c", [(2, 0), (2, 1), (2, 2)])


@pytest.mark.parametrize("trial", range(3))
def test_two_spares_and_a_dead_node_settle_in_one_round(job: Job, trial: int) -> None:
    job.rules = replace(THREE, settle_s=60, first_call_s=60, last_call_s=60, grace_s=60)  # none of it is waited for
    job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    job.start("y", "x")
    time.sleep(0.5)
    assert job.places("a b c x y") == [(1, 0), (1, 1), (1, 2), None, None]
    job.agents["b"].die()
    deadline = time.monotonic() + 20
    while job.places("x y") == [None, None]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.wait("a c", [(2, 0), (2, 2)])
    assert sorted(map(str, job.places("x y"))) == ["(2, 1)", "None"]
    time.sleep(2 * DEAD_S)
    assert job.places("a c") == [(2, 0), (2, 2)], "the round did not stand"
    assert job.agents["a"].rendezvous.view.state.round == 2


def test_a_silent_agent_whose_keeper_lives_ends_no_round(job: Job) -> None:
    a, b, _ = job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    b.die(keeper=False)
    time.sleep(3 * DEAD_S)
    assert a.rendezvous.end_reason() == ""
    job.start("b+")  # somebody starts the agent again
    job.wait("a b+ c", [(2, 0), (2, 1), (2, 2)])
    assert "new agent" in a.rendezvous.view.state.broken or a.rendezvous.view.state.round == 2


def test_a_dead_keeper_ends_no_round(job: Job) -> None:
    a, b, _ = job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    b.close_keeper()
    time.sleep(3 * DEAD_S)
    assert a.rendezvous.end_reason() == ""


def test_a_node_that_dies_before_its_round_began_does_not_hold_it_up(job: Job) -> None:
    job.start("a", "b")
    slow = Agent("c", job.rules, lambda: job.port)
    known = NodeClaim(slow.card, 0)
    member = slow.rendezvous.join(known, [], timeout_s=20)  # it gets a place, and never says that it is ready
    assert (member.round, member.rank) == (1, 2)
    slow.die(keeper=False)
    job.start("d")
    job.wait("a b d", [(2, 0), (2, 1), (2, 2)])
    slow.close_keeper()


def test_an_elastic_job_goes_on_with_fewer_nodes_and_lets_one_in_when_it_has_settled(job: Job) -> None:
    job.rules = replace(THREE, min_nodes=1, first_call_s=60, grace_s=60)  # neither is waited for
    job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    job.agents["b"].die()
    job.wait("a c", [(2, 0), (2, 1)])
    job.start("d")
    job.wait("a c d", [(3, 0), (3, 1), (3, 2)])


def test_two_living_agents_of_one_node_are_refused(job: Job) -> None:
    job.start("a", "b", "b+")
    deadline = time.monotonic() + 25
    while not any(isinstance(job.agents[name].problem, DuplicateError) for name in ("b", "b+")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_spares_end_with_the_job_and_the_next_job_of_that_name_begins(job: Job) -> None:
    job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    (spare,) = job.start("x")
    time.sleep(0.5)
    for name in "abc":
        assert job.agents[name].rendezvous.close(close_job=True, timeout_s=5)
    spare.thread.join(10)
    assert isinstance(spare.problem, ClosedError)
    for agent in job.agents.values():
        agent.die()
    job.agents.clear()
    job.start("a", "b", "c")
    job.wait("a b c", [(2, 0), (2, 1), (2, 2)])


def test_a_store_that_is_lost_is_an_error_only_for_those_that_need_it(job: Job) -> None:
    a, b, _ = job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    job.store = None
    job.port = 1  # nobody answers there
    time.sleep(2)
    assert a.rendezvous.end_reason() == ""  # workers that work go on
    with pytest.raises(StoreLostError):
        b.rendezvous.join(NodeClaim(b.card, 1), [], timeout_s=20)


def test_members_write_the_round_again_to_a_store_that_came_back_empty(job: Job) -> None:
    a, _, c = job.start("a", "b", "c")
    job.wait("a b c", [(1, 0), (1, 1), (1, 2)])
    job.store = None
    time.sleep(1)
    job.store = serve("127.0.0.1", 0)
    job.start("x")  # it may be there before any member, and must not begin a job of its own
    time.sleep(3 * DEAD_S)
    assert (a.rendezvous.end_reason(), c.rendezvous.end_reason()) == ("", "")
    assert a.rendezvous.run(lambda store: store.raw.get("board"), timeout_s=5)
    assert job.places("x") == [None]
    b = job.agents["b"]
    deadline = time.monotonic() + 20
    while not a.rendezvous.run(lambda store: store.raw.check([f"card/{b.rendezvous.agent.agent}"]), timeout_s=5):
        assert time.monotonic() < deadline, "b does not find the new store"
        time.sleep(0.05)
    b.die()  # of one that never spoke to this store nothing is known: see RoundParticipant._verdict
    job.wait("a x c", [(2, 0), (2, 1), (2, 2)])
