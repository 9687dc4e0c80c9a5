"""This rank's arena: asked for, mapped, faulted in before the first step, and replaced by a larger one behind it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from keepstep.arena.memfd import Mapping
from keepstep.arena.memory_limits import FEW_SLOTS, requested_slots
from keepstep.arena.records import Progress
from keepstep.arena.slots import Arena
from keepstep.config import ArenaConfig
from keepstep.control.client import RESTORE_S
from keepstep.control.messages import ArenaGiven, WantArena
from keepstep.identity import Identity, start_time
from keepstep.layout import SnapshotSize
from keepstep.trainer.connection.keeper_link import KeeperLink, RankState
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.memory.progress import ProgressLine, waiting_for
from keepstep.trainer.plan import arena_size

log = logging.getLogger("keepstep")

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 10.0
PREFAULT_THREADS = 8  # populating pages takes 0.5 s per GiB and thread


class RankArena:
    """Owns the view of the arena. One thread at a time replaces it."""

    def __init__(self, link: KeeperLink, state: RankState, config: ArenaConfig) -> None:
        self._link, self._state, self._config = link, state, config
        self.view: ArenaView | None = None
        self.busy = False
        """an arena is being made behind the training"""
        self._self = (os.getpid(), start_time(os.getpid()))
        """who writes: a keeper that takes over fences us by it, should we not come back"""
        self._times_grown = 0
        self._changing = threading.Lock()
        self._closed = threading.Event()

    def get(self, need: SnapshotSize, *, show: bool) -> None:
        """Have an arena with room for `need`. Raises the one error that a user gets when it does not fit."""
        size_bytes = (requested_slots(self._config) or FEW_SLOTS) * (
            need.layout_bytes + need.values_bytes + need.payload_bytes
        )
        with waiting_for(size_bytes, enabled=show):
            arena_id, fd = self._ask(need)
        try:
            self._move_into(arena_id, fd, show=show)
        finally:
            os.close(fd)

    def get_behind(self, need: SnapshotSize, *, before: Callable[[], object], after: Callable[[], object]) -> None:
        """The same in the background, between `before` and `after`."""
        with self._changing:
            if self.busy:
                return
            self.busy = True

        def work() -> None:
            try:
                before()
                arena_id, fd = self._ask(need)
                try:
                    self._move_in_the_end(arena_id, fd)
                finally:
                    os.close(fd)
                after()
            except Exception as error:
                if not self._closed.is_set():
                    log.error("there is no memory for snapshots: %s", error)
            finally:
                self.busy = False

        threading.Thread(target=work, name="keepstep-memory", daemon=True).start()

    def _ask(self, need: SnapshotSize) -> tuple[str, int]:
        wanted = WantArena(need, requested_slots(self._config), self._config.memory_limit_bytes)
        given, fds = self._link.request(wanted, ArenaGiven, timeout_s=RESTORE_S)
        self._link.memory.hold(given.arena_id, fds[0])
        self._state.arena_id = given.arena_id
        return given.arena_id, fds[0]

    def _move_in_the_end(self, arena_id: str, fd: int) -> None:
        """From now on the keeper grants in the new arena only: not to get into it would end the snapshots."""
        pause_s = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                self._move_into(arena_id, fd, show=False)
                return
            except Exception as error:
                log.warning("the new arena cannot be used yet, trying again: %r", error)
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def _move_into(self, arena_id: str, fd: int, *, show: bool) -> None:
        if self.view is not None and self.view.arena.arena_id == arena_id:
            return
        view = open_view(os.dup(fd), self._link.identity)
        try:
            with ProgressLine(view.arena.segment.size_bytes, enabled=show) as progress:
                view.mapping.populate(PREFAULT_THREADS, progress)
            view.register_with_cuda()
        except BaseException:
            view.close()
            raise
        with self._changing:
            # A close() that came first would leave it to nobody.
            old, self.view = (view, self.view) if self._closed.is_set() else (self.view, view)
        if old is not None:
            old.close()
        self.write_progress()

    def grow(self, need: SnapshotSize, *, before: Callable[[], object]) -> None:
        """A larger arena, made before the old one goes."""
        if not self.busy:
            self.get_behind(arena_size.larger(need, times=self._times_grown), before=before, after=lambda: None)
            self._times_grown += 1

    def replace(self, *, before: Callable[[], object]) -> None:
        """Another arena of the same size: the keeper does not take this one back."""
        view = self.view
        if view is not None:
            header = view.arena.header
            need = SnapshotSize(header.layout_capacity, header.values_capacity, header.payload_capacity)
            self.get_behind(need, before=before, after=lambda: None)

    def write_progress(self) -> None:
        """Tell the keeper, through the arena, how far this rank has come. From any thread."""
        with self._changing:
            if self.view is not None:
                try:
                    self.view.arena.write_progress(Progress(self._link.incarnation, self._state.step, *self._self))
                except OSError as error:
                    log.warning("progress cannot be written: %s", error)

    def close(self) -> None:
        with self._changing:
            self._closed.set()
            self._self = (0, 0)
        self.write_progress()
        with self._changing:
            view, self.view = self.view, None
        if view is not None:
            view.close()


def open_view(fd: int, identity: Identity) -> ArenaView:
    """Takes the descriptor, also when it fails."""
    try:
        arena = Arena.adopt(fd, run_id=identity.run_id, node_id=identity.node_id)
        return ArenaView(arena, Mapping(arena.segment))
    except BaseException:
        os.close(fd)
        raise
