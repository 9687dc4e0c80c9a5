"""The one document of the rendezvous, in a store that all agents change. Used by one thread per agent.

Invariants:
- The document changes by compare-and-set only.
- Each version of it has a larger revision than the one before, also when the store came back empty. A version that
  does not verify, or is older than one that was read, is replaced by the newest that this agent knows: what a stranger
  writes into the store delays a round, and ends none.
- The counter `changes` says whether it must be read again: with a thousand nodes the document is long, and each agent
  checks it twice a second. A writer that died between the two leaves a counter that lags, so the document is also
  read every REREAD_S seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from keepstep.control.signed_store import SignedStore
from keepstep.control.status import without_controls
from keepstep.launcher.rounds import RoundState

KEY = "board"
REREAD_S = 5.0


class RoundDocument:
    """A cached copy of the document, and the operations on it."""

    def __init__(self) -> None:
        self._raw, self._state = "", RoundState()
        self._changes, self._read_at = -1, 0.0

    def invalidate(self) -> None:
        """Read it the next time, whatever the counter is."""
        self._changes = -1

    def read(self, store: SignedStore) -> RoundState:
        """The document, from the store if it may have changed."""
        changes, now = store.raw.add("changes", 0), time.monotonic()
        if changes == self._changes and now - self._read_at < REREAD_S:
            return self._state
        raw = store.raw.compare_set(KEY, "", "")  # Unlike `get`, does not wait for the first writer.
        found = self._verify(store, raw)
        self._changes, self._read_at = changes, now
        try:
            self._raw = raw.decode()
        except UnicodeDecodeError:  # No compare-and-set could name it.
            store.raw.set(KEY, "")
            self._raw = ""
        if found is not None:
            self._state = found
        elif not raw:  # The store has lost it. The members write it again (round_participant.py).
            self._state = RoundState(revision=self._state.revision)
        elif self._state.revision:
            self._replace(store, self._state)
        return self._state

    def write(self, store: SignedStore, state: RoundState) -> RoundState | None:
        """Replace the document as it was last read. None when another agent has replaced it before."""
        return state if state == self._state else self._replace(store, state)

    def update(self, store: SignedStore, change: Callable[[RoundState], RoundState]) -> None:
        """Apply a change, again if another agent writes at the same time."""
        while self.write(store, change(self.read(store))) is None:
            pass

    def _replace(self, store: SignedStore, state: RoundState) -> RoundState | None:
        state = msgspec.structs.replace(state, revision=max(time.time_ns(), self._state.revision + 1))
        raw = store.signer.sign(KEY, msgspec.json.encode(state).decode())
        current = store.raw.compare_set(KEY, self._raw, raw)
        self.invalidate()
        if current != raw.encode():
            return None
        self._raw, self._state = raw, state
        store.raw.add("changes", 1)
        return state

    def _verify(self, store: SignedStore, raw: bytes) -> RoundState | None:
        """The document as it was found; None if it is nobody's, or older than the one that is known."""
        document = store.signer.verify(KEY, raw)
        if document is None:
            return None
        try:
            # Without a secret anybody may have written it, and its names and reasons are logged.
            state = msgspec.convert(without_controls(msgspec.json.decode(document.text)), RoundState)
        except (msgspec.DecodeError, RecursionError) as error:
            store.signer.ignore(KEY, f"it is no state of rounds ({type(error).__name__})")
            return None
        if state.revision < self._state.revision:
            store.signer.ignore(KEY, "it is older than the one before")
            return None
        return state
