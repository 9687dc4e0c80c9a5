"""This agent's presence in the rendezvous store: a thread with a connection of its own, and what others ask of it.

Invariants:
- Only the thread uses the store. Others read the result of its last visit (`view`) or wait for the thread with a
  deadline: a store host that hangs holds up this thread and nothing else.
- The rendezvous store is the arbiter: the side of a network split that reaches it goes on, the other one stops. When
  it is lost for good, agents stop with `no quorum` and the keepers hold the state; no new store is elected (that would
  need a strict majority, and is not built). Serve the store from a machine that does not fail with the job
  (`keepstep store`). After a store has come back empty, a member writes the state of the round again.

round_participant.py says what a visit does. rendezvous.py calls from torch's agent thread.
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
from typing import TypeVar

import msgspec

from keepstep.control.membership import NodeClaim, RoundAgreement
from keepstep.control.messages import NodeCard
from keepstep.control.signed_store import SignedStore
from keepstep.launcher.round_document import REREAD_S
from keepstep.launcher.round_participant import JoinRequest, RoundMember, RoundParticipant, RoundView
from keepstep.launcher.rounds import AgentId, RoundRules, RoundState, end_round, withdraw

RUNNING_PAUSE_S = 0.5  # between two visits to the store while workers run
JOINING_PAUSE_S = 0.1  # and while they wait for a round
DUPLICATE_S = 10.0  # An earlier agent of this node may take so long to end.
FOREIGN_S = 30.0  # An agent without a round before waits so long among documents that do not verify.
CLOSE_S = 6.0  # for the thread to return from the store
MANY_AGENTS = 32  # With more of them each visits less often, because one store answers all of them.

log = logging.getLogger("keepstep.launcher")
T = TypeVar("T")


class StoreLostError(Exception):
    """The rendezvous store has not answered for too long."""


class ClosedError(Exception):
    """The job is over."""


class RoundEndedError(Exception):
    """The round was ended before it began."""


class ForeignDocumentsError(Exception):
    """Other agents sign with another secret, or somebody else writes into the store."""


class DuplicateError(Exception):
    """Another agent of the same node is alive."""


class RendezvousAgent:
    """Joins rounds, keeps the place of this node, and reports when a round is over."""

    def __init__(self, node_id: str, rules: RoundRules, *, connect: Callable[[], SignedStore], store_s: float) -> None:
        """`connect`: a new connection to the store. `store_s`: how long the store may take to answer."""
        self.agent = AgentId(f"{node_id}/{secrets.token_hex(6)}", node_id)
        self.view = RoundView()
        self._connect, self._store_s = connect, store_s
        self._wish: JoinRequest | RoundMember | None = None
        self._member: RoundMember | None = None
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[Callable[[SignedStore], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._visit_store, name="keepstep-rendezvous", daemon=True)
        self._ended = False
        self._participant = RoundParticipant(self.agent, rules)  # Used by the thread, but for `was_open`.

    def join(self, claim: NodeClaim, members: list[NodeCard], *, timeout_s: float) -> RoundMember:
        """Wait for a place in a round. A spare waits for as long as a round stands."""
        with self._changed:
            self._wish = JoinRequest(claim, members)
            self.view = RoundView(self.view.state)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()
        try:
            return self._wait_for_place(timeout_s)
        except BaseException:
            self._wish = None
            raise

    def _wait_for_place(self, timeout_s: float) -> RoundMember:
        started = single_at = clean_at = ignored_at = time.monotonic()
        missing, ignored = "", 0
        while True:
            with self._changed:
                self._changed.wait(1.0)
            view, wish, now = self.view, self._wish, time.monotonic()
            if isinstance(wish, RoundMember):
                return wish
            self._raise_if_lost()
            single_at = single_at if view.duplicate else now
            if now - single_at > DUPLICATE_S:
                raise DuplicateError(f"another agent of node {self.agent.node_id!r} is alive")
            if view.ignored != ignored:
                ignored, ignored_at = view.ignored, now
            clean_at = now if now - ignored_at > 2 * REREAD_S or self._member is not None else clean_at
            if now - clean_at > FOREIGN_S and ignored:
                raise ForeignDocumentsError(
                    f"{ignored} documents of this run in the rendezvous store do not verify, the last one "
                    f"{view.last_ignored}"
                )
            if view.state.closed and self._participant.was_open:
                raise ClosedError("the job is over")
            if view.state.stands:  # A spare may wait for any time.
                started = now
            if view.missing != missing:
                missing = view.missing
                log.info("no round yet: %s", missing)
            if now - started > timeout_s:
                raise TimeoutError(f"no round began within {timeout_s:g} s: {missing or 'no other node is waiting'}")

    def run(self, call: Callable[[SignedStore], T], *, timeout_s: float) -> T:
        """Run a call on the thread, with its connection to the store."""
        future: Future[T] = Future()

        def run(store: SignedStore) -> None:
            try:
                future.set_result(call(store))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        with self._changed:
            self._changed.notify_all()
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise StoreLostError(f"the rendezvous store did not answer within {timeout_s:g} s") from None

    def read_agreement(self, member: RoundMember, *, timeout_s: float) -> RoundAgreement:
        """The agreement of this member's round. A round that has lost it is over."""
        key = member.state.agreement
        agreed = self.run(lambda store: store.read_as([key], RoundAgreement)[0], timeout_s=timeout_s)
        if agreed is None:
            self.end_round(member.round, reason := "the store has lost the agreement of the round")
            raise RoundEndedError(reason)
        return agreed

    def wait_for_documents(self, keys: list[str], *, timeout_s: float) -> list[str]:
        """Wait until the members of this agent's round have written all of these, and return their texts."""
        deadline = time.monotonic() + timeout_s
        while True:
            documents = self.run(
                lambda store: store.read(keys) if store.raw.check(keys) else [], timeout_s=self._store_s
            )
            texts = [document.text for document in documents if document is not None]
            if len(texts) == len(keys):
                return texts
            if self.view.state.closed:
                raise ClosedError("the job is over")
            if reason := self.end_reason():
                raise RoundEndedError(reason)
            if time.monotonic() > deadline:
                raise RoundEndedError(f"not all nodes were ready within {timeout_s:g} s")
            self._raise_if_lost()
            time.sleep(JOINING_PAUSE_S / 2 * max(1.0, len(keys) / MANY_AGENTS))

    def workers_started(self) -> None:
        """All members are ready: from now on a silent agent alone does not end the round."""
        with self._changed:
            if isinstance(wish := self._wish, RoundMember):
                self._wish = RoundMember(wish.state, wish.rank, True, time.monotonic())

    def end_round(self, round_: int, reason: str) -> None:
        """End a round that this node cannot go on with, so that the others do not wait for it."""
        self._update(lambda state: end_round(state, round_, reason), timeout_s=self._store_s)

    def end_reason(self) -> str:
        """Why the last round in which this agent had a place is over; "" while it stands."""
        state, member = self.view.state, self._member
        if member is None or not state.members:
            return ""  # An empty store has lost its content: that ends no round.
        if state.agreement == member.state.agreement:
            return state.broken
        return f"the job has gone on without this node, in round {state.round}"

    def publish_claim(self, claim: NodeClaim) -> None:
        """Publish the new address of this node's keeper. Does not wait: only later verdicts use it."""
        self._calls.put(lambda store: self._participant.put_claim(store, claim))

    def close(self, *, close_job: bool, timeout_s: float) -> bool:
        """Leave the rendezvous. Returns whether the store was reached; `close_job` ends the job for all nodes."""
        reached = self._thread.ident is None
        try:
            if not reached:
                with self._changed:
                    self._wish = None
                self._update(lambda state: withdraw(state, self.agent.agent, close=close_job), timeout_s=timeout_s)
            reached = True
        except (StoreLostError, RuntimeError, ValueError) as error:
            log.warning("the rendezvous could not be closed: %s", _first_line(error))
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            # A thread that returns from torch's C++ code while the interpreter ends would abort the process.
            self._thread.join(CLOSE_S)
        return reached

    def _update(self, change: Callable[[RoundState], RoundState], *, timeout_s: float) -> None:
        self.run(lambda store: self._participant.document.update(store, change), timeout_s=timeout_s)

    def _raise_if_lost(self) -> None:
        if (silent_s := time.monotonic() - self.view.at) > self._store_s:
            raise StoreLostError(f"the rendezvous store has not answered for {silent_s:.0f} s")

    # The thread

    def _visit_store(self) -> None:
        store: SignedStore | None = None
        while not self._ended:
            try:
                if store is None:
                    store = self._connect()
                    self._participant.reconnected(store)
                self._visit(store)
                while not self._calls.empty():
                    self._calls.get()(store)
            except (RuntimeError, ValueError, OSError, msgspec.DecodeError) as error:
                if store is not None:
                    log.warning("the rendezvous store does not answer: %s", _first_line(error))
                store = None
            with self._changed:
                self._changed.wait_for(lambda: self._ended or not self._calls.empty(), self._pause_s(store))

    def _visit(self, store: SignedStore) -> None:
        wish = self._wish
        view = self._participant.visit(store, wish)
        with self._changed:
            self.view = view  # Before `_member`: `end_reason` compares the two.
            if view.place is not None and self._wish is wish:
                self._wish = self._member = view.place
            self._changed.notify_all()

    def _pause_s(self, store: SignedStore | None) -> float:
        if store is None:
            return JOINING_PAUSE_S
        state = self.view.state
        factor = max(1.0, (len(state.members) + len(state.waiting)) / MANY_AGENTS)
        return min(RUNNING_PAUSE_S, JOINING_PAUSE_S * factor) if self._is_joining else RUNNING_PAUSE_S

    @property
    def _is_joining(self) -> bool:
        wish = self._wish
        return isinstance(wish, JoinRequest) or (isinstance(wish, RoundMember) and not wish.begun)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
