"""Rounds of the rendezvous as values: one document in the store, and the pure rules that change it.

The document is replaced by compare-and-set only, so the store is the arbiter: of two agents that decide
at the same time one wins, and the other reads what it decided. No clock is compared between nodes:
an agent is alive while its counter in the store moves, as seen by whoever asks.

Invariants:
- A round that stands ends only by a word in `broken`: a member left it, a node was found dead, a new agent
  took the place of a dead one, or a place is free and a node was invited into it.
- A spare never moves a full round: it stands in `waiting`, which nobody but a deciding agent looks at.
- A member of the last round whose agent lives is waited for; newcomers get only the places that are left.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from keepstep.control.membership import NodeClaim, seats
from keepstep.control.messages import NodeCard

NOTHING_YET = "nothing has begun"


@dataclass(frozen=True)
class RoundRules:
    """How many, and how patient."""

    min_nodes: int
    max_nodes: int
    dead_s: float
    """an agent that is silent for so long is dead"""
    settle_s: float
    """how long a round stands before it is ended to let another node in"""
    first_call_s: float
    last_call_s: float
    """how long enough nodes wait for more of them: before the first round, and before later ones"""
    grace_s: float
    """how long a newcomer must wait for the place of a member that nobody has seen die"""


class AgentId(msgspec.Struct, frozen=True):
    """An agent (one process) and the node it speaks for."""

    agent: str
    node_id: str


class RoundState(msgspec.Struct, frozen=True):
    """The document. What it says of `members` stays after their round has ended."""

    round: int = 0
    members: list[AgentId] = []
    """by node rank"""
    agreement: str = ""
    """the key of what they agreed on"""
    broken: str = NOTHING_YET
    """why no round stands; empty while one does"""
    waiting: list[AgentId] = []
    """in the order of their arrival"""
    closed: bool = False
    stamp: str = ""
    """makes every document different, so that its writer knows whether it won"""

    @property
    def stands(self) -> bool:
        return not self.broken

    def rank(self, agent: str) -> int | None:
        return next((rank for rank, seat in enumerate(self.members) if seat.agent == agent), None)


def arrive(board: RoundState, seat: AgentId) -> RoundState:
    """An agent asks for a place. A member that asks again has left its round, and so ends it.

    Other agents of the same node are struck out: the caller has made sure that they are dead.
    """
    broken = board.broken
    for member in board.members:
        if board.stands and member.agent == seat.agent:
            broken = f"node {seat.node_id} has left it: its workers failed or were stopped"
        elif board.stands and member.node_id == seat.node_id:
            broken = f"node {seat.node_id} has a new agent, the old one is dead"
    waiting = [other for other in board.waiting if seat.node_id != other.node_id]
    return _written(board, broken=broken, waiting=[*waiting, seat])


def leave(board: RoundState, agent: str, *, close: bool) -> RoundState:
    waiting = [seat for seat in board.waiting if seat.agent != agent]
    return _written(board, waiting=waiting, closed=board.closed or close)


def end_round(board: RoundState, round_: int, reason: str) -> RoundState:
    """A verdict or an invitation. A later round than the one it speaks of is left alone."""
    return _written(board, broken=reason) if board.round == round_ and board.stands else board


def reopen(board: RoundState) -> RoundState:
    """A job of the same name begins on a store that remembers the end of the last one."""
    return _written(board, closed=False, waiting=[], broken=board.broken or "the job before has ended")


def begin(board: RoundState, members: Sequence[AgentId], agreement: str, alive: Collection[str]) -> RoundState:
    taken = {seat.agent for seat in members}
    waiting = [seat for seat in board.waiting if seat.agent in alive and seat.agent not in taken]
    return _written(
        board, round=board.round + 1, members=list(members), agreement=agreement, broken="", waiting=waiting
    )


def choose(
    board: RoundState,
    rules: RoundRules,
    *,
    alive: Collection[str],
    known: Mapping[str, NodeClaim],
    last: Sequence[NodeCard],
    waited_s: float,
) -> tuple[list[AgentId], str]:
    """The next round's members by rank and why, or none and what is missing.

    `known`: what the living candidates brought. `last`: the newest list of members among them.
    `waited_s`: how long there have been enough of them, and none was awaited.
    """
    here = [seat for seat in board.waiting if seat.agent in alive and seat.agent in known]
    if awaited := late(board, alive):
        return [], f"{_names(awaited)} must stop its workers first"
    order = [card.node_id for card in last]
    before = set(order)
    survivors = [seat for seat in here if seat.node_id in before]
    newcomers = [seat for seat in here if seat.node_id not in before]
    newcomers.sort(key=lambda seat: not known[seat.agent].holds_state)  # stable: else by arrival
    chosen = [*survivors, *newcomers][: rules.max_nodes]
    if len(chosen) < rules.min_nodes:
        return [], f"{len(chosen)} of at least {rules.min_nodes} nodes are here ({_names(here)})"
    dead = {member.node_id for member in board.members if member.agent not in alive}
    present = {seat.node_id for seat in chosen}
    unseen = [node for node in order if node not in dead and node not in present]
    if unseen and len(chosen) > len(survivors) and waited_s < rules.grace_s:
        return [], f"nodes that may hold state have not come yet: {', '.join(unseen[:5])}"
    last_call_s = rules.last_call_s if board.round else rules.first_call_s
    if len(chosen) < rules.max_nodes and waited_s < last_call_s:
        return [], f"{len(chosen)} nodes are here, up to {rules.max_nodes} may come within {last_call_s:g} s"
    by_node = {seat.node_id: seat for seat in chosen}
    members = [by_node[node] for node in seats([seat.node_id for seat in chosen], order)]
    return members, f"{len(members)} nodes, {len(survivors)} of them members before"


def late(board: RoundState, alive: Collection[str]) -> list[AgentId]:
    """Members of the last round whose agents live and have not asked for a place yet."""
    here = {seat.node_id for seat in board.waiting}
    return [seat for seat in board.members if seat.agent in alive and seat.node_id not in here]


def watched(board: RoundState, rank: int, *, all_up_to: int = 32, successors: int = 3) -> list[AgentId]:
    """Whom a member of a standing round listens to: everybody in a small one, the next few in a large one.

    A dead node whose watchers died too is found all the same: their deaths end the round.
    """
    others = [*board.members[rank + 1 :], *board.members[:rank]]
    return others if len(board.members) <= all_up_to else others[:successors]


def heard(
    board: RoundState, seat: AgentId, *, dead: Callable[[AgentId], bool], all_up_to: int = 32, first: int = 8
) -> list[AgentId]:
    """Whom a candidate listens to: everybody where they are few. Else only those who may decide listen to everybody,
    and all others to them, and to whoever else speaks for the same node.

    With a thousand that each listened to all the store would do nothing else.
    """
    everybody = [*board.members, *board.waiting]
    if len(everybody) <= all_up_to or board.closed:
        return everybody
    living = [other for other in board.waiting if not dead(other)][:first]
    if seat in living or len(living) < first:
        return everybody
    return [*living, *(other for other in everybody if other.node_id == seat.node_id)]


class SilenceTimer:
    """For how long each counter has not moved.

    Time counts only while counters are read: `elapsed_s` is capped by the caller, so that a store that stood
    still, or a reader that did, makes nobody look dead.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._silent_s: dict[str, float] = {}
        self._moved: set[str] = set()

    def hear(self, counts: Mapping[str, int], elapsed_s: float) -> None:
        for agent, count in counts.items():
            before = self._counts.get(agent)
            if before is not None and before != count:
                self._moved.add(agent)
            self._silent_s[agent] = self._silent_s[agent] + elapsed_s if before == count else 0.0
            self._counts[agent] = count

    def silent_s(self, agent: str) -> float:
        """0 for an agent that was never listened to: nobody is dead unheard."""
        return self._silent_s.get(agent, 0.0)

    def moved(self, agent: str) -> bool:
        """Whether it was seen alive, and not only its last mark."""
        return agent in self._moved


def _written(board: RoundState, **changes: object) -> RoundState:
    return msgspec.structs.replace(board, stamp=secrets.token_hex(6), **changes)


def _names(them: Sequence[AgentId]) -> str:
    shown = ", ".join(seat.node_id for seat in them[:5])
    return f"node {shown}" + (f" and {len(them) - 5} more" if len(them) > 5 else "")
