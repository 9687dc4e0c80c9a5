"""Supervisor of the node's keeper in the launcher: starts it, holds its memory, and restores both after its death.

Invariants:
- Only the supervisor thread connects and starts keepers; all others wait for it.
- Memory that a keeper asked to hold stays open until a keeper sends its name in `forget` or ends on purpose.
- A keeper gets LauncherHello only after everything held was given back, even if that is nothing: until then an empty
  keeper of a later incarnation does not decide that there is nothing to restore.
- A keeper that ended on purpose is not replaced before a caller needs one.
- A keeper that replaces a dead one while a round stands gets the round's Membership before LauncherHello: else it would
  act as the only node.

HeldMemory is written by the keeper (Hold, Ending) and read by nothing else: this process never maps it.
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Any, Protocol, TypeVar

from keepstep.config import Config
from keepstep.control.client import CONNECT_S, REQUEST_S, KeeperClient
from keepstep.control.held_memory import HeldMemory
from keepstep.control.membership import with_own_card
from keepstep.control.messages import (
    CardIs,
    Done,
    Ending,
    Held,
    Hold,
    LauncherHello,
    LauncherNote,
    Membership,
    OutcomeIs,
    Release,
    StatusIs,
    WantCard,
    WantOutcome,
    WantStatus,
)
from keepstep.control.spawn import start_keeper
from keepstep.control.status import decode_status
from keepstep.errors import Error, KeeperError
from keepstep.identity import ForeignDirectoryError, Identity
from keepstep.types import Status

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 2.0
SETTLED_S = 1.0  # A keeper that lived this long is not in a crash loop.
CLOSE_S = 5.0  # A keeper that does not answer delays the end of the launcher by no more than this.
SHORTEST_TIMEOUT_S = 0.1

log = logging.getLogger("keepstep.launcher")
M = TypeVar("M")


class KeeperListener(Protocol):
    """What the supervisor reports, on its own thread."""

    def keeper_moved(self, card: CardIs) -> None:
        """A keeper with another address or instance has taken over while a round stands."""


class KeeperSupervisor:
    """The connection of one launcher to its node's keeper, for as long as the launcher lives."""

    def __init__(self, identity: Identity, config: Config, *, listener: KeeperListener | None = None) -> None:
        self._identity, self._config, self._listener = identity, config, listener
        self._changed = threading.Condition()
        self._memory = HeldMemory(request_timeout_s=REQUEST_S)
        self._client: KeeperClient | None = None
        self._wanted = self._closed = False
        self._note = self._sent_note = ""
        self._failures = 0
        self._problem: Error | OSError | None = None
        self._thread = threading.Thread(target=self._supervise, name="keepstep-supervisor", daemon=True)

    def status(self, *, timeout_s: float, patient: bool) -> Status:
        """The keeper's status; one is started if none is up.

        Not patient: the first failed attempt raises. Patient: attempts go on until `timeout_s` is over.
        """
        answer = self._request(WantStatus(), StatusIs, timeout_s=timeout_s, patient=patient)
        return decode_status(answer.json)

    def card(self, *, timeout_s: float, patient: bool) -> CardIs:
        """The keeper's card; one is started if none is up."""
        return self._request(WantCard(), CardIs, timeout_s=timeout_s, patient=patient)

    def outcome(self, *, timeout_s: float) -> OutcomeIs:
        """How the last incarnation went on this node."""
        return self._request(WantOutcome(), OutcomeIs, timeout_s=timeout_s, patient=True)

    def introduce(self, membership: Membership, *, timeout_s: float) -> None:
        """Send the round's members to the keeper, and to every later one until there is a new round."""
        membership = with_own_card(membership, self.card(timeout_s=timeout_s, patient=True).card)
        self._memory.set_membership(membership)
        self._request(membership, Done, timeout_s=timeout_s, patient=True)

    def note(self, text: str) -> None:
        """A sentence for the status of this keeper and of every later one; it replaces the last one."""
        with self._changed:
            self._note, client = text, self._client
        self._send_note(client)

    def _send_note(self, client: KeeperClient | None) -> None:
        if client is not None and self._note != self._sent_note:
            self._sent_note = self._note
            with contextlib.suppress(KeeperError):
                client.post(LauncherNote(self._note))

    def _request(self, message: Any, expect: type[M], *, timeout_s: float, patient: bool) -> M:
        deadline = time.monotonic() + timeout_s
        while True:
            client = self._connected_client(deadline, patient)
            try:
                remaining_s = max(deadline - time.monotonic(), SHORTEST_TIMEOUT_S)
                return client.request(message, expect, timeout_s=remaining_s)[0]
            except KeeperError:
                if not client.lost or time.monotonic() >= deadline:
                    raise

    def largest_number(self, *, timeout_s: float, patient: bool) -> int:
        """The largest incarnation number that the keeper knows: open, or waiting for older trainers to die."""
        number = self.status(timeout_s=timeout_s, patient=patient).incarnation
        client = self._client
        return max(number, client.welcome.largest_number) if client is not None else number

    def close(self) -> None:
        """End the connection and close all memory. A keeper that holds nothing is asked to end."""
        with self._changed:
            self._closed = True
            client, self._client = self._client, None
            self._changed.notify_all()
        if client is not None:
            with contextlib.suppress(Error):
                _release_if_idle(client)
            client.close()
        self._memory.close()

    def _connected_client(self, deadline: float, patient: bool) -> KeeperClient:
        with self._changed:
            if self._closed:
                raise KeeperError("this launcher has shut down")
            if self._thread.ident is None:
                self._thread.start()
            self._wanted, failures = True, self._failures
            self._changed.notify_all()
            while self._client is None or self._client.lost:
                remaining_s = deadline - time.monotonic()
                hopeless = not patient or isinstance(self._problem, ForeignDirectoryError)
                if remaining_s <= 0 or (self._failures > failures and hopeless):
                    raise KeeperError(
                        f"this node's keeper is not up: {self._problem or 'it did not answer in time'}",
                        hint="keepstep doctor",
                    ) from self._problem
                self._changed.wait(remaining_s)
            return self._client

    # The supervisor thread

    def _supervise(self) -> None:
        delay, last_attempt = 0.0, float("-inf")
        while self._needed():
            settled = time.monotonic() - last_attempt > SETTLED_S
            delay = 0.0 if settled else min(max(2 * delay, FIRST_BACKOFF_S), LONGEST_BACKOFF_S)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=delay)
            try:
                self._connect()
            except (Error, OSError) as error:
                self._failed(error)
            last_attempt = time.monotonic()

    def _failed(self, error: Error | OSError) -> None:
        with self._changed:
            if str(error) != str(self._problem) and not self._closed:
                log.warning("the keeper of this node cannot be reached, trying again: %s", error)
            self._failures += 1
            self._problem = error
            self._changed.notify_all()

    def _needed(self) -> bool:
        """Wait until a connection is wanted and missing. False when the launcher ends."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._wanted and (self._client is None or self._client.lost))
            )
            return not self._closed

    def _connect(self) -> None:
        with self._changed:
            lost, self._client = self._client, None
        if lost is not None:
            lost.close()
        client = self._dial()
        try:
            self._memory.give_back(client)
            if (card := self._memory.reintroduce(client)) is not None and self._listener is not None:
                self._listener.keeper_moved(card)
            client.request(LauncherHello(os.getpid()), Done, timeout_s=REQUEST_S)
            with self._changed:
                if self._closed:
                    raise KeeperError("this launcher has shut down")
                self._client, self._problem = client, None
                self._changed.notify_all()
            client.post(Held(self._memory.names()))
            self._sent_note = ""
            self._send_note(client)
        except BaseException:
            client.close()
            raise

    def _dial(self) -> KeeperClient:
        """Connect to the running keeper, which a trainer may have started, else to a new one.

        A keeper that does not listen yet or is about to end holds the lock: then it takes a few attempts.
        """
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return KeeperClient(self._identity, "launcher", listener=self)
            except ForeignDirectoryError:
                raise
            except KeeperError:
                if time.monotonic() > deadline:
                    raise
            start_keeper(self._identity, self._config)

    # Messages of the keeper, on the connection's own thread

    def on_push(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, Hold):
            self._memory.apply(message, fds)
            with self._changed:
                client = self._client
            if client is not None:  # Else _connect posts Held when the connection is ready.
                with contextlib.suppress(KeeperError):
                    client.post(Held(self._memory.names()))
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Ending):
            log.info("the keeper ends: %s", message.reason)
            with self._changed:
                self._wanted = False
            self._memory.forget_all()

    def on_lost(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _release_if_idle(client: KeeperClient) -> None:
    """End a keeper without memory and without other connections: it would only wait for its lease."""
    answer, _ = client.request(WantStatus(), StatusIs, timeout_s=CLOSE_S)
    status = decode_status(answer.json)
    if status.memory_bytes == 0 and status.keeper.holders <= 1:
        client.request(Release(), Done, timeout_s=CLOSE_S)
