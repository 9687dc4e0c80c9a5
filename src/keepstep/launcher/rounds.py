"""Rounds of the rendezvous: one document in the store, and the pure rules that change it.

The document is replaced by compare-and-set only, so the store is the arbiter: of two agents that decide at the same
time one wins, and the other reads that decision. Clocks of nodes are never compared: an agent is alive while its
counter in the store moves, as measured by each reader.

Invariants:
- A round that stands ends only by a reason in `broken`: a member left it, a node was found dead, a new agent replaced
  a dead one, or a place is free and a node was invited into it.
- A spare never moves a full round: it stays in `waiting`, which only a deciding agent uses.
- A member of the last round whose agent lives is waited for; newcomers get only the places that remain.

Written and read by the agents of all nodes (round_participant.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from keepstep.control.membership import NodeClaim, assign_ranks
from keepstep.control.messages import NodeCard

NOTHING_YET = "no round has begun"


@dataclass(frozen=True)
class RoundRules:
    """Limits on the size of a round and on waiting."""

    min_nodes: int
    max_nodes: int
    dead_s: float  # An agent that is silent for so long is dead.
    settle_s: float  # How long a round stands before it is ended to let another node in.
    first_call_s: float  # How long enough nodes wait for more of them before the first round,
    last_call_s: float  # and before later ones.
    grace_s: float  # How long a newcomer waits for the place of a member that was not seen to die.


class AgentId(msgspec.Struct, frozen=True):
    """An agent (one process) and its node."""

    agent: str
    node_id: str


class RoundState(msgspec.Struct, frozen=True):
    """The document. `members` and `agreement` stay after their round has ended."""

    round: int = 0
    members: list[AgentId] = []  # by node rank
    agreement: str = ""  # Store key of the members' agreement.
    broken: str = NOTHING_YET  # Why no round stands; empty while one does.
    waiting: list[AgentId] = []  # in the order of arrival
    closed: bool = False
    stamp: str = ""  # Makes each document unique, so that its writer knows whether it won.
    revision: int = 0  # Grows with each document, also in a store that came back empty.

    @property
    def stands(self) -> bool:
        return not self.broken

    def rank(self, agent: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.agent == agent), None)


def request_place(state: RoundState, agent: AgentId) -> RoundState:
    """An agent asks for a place. A member that asks again has left its round, and so ends it.

    Other agents of the same node are removed: the caller has made sure that they are dead.
    """
    broken = state.broken
    for member in state.members:
        if state.stands and member.agent == agent.agent:
            broken = f"node {agent.node_id} has left the round: its workers failed or were stopped"
        elif state.stands and member.node_id == agent.node_id:
            broken = f"node {agent.node_id} has a new agent, the old one is dead"
    waiting = [candidate for candidate in state.waiting if agent.node_id != candidate.node_id]
    return _changed(state, broken=broken, waiting=[*waiting, agent])


def withdraw(state: RoundState, agent: str, *, close: bool) -> RoundState:
    """An agent does not wait any more. `close`: the job is over."""
    waiting = [candidate for candidate in state.waiting if candidate.agent != agent]
    return _changed(state, waiting=waiting, closed=state.closed or close)


def end_round(state: RoundState, round_: int, reason: str) -> RoundState:
    """End this round, for a dead node or an invitation. A later round is not changed."""
    return _changed(state, broken=reason) if state.round == round_ and state.stands else state


def reopen(state: RoundState) -> RoundState:
    """A job of the same name begins on a store where the last one was closed."""
    return _changed(state, closed=False, waiting=[], broken=state.broken or "the last job has ended")


def begin_round(state: RoundState, members: Sequence[AgentId], agreement: str, alive: Collection[str]) -> RoundState:
    """Begin the next round. Agents that wait and live stay in `waiting`."""
    placed = {member.agent for member in members}
    waiting = [agent for agent in state.waiting if agent.agent in alive and agent.agent not in placed]
    return _changed(
        state, round=state.round + 1, members=list(members), agreement=agreement, broken="", waiting=waiting
    )


def choose_members(
    state: RoundState,
    rules: RoundRules,
    *,
    alive: Collection[str],
    claims: Mapping[str, NodeClaim],
    last: Sequence[NodeCard],
    waited_s: float,
) -> tuple[list[AgentId], str]:
    """Members of the next round by rank, and the reason; or none, and what is missing.

    `claims`: of the living candidates, by agent. `last`: the newest list of members among them.
    `waited_s`: for how long there have been enough candidates while no living member was missing.
    """
    candidates = [agent for agent in state.waiting if agent.agent in alive and agent.agent in claims]
    if awaited := awaited_members(state, alive):
        return [], f"{_names(awaited)} must stop its workers first"
    order = [card.node_id for card in last]
    former = set(order)
    survivors = [agent for agent in candidates if agent.node_id in former]
    newcomers = [agent for agent in candidates if agent.node_id not in former]
    newcomers.sort(key=lambda agent: not claims[agent.agent].holds_state)  # Stable: then by arrival.
    chosen = [*survivors, *newcomers][: rules.max_nodes]
    if len(chosen) < rules.min_nodes:
        return [], f"{len(chosen)} of at least {rules.min_nodes} nodes are waiting ({_names(candidates)})"
    dead = {member.node_id for member in state.members if member.agent not in alive}
    present = {agent.node_id for agent in chosen}
    missing = [node for node in order if node not in dead and node not in present]
    if missing and len(chosen) > len(survivors) and waited_s < rules.grace_s:
        return [], f"nodes that may hold state are missing: {', '.join(missing[:5])}"
    last_call_s = rules.last_call_s if state.round else rules.first_call_s
    if len(chosen) < rules.max_nodes and waited_s < last_call_s:
        return [], f"{len(chosen)} nodes are waiting, up to {rules.max_nodes} may join within {last_call_s:g} s"
    by_node = {agent.node_id: agent for agent in chosen}
    members = [by_node[node] for node in assign_ranks([agent.node_id for agent in chosen], order)]
    return members, f"{len(members)} nodes, {len(survivors)} of them members of the last incarnation"


def awaited_members(state: RoundState, alive: Collection[str]) -> list[AgentId]:
    """Members of the last round whose agents live and have not asked for a place yet."""
    waiting = {agent.node_id for agent in state.waiting}
    return [member for member in state.members if member.agent in alive and member.node_id not in waiting]


def agents_to_watch(state: RoundState, rank: int, *, all_up_to: int = 32, successors: int = 3) -> list[AgentId]:
    """Agents that a member of a standing round watches: all of a small round, the next few ranks of a large one.

    A dead node whose watchers died too is still found: their deaths end the round.
    """
    others = [*state.members[rank + 1 :], *state.members[:rank]]
    return others if len(state.members) <= all_up_to else others[:successors]


def agents_to_read(
    state: RoundState, agent: AgentId, *, dead: Callable[[AgentId], bool], all_up_to: int = 32, first: int = 8
) -> list[AgentId]:
    """Agents whose counters a candidate reads: all of them where they are few.

    Else only candidates that may decide read all, and the others read those and other agents of their own node. If
    each of a thousand candidates read all counters, the store would do nothing else.
    """
    everyone = [*state.members, *state.waiting]
    if len(everyone) <= all_up_to or state.closed:
        return everyone
    living = [candidate for candidate in state.waiting if not dead(candidate)][:first]
    if agent in living or len(living) < first:
        return everyone
    return [*living, *(other for other in everyone if other.node_id == agent.node_id)]


class SilenceTimer:
    """Measures for how long each agent's counter has not moved.

    Time counts only while counters are read: the caller caps `elapsed_s`, so that a store or a reader that stood still
    makes no agent look dead.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._silent_s: dict[str, float] = {}
        self._moved: set[str] = set()

    def update(self, counts: Mapping[str, int], elapsed_s: float) -> None:
        """Add one reading of counters, `elapsed_s` after the last one."""
        for agent, count in counts.items():
            previous = self._counts.get(agent)
            if previous is None:
                self._silent_s[agent] = 0.0
            elif count > previous:
                self._moved.add(agent)
                self._silent_s[agent] = 0.0
            else:
                self._silent_s[agent] += elapsed_s
            self._counts[agent] = max(count, previous or 0)

    def silent_s(self, agent: str) -> float:
        """0 for an agent whose counter was never read: it is not dead."""
        return self._silent_s.get(agent, 0.0)

    def moved(self, agent: str) -> bool:
        """Whether its counter moved while it was read, so that the agent was alive then."""
        return agent in self._moved


def _changed(state: RoundState, **changes: object) -> RoundState:
    return msgspec.structs.replace(state, stamp=secrets.token_hex(6), **changes)


def _names(agents: Sequence[AgentId]) -> str:
    shown = ", ".join(agent.node_id for agent in agents[:5])
    return f"node {shown}" + (f" and {len(agents) - 5} more" if len(agents) > 5 else "")
