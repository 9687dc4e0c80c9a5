"""Where a test makes the Nth effect fail.

Every effect on the save path (a system call, a message, an allocation) passes `point(name)` first.
Outside tests that is one global read. `keepstep.testing.faults` installs a plan; SQLite's test
suite is the model: fail the 1st effect, then the 2nd, until a run meets no failure at all.

A process that a test starts but is not in (the keeper) takes its orders from a file: KEEPSTEP_TEST_FAULTS
names it, `<nth> <beginning of the name>` stands in it, and what was met is said in `<file>.met`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "KEEPSTEP_TEST_FAULTS"
_plan: Callable[[str], None] | None = None
_looked = False


def point(name: str) -> None:
    """Say that the effect `name` comes next; raises what the installed plan raises."""
    if not _looked:
        _look()
    if _plan is not None:
        _plan(name)


def install(plan: Callable[[str], None] | None) -> None:
    """Set the plan (None removes it). Tests only."""
    global _plan, _looked
    _plan, _looked = plan, True


def _look() -> None:
    path = os.environ.get(ENVIRONMENT)
    install(_Ordered(Path(path)) if path else None)


class _Ordered:
    """Counts from each new order on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._order = ""
        self._passed = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        order = self._path.read_text() if self._path.exists() else ""
        nth, _, only = order.strip().partition(" ")
        with self._lock:
            if order != self._order:
                self._order, self._passed = order, 0
            if not nth.isdigit() or not name.startswith(only):
                return
            self._passed += 1
            if self._passed != int(nth):
                return
        self._path.with_suffix(".met").write_text(f"{nth} {name}")
        raise OSError(errno.ENOMEM, f"ordered at {name}")
