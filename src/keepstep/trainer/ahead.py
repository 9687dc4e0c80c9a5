"""The arena of this rank's last life, mapped while the keeper still checks what is in it.

A trainer is handed duplicates of every memfd of its node when it registers, so it need not wait for the keeper's word
to map the arena that it will most likely be told to load, and to lock the little memory that bytes reach devices
through (`ring`). When it is told something else, nothing is lost but that work. The view then serves the next
snapshots; its pages are faulted in meanwhile, and where bytes go to devices, which needs no map, the rest of them when
the state is there: training waits for the state first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from keepstep.arena.memfd import Mapping
from keepstep.arena.slots import Arena
from keepstep.errors import Error
from keepstep.identity import Identity
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.memory.pinned import in_use
from keepstep.trainer.restore.device_upload import PinnedUploader

log = logging.getLogger("keepstep")

POLL_S = 0.005


class Ahead:
    """`take` it when the keeper has answered, whatever it said."""

    def __init__(
        self,
        held: Callable[[], AbstractContextManager[dict[str, int]]],
        identity: Identity,
        local_index: int,
        *,
        ring: PinnedUploader | None = None,
        threads: int = 1,
    ) -> None:
        """`held`: duplicates of the node's memfds by name, as they come in. `threads` fault pages in."""
        self._held, self._identity, self._local_index = held, identity, local_index
        self._ring, self._threads = ring, threads
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._view: ArenaView | None = None
        self._taken = False
        self._thread = threading.Thread(target=self._run, name="keepstep-ahead", daemon=True)
        self._thread.start()

    def take(self, arena_id: str) -> ArenaView | None:
        """The view of this arena, if that was the right one: it is the caller's from now on. All else is closed."""
        with self._lock:
            view, self._view = self._view, None
            self._taken = view is not None and view.arena.arena_id == arena_id
            self._answered.set()
        if view is not None and not self._taken:
            view.close()
        return view if self._taken else None

    def _run(self) -> None:
        try:
            arena = self._find()
            if arena is not None:
                self._prepare(arena)
        except Exception as error:  # only time is lost
            log.debug("nothing was prepared ahead: %r", error)

    def _prepare(self, arena: Arena) -> None:
        try:
            view = ArenaView(arena, Mapping(arena.segment))
        except BaseException:
            arena.close()
            raise
        with self._lock:
            given_up = self._answered.is_set()
            self._view = None if given_up else view
        if given_up:
            view.close()
            return
        mapping = view.mapping
        del view  # it is its owner's to close
        if self._ring is not None:
            self._ring.lock()
        mapping.populate(self._threads, cancelled=self._is_over)

    def _is_over(self) -> bool:
        return self._answered.is_set() and (not self._taken or in_use())

    def _find(self) -> Arena | None:
        while not self._answered.wait(POLL_S):
            with self._held() as duplicates:
                for fd in duplicates.values():
                    arena = self._adopt(fd)
                    if arena is not None:
                        return arena
        return None

    def _adopt(self, fd: int) -> Arena | None:
        own = -1
        try:
            own = os.dup(fd)
            arena = Arena.adopt(own, run_id=self._identity.run_id, node_id=self._identity.node_id)
            if arena.header.local_index == self._local_index and _has_snapshot(arena):
                return arena
        except (Error, OSError):  # parity, given up meanwhile, or no arena of this run
            pass
        if own >= 0:
            os.close(own)
        return None


def _has_snapshot(arena: Arena) -> bool:
    return any(arena.committed(slot) for slot in range(arena.num_slots))
