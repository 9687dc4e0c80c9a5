"""The trainer's connection to its keeper, with reconnection to a new keeper when the first one dies.

Training goes on without a keeper: the trainer uses the grants that it has, then skips. A thread starts a keeper again
(the keeper's own lock lets only one live), gives back every memfd that this process holds, registers under the
incarnation that it already has, and sends again the outcomes that the dead keeper may not have received. A forked child
of the trainer (data-loader workers) closes all of it at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from keepstep.config import Config
from keepstep.control.client import REQUEST_S, RESTORE_S, KeeperClient, NoAnswerError
from keepstep.control.held_memory import HeldMemory
from keepstep.control.messages import (
    Committed,
    Complete,
    Done,
    Ending,
    Failed,
    Goodbye,
    Held,
    Hold,
    Loaded,
    Membership,
    Protected,
    Register,
    Registered,
    StatusIs,
    Void,
    Voided,
    WantStatus,
)  # fmt: skip
from keepstep.control.spawn import START_S, lease_of, start_keeper
from keepstep.control.status import decode_status
from keepstep.errors import Error, IntegrityError, KeeperError, RecoveryError, restart_cures
from keepstep.identity import ForeignDirectoryError, Identity
from keepstep.trainer.connection.agreement import meet_if_needed
from keepstep.trainer.connection.environment import RankPlace, registration
from keepstep.trainer.connection.exit_watch import ExitWatch
from keepstep.types import Incarnation, Status, TakeCounts, Version

log = logging.getLogger("keepstep")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
# Who waits for another process of this node to start the keeper, waits this long. A start takes 0.2 s of a core, and
# every further process that starts one takes it from the first.
PATIENCE_S = 2.0
MAX_OUTCOMES = 4  # Outcomes of grants that may still be open: at most one per slot.
MAX_FAILURE_CHARS = 2000  # of the text of an error that the keeper shows
M = TypeVar("M")

_links: weakref.WeakSet[KeeperLink] = weakref.WeakSet()


@dataclass
class RankState:
    """How far this rank is: sent with the registration to a keeper that replaces a dead one.

    Written by the Snapshotter (`step`, `takes`), RankArena (`arena_id`) and KeeperLink (`restored`). Any thread may
    read it.
    """

    step: int = -1  # Step of the last `take` that has ended, captured or not.
    arena_id: str = ""  # The arena that the keeper grants in, although this rank may still be mapping it.
    takes: TakeCounts = field(default_factory=TakeCounts)  # How its takes ended.
    restored: bool = False  # Past restore(): from here on the keeper's death must not disturb training.


class LinkListener(Protocol):
    """Receives what the keeper reports without being asked. Called from the link's threads."""

    def complete(self, message: Complete) -> None:
        """A version is complete on all ranks."""

    def protected(self, message: Protected) -> None:
        """A version survives the loss of a node."""

    def voided_elsewhere(self, message: Voided) -> None:
        """A version is void, because of another rank or of the keeper's own checks."""

    def arena_refused(self) -> None:
        """A new keeper did not accept the arena that this rank writes."""


