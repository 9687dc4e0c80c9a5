"""Points at which a test makes the Nth effect fail.

Every effect on the save path (a system call, a message, an allocation) passes `point(name)` first.
Outside tests that is one global read. `keepstep.testing.faults` installs a plan; SQLite's test
suite is the model: fail the 1st effect, then the 2nd, until a run meets no failure at all.

Other processes of a test (the keeper) read their plan from the file that KEEPSTEP_TEST_FAULTS names: it holds
`<nth> <beginning of the name>`, and the process writes the failure that it raised to `<file>.met`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "KEEPSTEP_TEST_FAULTS"
_plan: Callable[[str], None] | None = None
_loaded = False


def point(name: str) -> None:
    """Announce the effect `name` before it happens; raises what the installed plan raises."""
    if not _loaded:
        _load()
    if _plan is not None:
        _plan(name)


def install(plan: Callable[[str], None] | None) -> None:
    """Set the plan (None removes it). Tests only."""
    global _plan, _loaded
    _plan, _loaded = plan, True


def _load() -> None:
    path = os.environ.get(ENVIRONMENT)
    install(_FilePlan(Path(path)) if path else None)


class _FilePlan:
    """A plan in a file; counting starts again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = ""
        self._passed = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        content = self._path.read_text() if self._path.exists() else ""
        nth, _, prefix = content.strip().partition(" ")
        with self._lock:
            if content != self._content:
                self._content, self._passed = content, 0
            if not nth.isdigit() or not name.startswith(prefix):
                return
            self._passed += 1
            if self._passed != int(nth):
                return
        self._path.with_suffix(".met").write_text(f"{nth} {name}")
        raise OSError(errno.ENOMEM, f"ordered at {name}")
