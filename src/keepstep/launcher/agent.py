"""This agent's presence in the rendezvous store: one thread that beats, listens, joins, and gives verdicts.

Invariants:
- Only the thread talks to the store, over a connection of its own. Everybody else reads what it saw last
  (`view`) or waits for it with a deadline: a frozen store host holds up this thread and nobody else.
- What is decided is pure (rounds.py); the store's compare-and-set says which decision counts.
- A node is dead when its agent is silent for `dead_s` *and* its keeper does not answer. In a round that has
  not begun yet the agent's silence is enough: there is no training that a verdict could stop.

The rendezvous store is the arbiter: the side of a split that reaches it goes on, the other one stops. When
it is lost for good, agents stop with `no quorum` and the keepers hold the state; no new store is elected
(PROTOCOL 11 wants a strict majority for that, and it is not built). Serve the store from a machine that may
not fail with the job (`keepstep store`). One that comes back empty is told by a member where the job stands.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from keepstep.control.membership import SECRET_BYTES, NodeClaim, agree, newest_members
from keepstep.control.messages import NodeCard
from keepstep.launcher.probe import PROBE_S, answers
from keepstep.launcher.round_document import RoundDocument, Store
from keepstep.launcher.rounds import (
    AgentId,
    RoundRules,
    RoundState,
    SilenceTimer,
    arrive,
    begin,
    choose,
    end_round,
    heard,
    late,
    leave,
    reopen,
    watched,
)

STANDING_S, JOINING_S = 0.5, 0.1  # between two looks at the store: while workers run, while they wait for a round
DUPLICATE_S = 10.0  # how long the agent that spoke for this node before may take to end
END_S = 6.0  # for the thread to come back from the store
NEVER = 1 << 62
CROWD = 32  # with more of them everybody looks less often: the store has to answer them all
DECIDERS = 3  # of the living candidates the first few may begin a round: enough, and no storm of writes

log = logging.getLogger("keepstep.launcher")
T = TypeVar("T")


class StoreLostError(Exception):
    """The rendezvous store has not answered for too long."""


class ClosedError(Exception):
    """The job is over."""


class RoundEndedError(Exception):
    """The round was ended before it began."""


class DuplicateError(Exception):
    """Another living agent speaks for the same node."""


@dataclass(frozen=True)
class JoinRequest:
    """The agent wants a place: what it brings, and its keeper's list of members."""

    known: NodeClaim
    members: list[NodeCard]


@dataclass(frozen=True)
class SeatedAgent:
    """The agent has a place. `begun`: its workers run."""

    board: RoundState
    """as it was when the place was given"""
    rank: int
    begun: bool
    since: float

    @property
    def round(self) -> int:
        return self.board.round


@dataclass(frozen=True)
class RoundView:
    """What the thread saw last, and when."""

    board: RoundState = field(default_factory=RoundState)
    at: float = field(default_factory=time.monotonic)
    missing: str = ""
    """what a joining agent waits for"""
    duplicate: bool = False