class KeeperLink:
    """Registered with the keeper of this node for as long as it is open."""

    def __init__(
        self,
        identity: Identity,
        config: Config,
        register: Register,
        state: RankState,
        membership: Membership | None = None,
    ) -> None:
        """`membership`: given where this trainer, and no launcher, introduces the keeper to its peers."""
        self.identity, self.config = identity, config
        self._register, self._state = register, state
        self._listener: LinkListener | None = None
        self._incarnation: Incarnation | None = None
        self._client: KeeperClient | None = None  # Set once it is registered.
        self._refused = False  # The last attempt failed because the keeper refused it, not because there was none.
        self._reconnecting = False
        self._changing = threading.RLock()
        self._closed = threading.Event()
        self.ended = ""  # Why the keeper ended on purpose: no trainer starts another one.
        # Oldest first: outcomes that a new keeper must receive again.
        self._outcomes: list[Committed | Void] = []
        self._exit_watch: ExitWatch | None = None
        self._failure = ""  # The class of the error that this trainer ends with.
        self.memory = HeldMemory(membership, request_timeout_s=REQUEST_S)

    @classmethod
    def for_trainer(cls, identity: Identity, config: Config, place: RankPlace, state: RankState) -> KeeperLink:
        """Make the link of this process; where they must, the trainers of all nodes agree on an incarnation first."""
        agreed = meet_if_needed(identity, config, place)
        register = registration(config, place, agreed.incarnation if agreed else None)
        return cls(identity, config, register, state, agreed.membership if agreed else None)

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation of the job that this trainer belongs to, for as long as it lives."""
        assert self._incarnation is not None, "connect() comes first"
        return self._incarnation

    def listen(self, listener: LinkListener) -> None:
        """Receive what the keeper reports from now on: of snapshots, so before the first one."""
        self._listener = listener

    def connect(self) -> None:
        """Register with the keeper of this node, started if there is none. Raises when there is none in time."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._incarnation = self._attempt(may_start=True)
                _links.add(self)
                return
            except Error as error:
                if self._refused or isinstance(error, ForeignDirectoryError) or time.monotonic() >= deadline:
                    self._closed.set()
                    self.memory.close()
                    raise
                time.sleep(FIRST_RETRY_S)

    @property
    def up(self) -> bool:
        client = self._client
        return client is not None and not client.lost

    def request(self, message: Any, expect: type[M], *, timeout_s: float) -> tuple[M, list[int]]:
        """Send a request and return the answer. Before restore() has ended it is repeated when the keeper dies."""
        deadline = time.monotonic() + timeout_s
        while True:
            client = self._client
            try:
                if client is None or client.lost:
                    raise KeeperError("the keeper is gone", hint="it is started again by itself")
                return client.request(message, expect, timeout_s=max(0.1, deadline - time.monotonic()))
            except KeeperError:
                gone = client is None or client.lost
                if (
                    not gone
                    or self._state.restored
                    or self.ended
                    or self._closed.is_set()
                    or time.monotonic() >= deadline
                ):
                    raise
                time.sleep(FIRST_RETRY_S)

    def report_outcome(self, outcome: Committed | Void) -> None:
        """Report what became of a grant. Kept until the keeper has resolved it, and sent again to a new keeper."""
        with self._changing:
            self._outcomes = [*self._outcomes, outcome][-MAX_OUTCOMES:]
        client = self._client
        if client is not None and not client.lost:
            try:
                client.post(outcome)
            except Exception:  # Sent again when the connection is back.
                log.warning("the outcome of step %d could not be sent to the keeper", outcome.version.step)
                client.hang_up()

    def report_loaded(self, step: int | None) -> None:
        """Report that this rank is ready for the first step; returns when all ranks are."""
        self.request(Loaded(step), Done, timeout_s=RESTORE_S)
        self._state.restored = True

    def ensure_loaded(self) -> None:
        """Report that this rank starts without a version, unless it has reported already."""
        if not self._state.restored:
            self.report_loaded(None)

    def report_failure(self, error: BaseException, *, restoring: bool = False) -> None:
        """Report the error that this trainer ends with, for the launcher. Never raises.

        `restoring`: `restore()` raised it. Its traceback says so where another start would fail in the same way.
        """
        self._failure = type(error).__name__
        incurable = restoring and not restart_cures(error)
        if incurable:
            error.add_note("Restarting does not cure this: the same program will fail again.")
            if isinstance(error, RecoveryError | IntegrityError):
                error.add_note(f"`keepstep release --run-id {self.identity.run_id}` on every node gives the state up.")
        client = self._client
        if client is None or client.lost:
            return
        text = (error.message if isinstance(error, Error) else str(error))[:MAX_FAILURE_CHARS]
        with contextlib.suppress(Error):
            client.post(Failed(type(error).__name__, text, restoring=incurable))

    def status(self) -> Status:
        answer, _ = self.request(WantStatus(), StatusIs, timeout_s=REQUEST_S)
        return decode_status(answer.json)

    def close_with_program(self, owner: AbstractContextManager[object]) -> None:
        """Leave the `with` block of this link's owner when the program ends before it is closed."""
        self._exit_watch = ExitWatch(owner)

    def close(self, *, finished: bool) -> None:
        self._closed.set()
        _links.discard(self)
        if self._exit_watch is not None:
            self._exit_watch.cancel()
        with self._changing:
            client, self._client = self._client, None
        if client is not None:
            # Also after an Ending: it may have been that of the keeper before this one.
            if not client.lost:
                with contextlib.suppress(Error):
                    # No answer is expected: the last rank's goodbye ends the keeper.
                    client.post(Goodbye(finished))
            client.close()
            if not finished:
                self._log_kept_state()
        self.memory.close()

    def _log_kept_state(self) -> None:
        """Log what an end that was not the end of training leaves behind."""
        named = self.identity.outlives_launch
        if self._register.rank != 0 or self.ended or (named and self._state.step < 0):
            return
        cause = {"": "close(finished=False)", "SystemExit": "sys.exit"}.get(self._failure, self._failure)
        run_id, lease_s = self.identity.run_id, lease_of(self.identity, self.config)
        found = "The next start of the run restores it" if named else "It has no id, so that no later launch finds it"
        log.warning(
            "ended by %s, not finished: the keeper of run %r keeps its last complete step, and %g s longer than the "
            "job's last process. %s; `keepstep release --run-id %s` frees it",
            cause, run_id, lease_s, found, run_id,
        )  # fmt: skip

    def close_in_forked_child(self) -> None:
        """Close everything in a forked child: it must neither keep the memory nor pass for a living trainer."""
        if self._client is not None:
            self._client.close_in_forked_child()
        self.memory.close_in_forked_child()
        self._closed.set()

    # Connecting and reconnecting

    def _attempt(self, *, may_start: bool) -> Incarnation:
        """Connect, give back the memory, register; other threads use the connection only after that."""
        self._refused = False
        try:
            client = self._dial()
        except KeeperError as error:
            if not may_start or isinstance(error, ForeignDirectoryError):
                raise
            start_keeper(self.identity, self.config)
            client = self._dial()
        rejoin = self._state.restored
        try:
            refused = self.memory.give_back(client)
            self.memory.reintroduce(client)
            register = msgspec.structs.replace(
                self._register, rejoin=rejoin, progress=self._state.step, arena_id=self._state.arena_id
            )
            answer, _ = client.request(register, Registered, timeout_s=self._fence_timeout_s)
        except BaseException as error:
            self._refused = isinstance(error, Error) and not (client.lost or isinstance(error, NoAnswerError))
            client.close()
            raise
        # From now on this trainer belongs to this incarnation and to no other.
        self._register = msgspec.structs.replace(self._register, incarnation=answer.incarnation)
        with self._changing:
            before, self._client = self._client, client
        if before is not None:
            before.close()
        if client.lost:  # Before `_client` was set, so `on_lost` did nothing.
            raise KeeperError("the keeper is gone again", hint="it is started again by itself")
        if names := self.memory.names():
            client.post(Held(names))
        for outcome in self._outcomes if rejoin else ():
            client.post(outcome)
        if rejoin and self._state.arena_id in refused and self._listener is not None:
            self._listener.arena_refused()
        return answer.incarnation

    @property
    def _fence_timeout_s(self) -> float:
        return REQUEST_S + self.config.keeper.fence_s

    def _dial(self) -> KeeperClient:
        return KeeperClient(self.identity, "trainer", listener=self)

    def on_lost(self) -> None:
        with self._changing:
            client = self._client
            if self._closed.is_set() or self.ended or self._reconnecting or client is None or not client.lost:
                return  # Ended on purpose, or lost during an attempt, which is repeated by its caller.
            self._reconnecting = True
        log.warning("the keeper is gone; training goes on, and a new keeper is started")
        threading.Thread(target=self._reconnect, name="keepstep-rejoin", daemon=True).start()

    @property
    def _others_start_it(self) -> bool:
        """Whether the launcher or the first rank of this node starts a keeper in place of a dead one."""
        has_supervisor = not self._register.no_holder and os.getppid() == self._register.launcher_pid
        return has_supervisor or self._register.local_index > 0

    def _reconnect(self) -> None:
        pause, problem = FIRST_RETRY_S, ""
        patience = time.monotonic() + (PATIENCE_S if self._others_start_it else 0.0)
        while not self._closed.is_set() and not self.ended:
            may_start = time.monotonic() >= patience
            try:
                incarnation = self._attempt(may_start=may_start)
                log.warning("a keeper has taken over (incarnation %d goes on)", incarnation.number)
                with self._changing:
                    if self.up:
                        self._reconnecting = False
                        return
            except Exception as error:  # No other thread would try again.
                if problem != (problem := repr(error)):
                    log.info("no keeper yet: %s", problem)
                if self._refused:
                    self.ended = str(error)
                    log.error("the keeper refuses this trainer, the run is unprotected here: %s", error)
            self._closed.wait(pause)
            if may_start:  # An attempt to connect costs nothing: the keeper that another process starts is met at once.
                pause = min(2 * pause, LAST_RETRY_S)
        self._reconnecting = False

    # Messages that the keeper sends without being asked

    def on_push(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, Hold):
            self._hold(message, fds)
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Ending):
            if self._client is None:
                return  # While connecting: the keeper of a run that just ended is still exiting.
            self.ended = message.reason
            if not self._closed.is_set():
                log.warning("the keeper has ended (%s); the run is unprotected", message.reason)
        elif self._listener is not None:
            self._notify(self._listener, message)

    def _notify(self, listener: LinkListener, message: Any) -> None:
        if isinstance(message, Complete):
            self._forget_outcome(message.version)
            listener.complete(message)
        elif isinstance(message, Protected):
            listener.protected(message)
        elif isinstance(message, Voided):
            self._forget_outcome(message.version)
            listener.voided_elsewhere(message)

    def _hold(self, message: Hold, fds: list[int]) -> None:
        self.memory.apply(message, fds)
        client = self._client
        if client is not None and not client.lost:
            with contextlib.suppress(Error):
                client.post(Held(self.memory.names()))

    def _forget_outcome(self, version: Version) -> None:
        """The keeper has resolved the grant."""
        with self._changing:
            self._outcomes = [outcome for outcome in self._outcomes if outcome.version != version]


def _after_fork() -> None:
    for link in list(_links):
        link.close_in_forked_child()


os.register_at_fork(after_in_child=_after_fork)
