"""Where the time of a restore goes, for the log: a restart is when somebody asks."""

from __future__ import annotations

import time


class Stopwatch:
    """Laps of one thread, in order."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        """What was done since the last one."""
        now = time.monotonic()
        self._laps.append((name, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._laps)
