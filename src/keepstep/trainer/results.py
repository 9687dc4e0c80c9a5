"""What `take` returns: a snapshot on its way, or the reason why there is none."""

from __future__ import annotations

import threading

from keepstep.types import Survives, Version

DEFAULT_WAIT_S = 600.0


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
        told = f"skipped: {self._reason}" if self._reason else f"survives {self._survives.name}"
        return f"<PendingSnapshot step {self.step}, {told}>"


class PendingSnapshots:
    """The snapshots whose fate is open. Told by the keeper, in any order, from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Version, PendingSnapshot] = {}

    def add(self, version: Version, pending: PendingSnapshot) -> None:
        with self._lock:
            self._open[version] = pending

    def complete(self, version: Version, *, final: bool) -> None:
        """It survives a process; older ones that do not never will."""
        self._settle(version, Survives.PROCESS, final=final)

    def protected(self, version: Version) -> None:
        """It survives a node; older ones stay what they are."""
        self._settle(version, Survives.NODE, final=True)

    def void(self, version: Version, reason: str) -> None:
        self._settle(version, Survives.NOTHING, final=True, reason=reason)

    def end(self, reason: str) -> None:
        with self._lock:
            left, self._open = self._open, {}
        for pending in left.values():
            pending._resolve(pending.survives, final=True, reason="" if pending.survives else reason)

    def _settle(self, version: Version, survives: Survives, *, final: bool, reason: str = "") -> None:
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
