"""What `take` and `restore` return, and who resolves it: a snapshot stays open until the keeper reports its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from keepstep.control.messages import Committed, Complete, Protected, Void, Voided
from keepstep.layout import SnapshotSize
from keepstep.trainer.connection.keeper_link import KeeperLink
from keepstep.types import Source, Survives, Version

log = logging.getLogger("keepstep")

DEFAULT_WAIT_S = 600.0
MAX_WARNINGS = 100  # Distinct warnings that are logged: texts may contain steps.


class PendingSnapshot:
    """One `take`. Final when it is skipped, void, or has reached all that this job can give it."""

    def __init__(self, step: int, *, reason: str = "") -> None:
        self.step = step
        self._changed = threading.Condition()
        self._survives = Survives.NOTHING
        self._reason = reason
        self._final = bool(reason)

    @property
    def skipped(self) -> bool:
        """True when this step will never be restorable; `reason` says why."""
        return bool(self._reason)

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def survives(self) -> Survives:
        """What the version outlives at this moment."""
        return self._survives

    def done(self) -> bool:
        """Whether anything about this snapshot can still change."""
        return self._final

    def wait(self, until: Survives = Survives.PROCESS, timeout_s: float | None = None) -> Survives:
        """Block until the version survives `until` or is final; returns what it survives then.

        Never longer than `timeout_s` (600 by default). Training has no need to call this.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._final or self._survives >= until, DEFAULT_WAIT_S if timeout_s is None else timeout_s
            )
            return self._survives

    def _resolve(self, survives: Survives, *, final: bool, reason: str = "") -> None:
        with self._changed:
            if self._final:
                return
            self._survives, self._final, self._reason = survives, final, reason
            self._changed.notify_all()

    def __repr__(self) -> str:
        state = f"skipped: {self._reason}" if self._reason else f"survives {self._survives.name}"
        return f"<PendingSnapshot step {self.step}, {state}>"


@dataclass(frozen=True)
class Restored:
    """What `restore()` restored."""

    step: int
    source: Source
    survives: Survives
    duration_s: float
    bytes: int
    plan: tuple[str, ...]
    """The reasons for the choice of this version and of its sources, one sentence each."""
    note: str = ""
    """Whether this step may be the last one of a finished run, how to begin anew and how to go on; else empty."""
    _set_rng: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    _size: SnapshotSize | None = field(default=None, repr=False, compare=False)

    def restore_rng(self) -> None:
        """Set all random states again, for loops that build an iterator after `restore()`."""
        self._set_rng()


@dataclass(frozen=True)
class Notices:
    """What the keeper reported that the next `take` must act on."""

    layouts_damaged: bool = False  # Layouts in the arena are written again: a damaged one would fail every snapshot.
    arena_refused: bool = False  # A new keeper did not accept the arena: another one is needed.
    diverged: frozenset[str] = frozenset()  # Paths of replicas that differ between nodes: each rank's own from now on.


class SnapshotReporter:
    """Reports outcomes of snapshots to the keeper, and resolves open snapshots as the keeper reports theirs.

    Called by the training thread, by the threads of a capture and, as LinkListener, by the threads of the link. None of
    them calls the Snapshotter: `take` collects what it must act on with `take_notices`.
    """

    def __init__(self, link: KeeperLink) -> None:
        self._link = link
        self._open = PendingSnapshots()
        self._lock = threading.Lock()
        self._notices = Notices()
        self._warned: set[str] = set()

    def open(self, version: Version) -> PendingSnapshot:
        """Make the snapshot that `take` returns for a capture that begins."""
        pending = PendingSnapshot(version.step)
        self._open.add(version, pending)
        return pending

    def take_notices(self) -> Notices:
        """Return what was reported since the last call."""
        if self._notices == Notices():  # Without the lock, because this runs inside every `take`.
            return self._notices
        with self._lock:
            notices, self._notices = self._notices, Notices()
        return notices

    def warn_once(self, text: str) -> None:
        """Log a warning, unless the same text was logged before."""
        if text not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(text)
            log.warning(text)

    def close(self) -> None:
        """Resolve what is still open: nothing more will be reported."""
        self._open.end("closed before it was complete")

    # Outcomes of this rank

    def committed(self, arena_id: str, slot: int, version: Version) -> None:
        """Report a snapshot that is committed in its slot."""
        self._link.report_outcome(Committed(arena_id, slot, version))

    def voided(self, arena_id: str, slot: int, version: Version, reason: str) -> None:
        """Report that this rank does not honour its grant."""
        self._link.report_outcome(Void(arena_id, slot, version, reason))
        if self._open.void(version, reason):
            self.warn_once(f"a snapshot is void: {reason}")

    # LinkListener

    def complete(self, message: Complete) -> None:
        self._open.complete(message.version, final=message.final)

    def protected(self, message: Protected) -> None:
        self._open.protected(message.version)

    def voided_elsewhere(self, message: Voided) -> None:
        if message.diverged:
            log.error("step %d is void: %s", message.version.step, message.reason)
        with self._lock:
            diverged = self._notices.diverged | frozenset(message.diverged)
            self._notices = replace(self._notices, layouts_damaged=True, diverged=diverged)
        self._open.void(message.version, f"void elsewhere (rank {message.rank}: {message.reason})")

    def arena_refused(self) -> None:
        with self._lock:
            self._notices = replace(self._notices, arena_refused=True)


class PendingSnapshots:
    """Snapshots that are not final. Resolved by the keeper's reports, in any order, from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Version, PendingSnapshot] = {}

    def add(self, version: Version, pending: PendingSnapshot) -> None:
        with self._lock:
            self._open[version] = pending

    def complete(self, version: Version, *, final: bool) -> None:
        """Resolve a version that survives a process; older ones that do not survive one never will."""
        self._resolve_up_to(version, Survives.PROCESS, final=final)

    def protected(self, version: Version) -> None:
        """Resolve a version that survives a node; older ones keep what they survive."""
        self._resolve_up_to(version, Survives.NODE, final=True)

    def void(self, version: Version, reason: str) -> bool:
        """Resolve a version that will never be complete. Returns whether it was open."""
        return self._resolve_up_to(version, Survives.NOTHING, final=True, reason=reason)

    def end(self, reason: str) -> None:
        with self._lock:
            left, self._open = self._open, {}
        for pending in left.values():
            pending._resolve(pending.survives, final=True, reason="" if pending.survives else reason)

    def _resolve_up_to(self, version: Version, survives: Survives, *, final: bool, reason: str = "") -> bool:
        with self._lock:
            pending = self._open.pop(version, None) if final else self._open.get(version)
            older = {v: p for v, p in self._open.items() if v < version}
            over = {v: p for v, p in older.items() if p.survives < survives and (final or not p.survives)}
            for old in over:
                del self._open[old]
        for snapshot in over.values():
            superseded = "" if snapshot.survives else f"superseded by step {version.step}"
            snapshot._resolve(snapshot.survives, final=True, reason=superseded)
        if pending is not None:
            pending._resolve(survives, final=final, reason=reason)
        return pending is not None
