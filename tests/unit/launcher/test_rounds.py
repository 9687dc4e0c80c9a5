"""The rules by which rounds begin and end, without a store, a clock or a thread."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from keepstep.control.membership import NodeClaim
from keepstep.control.messages import NodeCard
from keepstep.launcher.rounds import (
    AgentId,
    RoundRules,
    RoundState,
    SilenceTimer,
    agents_to_read,
    agents_to_watch,
    begin_round,
    choose_members,
    end_round,
    reopen,
    request_place,
    withdraw,
)

THREE = RoundRules(3, 3, dead_s=3, settle_s=30, first_call_s=30, last_call_s=3, grace_s=6)


def seat(name: str) -> AgentId:
    """`b2` is the second agent of node b."""
    return AgentId(name, name[0])


def waiting(*names: str, state: RoundState | None = None) -> RoundState:
    state = RoundState() if state is None else state
    for name in names:
        state = request_place(state, seat(name))
    return state


def standing(*names: str, round_: int = 1) -> RoundState:
    return RoundState(round=round_, members=[seat(name) for name in names], broken="")


def pick(
    state: RoundState,
    alive: str,
    *,
    rules: RoundRules = THREE,
    last: str = "",
    waited_s: float = 0.0,
    holders: str = "",
) -> tuple[str, str]:
    agents = {other.agent for other in [*state.members, *state.waiting] if other.agent in alive.split()}
    claims = {
        other.agent: NodeClaim(NodeCard(other.node_id, "", "", 0), 0, holds_state=other.node_id in holders)
        for other in state.waiting
        if other.agent in agents
    }
    cards = [NodeCard(node, "", "", 0) for node in last]
    chosen, reason = choose_members(state, rules, alive=agents, claims=claims, last=cards, waited_s=waited_s)
    return " ".join(other.agent for other in chosen), reason


def test_a_first_round_begins_when_all_nodes_are_here() -> None:
    assert pick(waiting("c1", "a1"), "a1 c1")[0] == ""
    assert pick(waiting("c1", "a1", "b1"), "a1 b1 c1")[0] == "a1 b1 c1"


def test_a_dead_candidate_is_not_counted() -> None:
    assert pick(waiting("a1", "b1", "c1"), "a1 c1")[1].startswith("2 of at least 3 nodes")


def test_a_member_that_asks_again_ends_its_round() -> None:
    state = request_place(standing("a1", "b1", "c1"), seat("b1"))
    assert "node b has left the round" in state.broken
    assert [member.agent for member in state.members] == ["a1", "b1", "c1"]


def test_a_new_agent_in_the_place_of_a_dead_one_ends_the_round() -> None:
    assert "new agent" in request_place(standing("a1", "b1", "c1"), seat("b2")).broken


def test_a_spare_does_not_move_a_round_that_stands() -> None:
    assert waiting("x1", "y1", state=standing("a1", "b1", "c1")).stands


def test_members_that_live_are_waited_for_before_a_spare_gets_a_place() -> None:
    state = end_round(waiting("x1", "y1", state=standing("a1", "b1", "c1")), 1, "c is dead")
    state = waiting("a1", state=state)
    chosen, reason = pick(state, "a1 b1 x1 y1", last="abc", waited_s=99)
    assert chosen == ""
    assert reason == "node b must stop its workers first"
    assert pick(waiting("b1", state=state), "a1 b1 x1 y1", last="abc")[0] == "a1 b1 x1"


def test_the_first_spare_gets_the_free_rank_and_the_others_keep_theirs() -> None:
    state = end_round(waiting("y1", "x1", state=standing("a1", "b1", "c1")), 1, "b is dead")
    state = waiting("c1", "a1", state=state)
    chosen, _ = pick(state, "a1 c1 x1 y1", last="abc")
    assert chosen == "a1 y1 c1"
    begun = begin_round(state, [seat(name) for name in chosen.split()], "key", {"a1", "c1", "x1", "y1"})
    assert begun.stands
    assert begun.round == 2
    assert [other.agent for other in begun.waiting] == ["x1"]


def test_nodes_that_hold_state_come_before_empty_ones() -> None:
    state = waiting("x1", "y1", "z1", "b1", "a1")
    assert pick(state, "a1 b1 x1 y1 z1", last="abc", waited_s=9, holders="z")[0] == "a1 b1 z1"


def test_on_a_new_store_newcomers_wait_a_while_for_nodes_that_may_hold_state() -> None:
    state = waiting("x1", "y1", "a1")
    chosen, reason = pick(state, "a1 x1 y1", last="abc")
    assert chosen == ""
    assert "hold state are missing: b, c" in reason
    assert pick(state, "a1 x1 y1", last="abc", waited_s=7)[0] == "a1 x1 y1"


def test_an_elastic_round_waits_for_more_nodes_only_so_long() -> None:
    rules = replace(THREE, min_nodes=1)
    assert pick(waiting("a1", "b1"), "a1 b1", rules=rules)[0] == ""
    assert pick(waiting("a1", "b1"), "a1 b1", rules=rules, waited_s=31)[0] == "a1 b1"
    later = waiting("a1", "b1", state=end_round(standing("a1", "b1", "c1"), 1, "c is dead"))
    assert pick(later, "a1 b1", rules=rules, last="abc", waited_s=4)[0] == "a1 b1"


def test_a_verdict_on_a_round_that_is_over_changes_nothing() -> None:
    state = standing("a1", "b1", round_=4)
    assert end_round(state, 3, "late") is state
    assert end_round(end_round(state, 4, "first"), 4, "second").broken == "first"


def test_a_job_of_the_same_name_can_begin_where_the_last_one_closed() -> None:
    closed = withdraw(standing("a1", "b1"), "a1", close=True)
    assert closed.closed
    again = reopen(closed)
    assert not again.closed
    assert not again.stands


def test_small_rounds_watch_all_members_and_large_ones_the_next_few() -> None:
    assert [other.agent for other in agents_to_watch(standing("a1", "b1", "c1"), 1)] == ["c1", "a1"]
    large = RoundState(round=1, members=[AgentId(str(n), str(n)) for n in range(40)], broken="")
    assert [other.agent for other in agents_to_watch(large, 38)] == ["39", "0", "1"]


def test_silence_counts_only_while_counters_are_read() -> None:
    silences = SilenceTimer()
    assert silences.silent_s("a") == 0
    silences.update({"a": 5}, 1.0)
    assert silences.silent_s("a") == 0
    assert not silences.moved("a")
    silences.update({"a": 5}, 1.0)
    silences.update({}, 1.0)
    silences.update({"a": 5}, 0.5)
    assert silences.silent_s("a") == 1.5
    silences.update({"a": 6}, 1.0)
    assert silences.silent_s("a") == 0
    assert silences.moved("a")


# Whom a candidate listens to


def crowd(count: int) -> RoundState:
    state = RoundState(members=[AgentId(f"n{number}/old", f"n{number}") for number in range(count)], broken="over")
    for number in range(count):
        state = request_place(state, AgentId(f"n{number}/new", f"n{number}"))
    return state


def hears(state: RoundState, number: int, dead: Collection[str] = ()) -> set[str]:
    own = AgentId(f"n{number}/new", f"n{number}")
    return {other.agent for other in agents_to_read(state, own, dead=lambda seat: seat.agent in dead)}


def test_few_candidates_all_listen_to_all() -> None:
    state = crowd(16)
    assert all(len(hears(state, number)) == 32 for number in range(16))


def test_in_a_crowd_those_who_may_decide_listen_to_all_and_the_others_to_them() -> None:
    state = crowd(1000)
    first = {f"n{number}/new" for number in range(8)}
    for number in range(8):
        assert len(hears(state, number)) == 2000
    for number in (8, 500, 999):
        assert hears(state, number) == {*first, f"n{number}/old", f"n{number}/new"}
    assert all(hears(state, number) >= first for number in range(1000)), "whoever decides is watched by all"


def test_when_those_who_decide_have_died_the_next_listen_to_all() -> None:
    state, dead = crowd(1000), {f"n{number}/new" for number in range(6)}
    assert len(hears(state, 13, dead)) == 2000
    assert hears(state, 14, dead) == {f"n{number}/new" for number in range(6, 14)} | {"n14/old", "n14/new"}
    everybody = {f"n{number}/new" for number in range(1000)}
    assert len(hears(state, 999, everybody - {"n999/new"})) == 2000


def test_who_waits_for_the_agents_of_a_job_that_is_over_listens_to_all() -> None:
    state = withdraw(crowd(1000), "n3/new", close=True)
    assert state.closed
    assert len(hears(state, 999)) >= 1000