class RendezvousAgent:
    def __init__(self, node_id: str, rules: RoundRules, *, connect: Callable[[], Store], store_s: float) -> None:
        self.seat = AgentId(f"{node_id}/{secrets.token_hex(6)}", node_id)
        self.view = RoundView()
        self._rules, self._connect, self._store_s = rules, connect, store_s
        self._wish: JoinRequest | SeatedAgent | None = None
        self._member: SeatedAgent | None = None
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[Callable[[Store], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._attend, name="keepstep-attendance", daemon=True)
        self._ended = False
        # The thread's own
        self._card = ""
        self._document = RoundDocument()
        self._silences, self._listened = SilenceTimer(), time.monotonic()
        self._enough_since = 0.0
        self._asked_in = NEVER
        self._probed: dict[str, float] = {}
        self._complained = float("-inf")
        self._was_open = False

    # For the agent's thread

    def join(self, known: NodeClaim, members: list[NodeCard], *, timeout_s: float) -> SeatedAgent:
        """Wait for a place. A spare waits as long as a round stands."""
        with self._changed:
            self._asked_in = NEVER
            self._wish = JoinRequest(known, members)
            self.view = RoundView(self.view.board)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()
        try:
            return self._wait_for_place(timeout_s)
        except BaseException:
            self._wish = None
            raise

    def _wait_for_place(self, timeout_s: float) -> SeatedAgent:
        begun = single = time.monotonic()
        said = ""
        while True:
            with self._changed:
                self._changed.wait(1.0)
            view, wish, now = self.view, self._wish, time.monotonic()
            if isinstance(wish, SeatedAgent):
                return wish
            self._raise_if_lost()
            single = single if view.duplicate else now
            if now - single > DUPLICATE_S:
                raise DuplicateError(f"another living agent speaks for node {self.seat.node_id!r}")
            if view.board.closed and self._was_open:
                raise ClosedError("the job is over")
            if view.board.stands:  # a spare: nothing is wrong with that, for however long
                begun = now
            if view.missing != said:
                said = view.missing
                log.info("no round yet: %s", said)
            if now - begun > timeout_s:
                raise TimeoutError(f"no round began within {timeout_s:g} s: {said or 'nobody else is here'}")

    def run(self, call: Callable[[Store], T], *, timeout_s: float) -> T:
        """Have the thread do something with the store."""
        future: Future[T] = Future()

        def answer(store: Store) -> None:
            try:
                future.set_result(call(store))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(answer)
        with self._changed:
            self._changed.notify_all()
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise StoreLostError(f"the rendezvous store did not answer within {timeout_s:g} s") from None

    def gather(self, keys: list[str], *, timeout_s: float) -> list[bytes]:
        """Wait until the members of this agent's round have written all of these."""
        deadline = time.monotonic() + timeout_s
        while not self.run(lambda store: store.check(keys), timeout_s=self._store_s):
            if self.view.board.closed:
                raise ClosedError("the job is over")
            if reason := self.why_ended():
                raise RoundEndedError(reason)
            if time.monotonic() > deadline:
                raise RoundEndedError(f"not all nodes were ready within {timeout_s:g} s")
            self._raise_if_lost()
            time.sleep(JOINING_S / 2 * max(1.0, len(keys) / CROWD))
        return self.run(lambda store: store.multi_get(keys), timeout_s=self._store_s)

    def begun(self) -> None:
        """All members are ready: from now on it takes more than a silent agent to end the round."""
        with self._changed:
            if isinstance(wish := self._wish, SeatedAgent):
                self._wish = SeatedAgent(wish.board, wish.rank, True, time.monotonic())

    def give_up(self, round_: int, reason: str) -> None:
        """This member cannot go on with a round that all others may be waiting in."""
        self.run(
            lambda store: self._document.update(store, lambda board: end_round(board, round_, reason)),
            timeout_s=self._store_s,
        )

    def why_ended(self) -> str:
        """Why the round that this agent last had a place in is over, "" while it stands."""
        board, member = self.view.board, self._member
        if member is None or not board.members:
            return ""  # an empty store is one that has forgotten: no reason to stop anybody
        if board.agreement == member.board.agreement:
            return board.broken
        return f"the job has gone on without this node, in round {board.round}"

    def publish_card(self, known: NodeClaim) -> None:
        """This node's keeper has another address now. Nobody waits for it: it serves later verdicts only."""
        self._calls.put(lambda store: self._put_card(store, known))

    def end(self, *, close: bool, timeout_s: float) -> bool:
        """Stop attending. Whether the others could be told."""
        told = self._thread.ident is None
        try:
            if not told:
                with self._changed:
                    self._wish = None
                self.run(
                    lambda store: self._document.update(
                        store, lambda board: leave(board, self.seat.agent, close=close)
                    ),
                    timeout_s=timeout_s,
                )
            told = True
        except (StoreLostError, RuntimeError, ValueError) as error:
            log.warning("the rendezvous could not be closed: %s", _first_line(error))
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            # A thread that comes out of torch's C++ while the interpreter ends would abort the process.
            self._thread.join(END_S)
        return told

    def _raise_if_lost(self) -> None:
        if (silent_s := time.monotonic() - self.view.at) > self._store_s:
            raise StoreLostError(f"the rendezvous store has not answered for {silent_s:.0f} s")

    # The thread

    def _attend(self) -> None:
        store: Store | None = None
        while not self._ended:
            try:
                if store is None:
                    store = self._connect()
                    self._document.doubt()
                    if self._card:  # it may be a new store that knows nobody
                        store.set(f"card/{self.seat.agent}", self._card)
                self._look(store)
                while not self._calls.empty():
                    self._calls.get()(store)
            except (RuntimeError, ValueError, OSError, msgspec.DecodeError) as error:
                if store is not None:
                    log.warning("the rendezvous store does not answer: %s", _first_line(error))
                store = None
            with self._changed:
                self._changed.wait_for(lambda: self._ended or not self._calls.empty(), self._pause_s(store))

    def _pause_s(self, store: Store | None) -> float:
        if store is None:
            return JOINING_S
        board = self.view.board
        crowd = max(1.0, (len(board.members) + len(board.waiting)) / CROWD)
        return min(STANDING_S, JOINING_S * crowd) if self._hurried else STANDING_S

    @property
    def _hurried(self) -> bool:
        wish = self._wish
        return isinstance(wish, JoinRequest) or (isinstance(wish, SeatedAgent) and not wish.begun)

    def _look(self, store: Store) -> None:
        store.add(f"beat/{self.seat.agent}", 1)
        wish = self._wish
        board = self._document.read(store)
        missing, duplicate = "", False
        if isinstance(wish, SeatedAgent):
            self._listen(store, [*watched(board, wish.rank), *board.waiting])
            board = self._watch(store, board, wish)
        elif isinstance(wish, JoinRequest):
            self._listen(store, heard(board, self.seat, dead=self._dead))
            board, missing, duplicate = self._seek(store, board, wish)
        self.view = RoundView(board, missing=missing, duplicate=duplicate)
        with self._changed:
            self._changed.notify_all()

    def _listen(self, store: Store, them: list[AgentId]) -> None:
        agents = list({seat.agent for seat in them} - {self.seat.agent})
        keys = [f"beat/{agent}" for agent in agents]
        if not keys:
            counts: list[int] = []
        elif store.check(keys):
            counts = [int(count) for count in store.multi_get(keys)]
        else:  # the store has forgotten some of them
            counts = [store.add(key, 0) for key in keys]
        now = time.monotonic()
        elapsed_s = min(now - self._listened, 2 * STANDING_S)
        self._listened = now
        self._silences.hear(dict(zip(agents, counts, strict=True)), elapsed_s)

    def _dead(self, seat: AgentId) -> bool:
        return seat.agent != self.seat.agent and self._silences.silent_s(seat.agent) >= self._rules.dead_s

    # Seeking a place

    def _seek(self, store: Store, board: RoundState, wish: JoinRequest) -> tuple[RoundState, str, bool]:
        rank = board.rank(self.seat.agent)
        if board.closed and not self._was_open:
            if not all(self._dead(seat) for seat in [*board.members, *board.waiting] if seat.agent != self.seat.agent):
                return board, "the agents of a job that is over are still there", False
            board = self._document.write(store, reopen(board)) or board
        if board.closed:
            return board, "", False
        self._was_open = True
        if board.stands and rank is not None and board.round > self._asked_in:
            with self._changed:
                self.view = RoundView(board)  # first: `why_ended` compares the two
                self._wish = self._member = SeatedAgent(board, rank, False, time.monotonic())
            return board, "", False
        if self.seat not in board.waiting:
            return self._ask(store, board, wish)
        if board.stands:
            self._enough_since = 0.0
            return board, f"round {board.round} is full and stands; this node is a spare", False
        return *self._decide(store, board), False

    def _ask(self, store: Store, board: RoundState, wish: JoinRequest) -> tuple[RoundState, str, bool]:
        namesakes = [
            seat
            for seat in {*board.members, *board.waiting}
            if seat.node_id == self.seat.node_id and seat.agent != self.seat.agent and not self._dead(seat)
        ]
        if namesakes:
            alive = any(self._silences.moved(seat.agent) for seat in namesakes)
            return board, "the agent that spoke for this node before may still live", alive
        agent = self.seat.agent
        store.set(f"members/{agent}", msgspec.json.encode(wish.members).decode())
        self._put_card(store, wish.known)
        written = self._document.write(store, arrive(board, self.seat))
        if written is not None:
            self._asked_in, self._enough_since = written.round, 0.0
        return written or board, "", False

    def _put_card(self, store: Store, known: NodeClaim) -> None:
        self._card = msgspec.json.encode(known).decode()
        store.set(f"card/{self.seat.agent}", self._card)

    def _decide(self, store: Store, board: RoundState) -> tuple[RoundState, str]:
        """Begin the next round if this agent is one of those that may, and if it is time."""
        living = [seat for seat in board.waiting if not self._dead(seat)]
        alive = {seat.agent for seat in [*board.members, *board.waiting] if not self._dead(seat)}
        if self.seat not in living[:DECIDERS]:
            return board, f"{len(living)} nodes are here"
        keys = [f"card/{seat.agent}" for seat in living]
        if not store.check(keys):
            return board, "the store has forgotten who is here"
        known = {
            seat.agent: msgspec.json.decode(text, type=NodeClaim)
            for seat, text in zip(living, store.multi_get(keys), strict=True)
        }
        best = newest_members(known)
        last = msgspec.json.decode(store.get(f"members/{best}"), type=list[NodeCard]) if best else []
        now = time.monotonic()
        if len(living) < self._rules.min_nodes or late(board, alive):
            self._enough_since = 0.0
        elif not self._enough_since:
            self._enough_since = now
        waited_s = now - self._enough_since if self._enough_since else 0.0
        members, reason = choose(board, self._rules, alive=alive, known=known, last=last, waited_s=waited_s)
        if not members:
            return board, reason
        nonce, secret = secrets.randbits(63), secrets.token_bytes(SECRET_BYTES)
        agreement = agree([known[seat.agent] for seat in members], last, nonce=nonce, secret=secret)
        key = f"agreement/{board.round + 1}.{nonce:x}"
        store.set(key, msgspec.json.encode(agreement).decode())
        written = self._document.write(store, begin(board, members, key, alive))
        if written is not None:
            log.info("round %d begins: %s", written.round, reason)
        return written or board, reason

    # Watching a round

    def _watch(self, store: Store, board: RoundState, member: SeatedAgent) -> RoundState:
        if not board.members:
            # The store came back empty. Members know where the job stands, and one of them says so.
            remembered = msgspec.structs.replace(member.board, waiting=board.waiting)
            return self._document.write(store, remembered) or board
        if board.agreement != member.board.agreement or not board.stands:
            return board
        for seat in watched(board, member.rank):
            if self._dead(seat) and (reason := self._verdict(store, seat, member)):
                log.warning("verdict: %s", reason)
                return self._document.write(store, end_round(board, member.round, reason)) or board
        room = self._rules.max_nodes - len(board.members)
        if member.rank == 0 and member.begun and room > 0:
            ready = [seat for seat in board.waiting if not self._dead(seat)]
            if ready and time.monotonic() - member.since > self._rules.settle_s:
                reason = f"node {ready[0].node_id} is invited into a free place"
                return self._document.write(store, end_round(board, member.round, reason)) or board
        return board

    def _verdict(self, store: Store, seat: AgentId, member: SeatedAgent) -> str:
        """Why a node is dead, or "" when its keeper lives."""
        silent = f"node {seat.node_id} is lost: its agent is silent for {self._silences.silent_s(seat.agent):.1f} s"
        if not member.begun:
            return silent
        now, key = time.monotonic(), f"card/{seat.agent}"
        if now - self._probed.get(seat.agent, 0.0) < PROBE_S:
            return ""
        self._probed[seat.agent] = now
        if not store.check([key]):
            return ""  # the store is a new one, and this agent never spoke to it: one sign is missing
        card = msgspec.json.decode(store.get(key), type=NodeClaim).card
        if answers(card):
            if now - self._complained > 60:
                self._complained = now
                log.warning("the agent of node %s is silent, its keeper answers: training goes on", seat.node_id)
            return ""
        return f"{silent}, and its keeper does not answer at {card.address}:{card.port}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
