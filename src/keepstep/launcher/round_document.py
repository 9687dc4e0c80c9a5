"""The one document of the rendezvous, in a store that all agents change. Used by one thread per agent.

Invariants:
- The document changes by compare-and-set only.
- The counter `changes` says whether it must be read again: with a thousand nodes the document is long, and each agent
  checks it twice a second. A writer that died between the two leaves a counter that lags, so the document is also
  read every REREAD_S seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from keepstep.control.status import without_controls
from keepstep.launcher.rounds import RoundState

REREAD_S = 5.0


class Store(Protocol):
    """The part of torch's TCPStore that is used."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class RoundDocument:
    """A cached copy of the document, and the operations on it."""

    def __init__(self) -> None:
        self._text, self._state = "", RoundState()
        self._changes, self._read_at = -1, 0.0

    def invalidate(self) -> None:
        """Read it the next time, whatever the counter is."""
        self._changes = -1

    def read(self, store: Store) -> RoundState:
        """The document, from the store if it may have changed."""
        changes, now = store.add("changes", 0), time.monotonic()
        if changes == self._changes and now - self._read_at < REREAD_S:
            return self._state
        text = store.compare_set("board", "", "").decode()  # Unlike `get`, does not wait for the first writer.
        self._text, self._changes, self._read_at = text, changes, now
        self._state = _decode(text) if text else RoundState()
        return self._state

    def write(self, store: Store, state: RoundState) -> RoundState | None:
        """Replace the document as it was last read. None when another agent has replaced it before."""
        text = msgspec.json.encode(state).decode()
        if text == self._text:
            return state
        current = store.compare_set("board", self._text, text).decode()
        self.invalidate()
        if current != text:
            return None
        self._text, self._state = text, state
        store.add("changes", 1)
        return state

    def update(self, store: Store, change: Callable[[RoundState], RoundState]) -> None:
        """Apply a change, again if another agent writes at the same time."""
        while self.write(store, change(self.read(store))) is None:
            pass


def _decode(text: str) -> RoundState:
    """The document as anybody may have written it: its names and reasons are logged."""
    return msgspec.convert(without_controls(msgspec.json.decode(text)), RoundState)
