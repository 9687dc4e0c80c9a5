"""This rank's arena: requested from the keeper, prepared by a background thread, replaced when it must grow.

    restore()            request: the keeper checks the limits and creates the arena; a shortage raises here
    background thread    reserve the memory -> fault it in -> page-lock it -> load kernels -> publish the view
    take                 skipped until the view is published

Publishing ends with the first progress record in the arena. The keeper grants nothing in an arena that has none of
this incarnation, so a rank that is still preparing holds up no grant of the others. A failure in the background is
logged once, and tried again after a pause: training goes on, and snapshots begin when it succeeds.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from keepstep.arena.memfd import Mapping
from keepstep.arena.records import Progress
from keepstep.arena.slots import Arena, requested_slots
from keepstep.config import ArenaConfig
from keepstep.control.client import RESTORE_S
from keepstep.control.messages import ArenaGiven, WantArena
from keepstep.identity import Identity, start_time
from keepstep.layout import SnapshotSize, gib
from keepstep.trainer.connection.keeper_link import KeeperLink, RankState
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.plan import arena_size

log = logging.getLogger("keepstep")

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 10.0
STOP_S = 30.0  # Deadline for the background thread to stop: one range of memory, or the load of a kernel.
NICENESS = 10  # of the background thread: the first steps of the training have priority
PREPARING = "the memory for snapshots is being prepared"


class RankArena:
    """Owns the view of the arena. The background thread publishes it; one preparation runs at a time."""

    def __init__(self, link: KeeperLink, state: RankState, config: ArenaConfig) -> None:
        self._link, self._state, self._config = link, state, config
        self.view: ArenaView | None = None
        self.busy = False  # An arena is being prepared: nothing may be written into `view`.
        # Who writes: a keeper that takes over fences this process by it, should it not register again.
        self._writer = (os.getpid(), start_time(os.getpid()))
        self._times_grown = 0
        self._changing = threading.Lock()
        self._stop = threading.Event()  # of the newest preparation
        self._thread: threading.Thread | None = None
        self._closed = False
        self._need: SnapshotSize | None = None  # of the newest request
        self._warm_up: Callable[[], object] = lambda: None
        self._reported = ""  # The failure that was logged last, without its numbers.
        self._pause_s = FIRST_RETRY_S  # after the next failure to request an arena

    def request(self, need: SnapshotSize, *, before: Callable[[], object], warm_up: Callable[[], object]) -> None:
        """Have the keeper create an arena with room for `need`, and prepare it in the background.

        Raises the one error that a user gets when it does not fit. `before`: returns when nothing is written into the
        arena that this one replaces. `warm_up`: also done in the background, before the first snapshot.
        """
        self._stop_preparing()
        if self.view is not None:
            before()
        self._warm_up = warm_up
        view = self._request(need)
        self._start(lambda stop: self._prepare(view, stop))

    def request_behind(
        self, need: SnapshotSize, *, before: Callable[[], object], after: Callable[[], object] = lambda: None
    ) -> None:
        """Request and prepare an arena in the background, unless that is in progress already.

        `before`: as above. `after`: called when the keeper has created the arena. After a failure nothing is requested
        for a while, although takes ask for it.
        """
        if not self.busy:
            self._start(lambda stop: self._request_and_prepare(need, before, after, stop))

    def grow(self, need: SnapshotSize, *, before: Callable[[], object]) -> None:
        """Replace the arena by a larger one, which is created before the old one is freed."""
        larger = arena_size.larger(need, times=self._times_grown)
        self.request_behind(larger, before=before, after=self._count_growth)

    def replace(self, *, before: Callable[[], object]) -> None:
        """Replace the arena by one of the same size: the keeper refuses this one, which may still be in preparation.

        The view is closed first: where no other arena can be had now, the next takes must request one.
        """
        need = self._need

        def close_refused() -> None:
            before()
            self._close_view()

        if need is not None:
            self._start(lambda stop: self._request_and_prepare(need, close_refused, lambda: None, stop))

    def write_progress(self) -> None:
        """Report to the keeper, through the arena, how far this rank is. From any thread."""
        with self._changing:
            if self.view is not None:
                try:
                    state = self._state
                    progress = Progress(self._link.incarnation, state.step, *self._writer, state.takes)
                    self.view.arena.write_progress(progress)
                except Exception as error:  # A take must not fail because of it: the next one writes it again.
                    log.warning("progress cannot be written: %r", error)

    def close(self) -> None:
        with self._changing:
            self._closed = True
            self._writer = (0, 0)
        self._stop_preparing()
        self.write_progress()
        self._close_view()

    def _close_view(self) -> None:
        with self._changing:
            view, self.view = self.view, None
        if view is not None:
            view.close()

    def _count_growth(self) -> None:
        self._times_grown += 1

    def _request(self, need: SnapshotSize) -> ArenaView:
        """The view of the arena that the keeper gives: the published one, or one that is not prepared yet.

        It is mapped at once, because a child that is forked meanwhile keeps no descriptor of what is mapped.
        """
        self._need = need
        wanted = WantArena(need, requested_slots(self._config), self._config.memory_limit_bytes)
        given, fds = self._link.request(wanted, ArenaGiven, timeout_s=RESTORE_S)
        view = self.view
        if view is None or view.arena.arena_id != given.arena_id:
            view = open_view(fds[0], self._link.identity)
        else:
            os.close(fds[0])
        self._link.memory.hold(given.arena_id, view.arena.segment.fd)
        self._state.arena_id = given.arena_id
        return view

    # The background thread

    def _start(self, work: Callable[[threading.Event], None]) -> None:
        with self._changing:
            if self._closed:
                return
            self._stop.set()
            stop = self._stop = threading.Event()
            self.busy = True
            arguments = (work, stop, self._thread)
            self._thread = threading.Thread(target=self._run, args=arguments, name="keepstep-memory", daemon=True)
        self._thread.start()

    def _stop_preparing(self) -> None:
        with self._changing:
            thread, stop = self._thread, self._stop
        if thread is not None and thread is not threading.current_thread():
            stop.set()
            thread.join(STOP_S)

    def _run(
        self, work: Callable[[threading.Event], None], stop: threading.Event, previous: threading.Thread | None
    ) -> None:
        with suppress(OSError):
            os.nice(NICENESS)  # of this thread, and of those that it starts
        try:
            if previous is not None:
                previous.join()
            work(stop)
        except Exception as error:
            if not stop.is_set():
                self._report(error)
                stop.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)
        finally:
            with self._changing:
                if self._stop is stop:
                    self.busy = False

    def _request_and_prepare(
        self,
        need: SnapshotSize,
        before: Callable[[], object],
        after: Callable[[], object],
        stop: threading.Event,
    ) -> None:
        before()
        view = self._request(need)
        try:
            after()
        except BaseException:
            if view is not self.view:
                view.close()
            raise
        self._pause_s = FIRST_RETRY_S
        self._prepare(view, stop)

    def _prepare(self, view: ArenaView, stop: threading.Event) -> None:
        """Publish the view of an arena; try again until that succeeds. Closes it when `stop` is set before."""
        started, pause_s, published = time.monotonic(), FIRST_RETRY_S, view is self.view
        try:
            while not stop.is_set():
                try:
                    published = self._publish(view, stop)
                    break
                except Exception as error:
                    if not stop.is_set():
                        self._report(error)
                stop.wait(pause_s)
                pause_s = min(2 * pause_s, LAST_RETRY_S)
        finally:
            if not published:
                view.close()
        if published and not stop.is_set():
            self._reported = ""
            size = gib(view.arena.segment.size_bytes)
            log.debug("memory for snapshots is ready: %s after %.1f s", size, time.monotonic() - started)

    def _publish(self, view: ArenaView, stop: threading.Event) -> bool:
        if view is not self.view:
            view.prepare(stop)
            if not stop.is_set():
                self._warm_up()
            with self._changing:
                if stop.is_set():
                    return False
                replaced, self.view = self.view, view
            if replaced is not None:
                replaced.close()
        self.write_progress()
        return True

    def _report(self, error: Exception) -> None:
        """Log a failure, once for all attempts that differ in numbers only."""
        text = re.sub(r"\d[\d.,]*", "#", str(error))
        if text != self._reported:
            self._reported = text
            log.error("there is no memory for snapshots yet: %s", error)


def open_view(fd: int, identity: Identity) -> ArenaView:
    """Map an arena. Takes the descriptor, also when it fails."""
    try:
        arena = Arena.adopt(fd, run_id=identity.run_id, node_id=identity.node_id)
        return ArenaView(arena, Mapping(arena.segment))
    except BaseException:
        os.close(fd)
        raise
