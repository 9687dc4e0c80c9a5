"""The one document of the rendezvous, in a store that others change too. Used by one thread.

A small counter says whether the document is worth reading: with a thousand nodes it is long, and it is
looked at twice a second. A writer that died between the two leaves a counter that lags; so it is read
now and then all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from keepstep.launcher.rounds import RoundState

REREAD_S = 5.0


class Store(Protocol):
    """What is used of torch's TCPStore."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class RoundDocument:
    """What was last seen of it, and the ways to see more and to change it."""

    def __init__(self) -> None:
        self._text, self._board = "", RoundState()
        self._changes, self._read_at = -1, 0.0

    def doubt(self) -> None:
        """Read it the next time, whatever the counter says."""
        self._changes = -1

    def read(self, store: Store) -> RoundState:
        changes, now = store.add("changes", 0), time.monotonic()
        if changes == self._changes and now - self._read_at < REREAD_S:
            return self._board
        text = store.compare_set("board", "", "").decode()  # unlike `get`, does not wait for the first writer
        self._text, self._changes, self._read_at = text, changes, now
        self._board = msgspec.json.decode(text, type=RoundState) if text else RoundState()
        return self._board

    def write(self, store: Store, board: RoundState) -> RoundState | None:
        """None when somebody else was quicker: read again."""
        text = msgspec.json.encode(board).decode()
        if text == self._text:
            return board
        found = store.compare_set("board", self._text, text).decode()
        self.doubt()
        if found != text:
            return None
        self._text, self._board = text, board
        store.add("changes", 1)
        return board

    def update(self, store: Store, change: Callable[[RoundState], RoundState]) -> None:
        """Change it, whoever else does at the same time."""
        while self.write(store, change(self.read(store))) is None:
            pass
