"""The trainer's connection to its keeper, and the way back to a new one.

When the keeper dies training goes on: the trainer uses what it was granted, then skips. A thread
starts a keeper again (the keeper's own lock lets only one live), hands back every memfd this process
holds, registers under the incarnation it already has, and says again what the old keeper may not
have heard. A forked child of the trainer (data-loader workers) closes all of it at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from keepstep.config import Config
from keepstep.control.client import REQUEST_S, RESTORE_S, KeeperClient, NoAnswerError
from keepstep.control.held_memory import HeldMemory
from keepstep.control.messages import (
    Committed,
    Complete,
    Done,
    Ending,
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
from keepstep.control.spawn import START_S, start_keeper
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.types import Incarnation, Status

log = logging.getLogger("keepstep")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
# Ranks beyond the first give it, and the launcher, this long to start the keeper: one is enough.
PATIENCE_S = 1.0
# Words of grants that may still be open: one for each slot is more than enough.
MAX_WORDS = 4
M = TypeVar("M")

_links: weakref.WeakSet[KeeperLink] = weakref.WeakSet()


@dataclass
class RankState:
    """How far this rank is: what a keeper that replaces a dead one must be told with the registration.

    Written by the Snapshotter (`step`), RankArena (`arena_id`) and KeeperLink (`restored`); any thread may read.
    """

    step: int = -1  # Step of the last `take` that has ended, captured or not.
    arena_id: str = ""  # The arena that the keeper grants in, although this rank may still be mapping it.
    restored: bool = False  # Past restore(): from here on the keeper's death must not disturb training.


@dataclass(frozen=True)
class Listeners:
    """What the snapshotter wants to hear. Called from the link's threads."""

    complete: Callable[[Complete], None]
    protected: Callable[[Protected], None]
    voided: Callable[[Voided], None]
    arena_refused: Callable[[], None] = lambda: None
    """the memory that this trainer writes was not taken back by the new keeper"""


