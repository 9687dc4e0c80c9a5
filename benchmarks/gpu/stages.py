"""Where the time of `take` goes: its stages, by wrapping what it calls. A stage may lie inside another one."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keepstep

STAGES = (
    ("_capture", "check_unfenced_write"),
    ("_grants", "next"),
    ("_planner", "lookup"),
    ("_planner.plans._reader", "read"),
    ("_planner.plans", "_is_current"),
    ("_capture", "begin"),
    ("_capture._prepared", "next_checks"),
    ("_capture._eager", "copy"),
    ("_capture._small", "clone_eager"),
    ("_capture", "_transfer"),
    ("_fence", "arm"),
)
"""(where it hangs in a Snapshotter, its name)"""


class Stages:
    """Of one Snapshotter; counts from the last `clear`."""

    def __init__(self, snapshots: keepstep.Snapshotter) -> None:
        self._took_s: dict[str, list[float]] = {}
        for where, name in STAGES:
            thing: Any = snapshots
            for part in where.split(".") if where else ():
                thing = getattr(thing, part)
            self._wrap(thing, name, f"{where.replace('_', '')}.{name}".lstrip("._"))

    def clear(self) -> None:
        self._took_s.clear()

    def summary(self) -> dict[str, float]:
        """Median seconds by stage, over all times that it was passed."""
        return {name: statistics.median(took_s) for name, took_s in list(self._took_s.items())}

    def _wrap(self, thing: Any, name: str, label: str) -> None:
        call = getattr(thing, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._took_s.setdefault(label, []).append(time.perf_counter() - start)

        setattr(thing, name, wrapped)
