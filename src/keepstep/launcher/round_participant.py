"""One agent's part in the rendezvous: at each visit to the store it reads, asks for a place, decides, or watches.

Invariants:
- Used by the agent's store thread only (agent.py). Decisions are pure (rounds.py); the store's compare-and-set says
  which of them counts.
- A node is dead when its agent is silent for `dead_s` *and* its keeper does not answer. In a round whose workers have
  not started the agent's silence is enough: there is no training that a wrong verdict could stop.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from dataclasses import dataclass, field, replace

import msgspec

from keepstep.control.membership import NodeClaim, agree, newest_members
from keepstep.control.messages import NodeCard
from keepstep.control.secret_file import SECRET_BYTES
from keepstep.control.signed_store import SignedStore
from keepstep.launcher.round_document import REREAD_S, RoundDocument
from keepstep.launcher.rounds import (
    AgentId,
    RoundRules,
    RoundState,
    SilenceTimer,
    agents_to_read,
    agents_to_watch,
    awaited_members,
    begin_round,
    choose_members,
    end_round,
    reopen,
    request_place,
)

MAX_ELAPSED_S = 1.0  # Counted between two readings of the counters: two pauses of an agent whose workers run.
MAX_DECIDERS = 3  # The first few living candidates may begin a round: enough, and few conflicting writes.
NEVER = 1 << 62
PROBE_S = 1.5
INVALID_HELLO = bytes(64)
COMPLAIN_EVERY_S = 60.0

log = logging.getLogger("keepstep.launcher")


@dataclass(frozen=True)
class JoinRequest:
    """The agent wants a place: its node's claim, and its keeper's list of members."""

    claim: NodeClaim
    members: list[NodeCard]


@dataclass(frozen=True)
class RoundMember:
    """The agent has a place. `begun`: all members are ready, and its workers run."""

    state: RoundState  # when the place was assigned
    rank: int
    begun: bool
    since: float

    @property
    def round(self) -> int:
        return self.state.round

    def key(self, kind: str) -> str:
        """Store key of a document of this round: no earlier round or job has it."""
        return f"{kind}/{self.state.agreement.partition('/')[2]}"


@dataclass(frozen=True)
class RoundView:
    """Result of a visit to the store."""

    state: RoundState = field(default_factory=RoundState)
    at: float = field(default_factory=time.monotonic)
    missing: str = ""  # What a joining agent waits for.
    duplicate: bool = False  # Another agent of the same node is alive.
    place: RoundMember | None = None  # A place that this visit assigned.
    ignored: int = 0  # Documents in the store that did not verify, so far.
    last_ignored: str = ""


class RoundParticipant:
    """The store side of one agent."""

    def __init__(self, agent: AgentId, rules: RoundRules) -> None:
        self.document = RoundDocument()
        self.was_open = False  # The job was seen open: `closed` means its end, not that of an earlier job.
        self._agent, self._rules = agent, rules
        self._claim, self._claimed_at = "", 0.0
        self._silences, self._read_at = SilenceTimer(), time.monotonic()
        self._enough_since = 0.0
        self._request: JoinRequest | None = None
        self._requested_in = NEVER
        self._probed: dict[str, float] = {}
        self._complained_at = float("-inf")

    def reconnected(self, store: SignedStore) -> None:
        """The connection is new, and so may the store be: do not rely on anything written before."""
        self.document.invalidate()
        if self._claim:
            self._write_claim(store)

    def put_claim(self, store: SignedStore, claim: NodeClaim) -> None:
        """Publish this node's claim, with its keeper's address."""
        self._claim = msgspec.json.encode(claim).decode()
        self._write_claim(store)

    def _write_claim(self, store: SignedStore) -> None:
        store.write(f"card/{self._agent.agent}", self._claim)
        self._claimed_at = time.monotonic()

    def visit(self, store: SignedStore, wish: JoinRequest | RoundMember | None) -> RoundView:
        """Send a heartbeat, read the document, and do what the wish demands."""
        view, signer = self._visit(store, wish), store.signer
        return replace(view, ignored=signer.ignored, last_ignored=signer.last_ignored)

    def _visit(self, store: SignedStore, wish: JoinRequest | RoundMember | None) -> RoundView:
        store.write(f"beat/{self._agent.agent}", "")
        if self._claim and time.monotonic() - self._claimed_at > REREAD_S:
            self._write_claim(store)  # Somebody else may have replaced it.
        state = self.document.read(store)
        if isinstance(wish, RoundMember):
            self._read_counters(store, [*agents_to_watch(state, wish.rank), *state.waiting])
            return RoundView(self._watch(store, state, wish))
        if isinstance(wish, JoinRequest):
            if wish is not self._request:
                self._request, self._requested_in = wish, NEVER
            self._read_counters(store, agents_to_read(state, self._agent, dead=self._is_dead))
            return self._seek_place(store, state, wish)
        return RoundView(state)

    def _read_counters(self, store: SignedStore, agents: list[AgentId]) -> None:
        names = list({agent.agent for agent in agents} - {self._agent.agent})
        beats = store.read([f"beat/{name}" for name in names])
        counts = [beat.serial if beat is not None else 0 for beat in beats]  # The store may have lost some of them.
        now = time.monotonic()
        elapsed_s = min(now - self._read_at, MAX_ELAPSED_S)
        self._read_at = now
        self._silences.update(dict(zip(names, counts, strict=True)), elapsed_s)

    def _is_dead(self, agent: AgentId) -> bool:
        return agent.agent != self._agent.agent and self._silences.silent_s(agent.agent) >= self._rules.dead_s

    # Joining

    def _seek_place(self, store: SignedStore, state: RoundState, request: JoinRequest) -> RoundView:
        if state.closed and not self.was_open:
            others = [agent for agent in [*state.members, *state.waiting] if agent.agent != self._agent.agent]
            if not all(self._is_dead(agent) for agent in others):
                return RoundView(state, missing="agents of a closed job are still alive")
            state = self.document.write(store, reopen(state)) or state
        if state.closed:
            return RoundView(state)
        self.was_open = True
        rank = state.rank(self._agent.agent)
        if state.stands and rank is not None and state.round > self._requested_in:
            return RoundView(state, place=RoundMember(state, rank, False, time.monotonic()))
        if self._agent not in state.waiting:
            return self._request_place(store, state, request)
        if state.stands:
            self._enough_since = 0.0
            return RoundView(state, missing=f"round {state.round} is full; this node is a spare")
        state, missing = self._decide(store, state)
        return RoundView(state, missing=missing)

    def _request_place(self, store: SignedStore, state: RoundState, request: JoinRequest) -> RoundView:
        namesakes = [
            agent
            for agent in {*state.members, *state.waiting}
            if agent.node_id == self._agent.node_id and agent.agent != self._agent.agent and not self._is_dead(agent)
        ]
        if namesakes:
            alive = any(self._silences.moved(agent.agent) for agent in namesakes)
            return RoundView(state, missing="an earlier agent of this node may still be alive", duplicate=alive)
        store.write(f"members/{self._agent.agent}", msgspec.json.encode(request.members).decode())
        self.put_claim(store, request.claim)
        written = self.document.write(store, request_place(state, self._agent))
        if written is not None:
            self._requested_in, self._enough_since = written.round, 0.0
        return RoundView(written or state)

    def _decide(self, store: SignedStore, state: RoundState) -> tuple[RoundState, str]:
        """Begin the next round if this agent may and if it is time. Returns what is missing otherwise."""
        living = [agent for agent in state.waiting if not self._is_dead(agent)]
        alive = {agent.agent for agent in [*state.members, *state.waiting] if not self._is_dead(agent)}
        if self._agent not in living[:MAX_DECIDERS]:
            return state, f"{len(living)} nodes are waiting"
        found = store.read_as([f"card/{agent.agent}" for agent in living], NodeClaim)
        claims = {agent.agent: claim for agent, claim in zip(living, found, strict=True) if claim is not None}
        if len(claims) < len(living):
            return state, "the store has lost the claims of some nodes"
        last: list[NodeCard] | None = []
        if newest := newest_members(claims):
            last = store.read_as([f"members/{newest}"], list[NodeCard])[0]
        if last is None:
            return state, "the store has lost the list of the last members"
        now = time.monotonic()
        if len(living) < self._rules.min_nodes or awaited_members(state, alive):
            self._enough_since = 0.0
        elif not self._enough_since:
            self._enough_since = now
        waited_s = now - self._enough_since if self._enough_since else 0.0
        members, reason = choose_members(state, self._rules, alive=alive, claims=claims, last=last, waited_s=waited_s)
        if not members:
            return state, reason
        nonce, secret = secrets.randbits(63), secrets.token_bytes(SECRET_BYTES)
        agreement = agree([claims[member.agent] for member in members], last, nonce=nonce, secret=secret)
        key = f"agreement/{state.round + 1}.{nonce:x}"
        store.write(key, msgspec.json.encode(agreement).decode())
        written = self.document.write(store, begin_round(state, members, key, alive))
        if written is not None:
            log.info("round %d begins: %s", written.round, reason)
        return written or state, reason

    # Watching a round

    def _watch(self, store: SignedStore, state: RoundState, member: RoundMember) -> RoundState:
        if not state.members:
            # The store came back empty: a member writes the state of the round again.
            restored = msgspec.structs.replace(member.state, waiting=state.waiting)
            return self.document.write(store, restored) or state
        if state.agreement != member.state.agreement or not state.stands:
            return state
        for agent in agents_to_watch(state, member.rank):
            if self._is_dead(agent) and (reason := self._verdict(store, agent, member)):
                log.warning("verdict: %s", reason)
                return self.document.write(store, end_round(state, member.round, reason)) or state
        room = self._rules.max_nodes - len(state.members)
        if member.rank == 0 and member.begun and room > 0:
            candidates = [agent for agent in state.waiting if not self._is_dead(agent)]
            if candidates and time.monotonic() - member.since > self._rules.settle_s:
                reason = f"node {candidates[0].node_id} is invited into a free place"
                return self.document.write(store, end_round(state, member.round, reason)) or state
        return state

    def _verdict(self, store: SignedStore, agent: AgentId, member: RoundMember) -> str:
        """Why a node is dead, or "" when its keeper lives."""
        silent = f"node {agent.node_id} is lost: its agent is silent for {self._silences.silent_s(agent.agent):.1f} s"
        if not member.begun:
            return silent
        now, key = time.monotonic(), f"card/{agent.agent}"
        if now - self._probed.get(agent.agent, 0.0) < PROBE_S:
            return ""
        self._probed[agent.agent] = now
        claim = store.read_as([key], NodeClaim)[0]
        if claim is None:
            return ""  # The store is a new one and this agent never reached it: one of the two signs is missing.
        card = claim.card
        if keeper_answers(card):
            if now - self._complained_at > COMPLAIN_EVERY_S:
                self._complained_at = now
                log.warning("the agent of node %s is silent, its keeper answers: training goes on", agent.node_id)
            return ""
        return f"{silent}, and its keeper does not answer at {card.address}:{card.port}"


def keeper_answers(card: NodeCard) -> bool:
    """Whether the keeper of another node lives, tested over the network alone.

    A keeper closes a connection with an invalid hello at once, with TLS or without. A connection by itself proves
    nothing: the kernel accepts it for a process that is stopped.
    """
    try:
        with socket.create_connection((card.address, card.port), timeout=PROBE_S) as sock:
            sock.sendall(INVALID_HELLO)
            sock.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True
