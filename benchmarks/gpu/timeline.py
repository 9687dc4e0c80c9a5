"""When each snapshot of a run was taken, had landed, was compared, committed and complete: where its time goes.

By wrapping what the capture calls for each of them; nothing is timed on the device. A host that runs ahead of it shows
in the first stretch, which is then longer than the copy.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import keepstep

MOST_TRACED = 100
STAGES = ("taken", "landed", "compared", "committed", "complete")


class Timeline:
    """Of one Snapshotter; counts from the last `clear`."""

    def __init__(self, snapshots: keepstep.Snapshotter) -> None:
        self._seen: dict[int, dict[str, float]] = {}
        capture, pending = snapshots._capture, snapshots._reporter._open
        self._before(snapshots, "_take", lambda args: args[0], "asked")
        self._after(capture, "begin", lambda args: args[2].step, "taken")
        self._before(capture, "_compare", lambda args: args[0].version.step, "landed")
        self._after(capture, "_compare", lambda args: args[0].version.step, "compared")
        self._after(capture, "_commit", lambda args: args[0].version.step, "committed")
        self._after(pending, "complete", lambda args: args[0].step, "complete")

    def clear(self) -> None:
        self._seen.clear()

    def summary(self) -> dict[str, Any]:
        """Seconds from each stage to the next, for snapshots that came through all of them."""
        whole = [seen for seen in list(self._seen.values()) if all(stage in seen for stage in STAGES)]
        found: dict[str, Any] = {"snapshots": len(whole)}
        for before, after in itertools.pairwise(STAGES):
            seconds = [seen[after] - seen[before] for seen in whole]
            if seconds:
                name = f"{before}_to_{after}_s"
                found[name] = {"median": statistics.median(seconds), "max": max(seconds)}
        found["trace_ms"] = self._trace()
        return found

    def _trace(self) -> dict[str, dict[str, int]]:
        """Of each step that was asked for: when each stage was reached, from the first on."""
        seen = sorted(dict(self._seen).items())[:MOST_TRACED]
        start = min((min(times.values()) for _, times in seen), default=0.0)
        return {str(step): {stage: round(1e3 * (at - start)) for stage, at in times.items()} for step, times in seen}

    def _note(self, step: int, stage: str) -> None:
        self._seen.setdefault(step, {})[stage] = time.perf_counter()

    def _after(self, thing: Any, name: str, step_of: Callable[[Any], int], stage: str) -> None:
        call = getattr(thing, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._note(step_of(args), stage)
            return result

        setattr(thing, name, wrapped)

    def _before(self, thing: Any, name: str, step_of: Callable[[Any], int], stage: str) -> None:
        call = getattr(thing, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._note(step_of(args), stage)
            return call(*args, **kwargs)

        setattr(thing, name, wrapped)
