"""What `take` returns: a snapshot on its way, or the reason why there is none."""

from __future__ import annotations

import threading

from keepstep.types import Survives

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
