"""The arena of this rank's last life, mapped and registered while the keeper still checks what is in it.

Registering 17 GB with CUDA takes 0.7 s, and so does checking them. A trainer is handed duplicates of every memfd of its
node when it registers, so it need not wait for the keeper's word to begin with the slot that it will most likely be
told to load. When it is told something else, nothing is lost but that work. The view then serves the next snapshots.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from keepstep.arena.segment import Mapping
from keepstep.arena.slots import Arena
from keepstep.errors import Error
from keepstep.identity import Identity
from keepstep.trainer.view import ArenaView

log = logging.getLogger("keepstep")

POLL_S = 0.005
WAIT_S = 120.0
"""for a registration to end: it cannot be interrupted"""


class Ahead:
    """`take` it when the keeper has answered, whatever it said."""

    def __init__(self, held: Callable[[], dict[str, int]], identity: Identity, local_index: int) -> None:
        """`held`: duplicates of the node's memfds by name, as they come in."""
        self._held, self._identity, self._local_index = held, identity, local_index
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._view: ArenaView | None = None
        self._taken = False
        self._thread = threading.Thread(target=self._run, name="keepstep-ahead", daemon=True)
        self._thread.start()

    def take(self, arena_id: str) -> ArenaView | None:
        """The view of this arena, if that was the right one: it is the caller's from now on. All else is closed."""
        with self._lock:
            view = self._view
            self._taken = view is not None and view.arena.arena_id == arena_id
            self._answered.set()
        if not self._taken:
            return None
        self._thread.join(WAIT_S)
        return view

    def _run(self) -> None:
        try:
            arena = self._find()
            if arena is not None:
                self._prepare(arena)
        except Exception as error:  # only time is lost
            log.debug("nothing was prepared ahead: %r", error)

    def _prepare(self, arena: Arena) -> None:
        slot = _newest(arena)
        try:
            view = ArenaView(arena, Mapping(arena.segment))
        except BaseException:
            arena.close()
            raise
        with self._lock:
            if not self._answered.is_set():
                self._view = view
        try:
            if self._view is not None and slot is not None:
                view.register_with_cuda([slot])
        finally:
            self._answered.wait()  # whoever asks the keeper has a deadline, and says so in the end
            if not self._taken:
                view.close()

    def _find(self) -> Arena | None:
        while not self._answered.wait(POLL_S):
            for fd in self._held().values():
                arena = self._adopt(fd)
                if arena is not None:
                    return arena
        return None

    def _adopt(self, fd: int) -> Arena | None:
        own = -1
        try:
            own = os.dup(fd)
            arena = Arena.adopt(own, run_id=self._identity.run_id, node_id=self._identity.node_id)
            if arena.header.local_index == self._local_index and _newest(arena) is not None:
                return arena
        except (Error, OSError):  # parity, given up meanwhile, or no arena of this run
            pass
        if own >= 0:
            os.close(own)
        return None


def _newest(arena: Arena) -> int | None:
    """The slot that a restart would be told to load."""
    found = {slot: header[1].version for slot in range(arena.num_slots) if (header := arena.committed(slot))}
    return max(found, key=lambda slot: found[slot], default=None)