class KeeperLink:
    """Registered with the keeper of this node for as long as it is open."""

    def __init__(
        self,
        identity: Identity,
        config: Config,
        register: Register,
        state: RankState,
        listeners: Listeners,
        membership: Membership | None = None,
    ) -> None:
        """`membership`: given where this trainer, and no launcher, introduces the keeper to its peers."""
        self.identity, self.config = identity, config
        self._register, self._state, self._listeners = register, state, listeners
        self._incarnation: Incarnation | None = None
        self._client: KeeperClient | None = None
        """registered; who only dials is not here yet"""
        self._refused = False
        """whether the last attempt failed by the keeper's own word, and not by its absence"""
        self._coming_back = False
        self._changing = threading.RLock()
        self._closed = threading.Event()
        self.ended = ""
        """why the keeper ended on purpose: nobody starts another one"""
        self._words: list[Committed | Void] = []
        """oldest first: what a new keeper must be told again"""
        self.memory = HeldMemory(membership, request_timeout_s=REQUEST_S)

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation of the job that this trainer belongs to, for as long as it lives."""
        assert self._incarnation is not None, "connect() comes first"
        return self._incarnation

    def connect(self) -> None:
        """Register with the keeper of this node, started if there is none. Raises when there is none in time."""
        deadline = time.monotonic() + START_S
        while True:
            self.ended = ""  # The keeper of a run that just ended may still be exiting.
            try:
                self._incarnation = self._attempt(may_start=True)
                self.ended = ""  # Its Ending may arrive when the next keeper has answered already.
                _links.add(self)
                return
            except Error:
                if self._refused or time.monotonic() >= deadline:
                    self._closed.set()
                    self.memory.close()
                    raise
                time.sleep(FIRST_RETRY_S)

    @property
    def up(self) -> bool:
        client = self._client
        return client is not None and not client.lost

    def request(self, message: Any, expect: type[M], *, timeout_s: float) -> tuple[M, list[int]]:
        """Ask the keeper; while restoring, ask again when it dies meanwhile."""
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

    def say(self, word: Committed | Void) -> None:
        """Report the outcome of a grant. Kept until the keeper has resolved it, and said again if it died."""
        with self._changing:
            self._words = [*self._words, word][-MAX_WORDS:]
        client = self._client
        if client is not None and not client.lost:
            try:
                client.post(word)
            except Exception:  # said again when the connection is back
                log.warning("the keeper could not be told about step %d", word.version.step)
                client.hang_up()

    def report_loaded(self, step: int | None) -> None:
        """Report that this rank is ready for the first step; returns when all ranks are."""
        self.request(Loaded(step), Done, timeout_s=RESTORE_S)
        self._state.restored = True

    def status(self) -> Status:
        answer, _ = self.request(WantStatus(), StatusIs, timeout_s=REQUEST_S)
        return msgspec.json.decode(answer.json, type=Status)

    def close(self, *, finished: bool) -> None:
        self._closed.set()
        _links.discard(self)
        with self._changing:
            client, self._client = self._client, None
        if client is not None:
            # Whatever was heard of an end: it may have been that of the keeper before this one.
            if not client.lost:
                with contextlib.suppress(Error):
                    # No answer is awaited: the last rank's goodbye ends the keeper.
                    client.post(Goodbye(finished))
            client.close()
        self.memory.close()

    def close_in_forked_child(self) -> None:
        """The child must neither keep the memory nor look like a living trainer."""
        if self._client is not None:
            self._client.close_in_forked_child()
        self.memory.close_in_forked_child()
        self._closed.set()

    # Connecting and reconnecting

    def _attempt(self, *, may_start: bool) -> Incarnation:
        """Dial, give back, register; only then others may use the connection."""
        self._refused = False
        try:
            client = self._dial()
        except KeeperError:
            if not may_start:
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
        if client.lost:  # before it was ours: nobody was told
            raise KeeperError("the keeper is gone again", hint="it is started again by itself")
        if names := self.memory.names():
            client.post(Held(names))
        for word in self._words if rejoin else ():
            client.post(word)
        if rejoin and self._state.arena_id in refused:
            self._listeners.arena_refused()
        return answer.incarnation

    @property
    def _fence_timeout_s(self) -> float:
        return REQUEST_S + self.config.keeper.fence_s

    def _dial(self) -> KeeperClient:
        return KeeperClient(self.identity, "trainer", on_push=self._pushed, on_lost=self._lost)

    def _lost(self) -> None:
        with self._changing:
            client = self._client
            if self._closed.is_set() or self.ended or self._coming_back or client is None or not client.lost:
                return  # ended on purpose, or it was an attempt of somebody who tries again
            self._coming_back = True
        log.warning("the keeper is gone; training goes on, and a new keeper is started")
        threading.Thread(target=self._come_back, name="keepstep-rejoin", daemon=True).start()

    def _come_back(self) -> None:
        pause = FIRST_RETRY_S
        patience = time.monotonic() + (PATIENCE_S if self._register.local_index else 0.0)
        while not self._closed.is_set() and not self.ended:
            try:
                incarnation = self._attempt(may_start=time.monotonic() >= patience)
                log.warning("a keeper has taken over (incarnation %d goes on)", incarnation.number)
                with self._changing:
                    if self.up:
                        self._coming_back = False
                        return
            except Exception as error:  # whatever it was: nobody else would try again
                log.info("no keeper yet: %r", error)
                if self._refused:
                    self.ended = str(error)
                    log.error("the keeper refuses this trainer, the run is unprotected here: %s", error)
            self._closed.wait(pause)
            pause = min(2 * pause, LAST_RETRY_S)
        self._coming_back = False

    # What the keeper says unasked

    def _pushed(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, Hold):
            self.memory.apply(message, fds)
            client = self._client
            if client is not None and not client.lost:
                with contextlib.suppress(Error):
                    client.post(Held(self.memory.names()))
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Complete):
            self._settle(message.version)
            self._listeners.complete(message)
        elif isinstance(message, Protected):
            self._listeners.protected(message)
        elif isinstance(message, Voided):
            self._settle(message.version)
            self._listeners.voided(message)
        elif isinstance(message, Ending):
            self.ended = message.reason
            if not self._closed.is_set():
                log.warning("the keeper has ended (%s); the run is unprotected", message.reason)

    def _settle(self, version: Any) -> None:
        with self._changing:
            self._words = [word for word in self._words if word.version != version]


def _after_fork() -> None:
    for link in list(_links):
        link.close_in_forked_child()


os.register_at_fork(after_in_child=_after_fork)
