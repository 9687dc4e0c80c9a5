"""Where a test makes the Nth effect fail.

Every effect on the save path (a system call, a message, an allocation) passes `point(name)` first.
Outside tests that is one global read. `keepstep.testing.faults` installs a plan; SQLite's test
suite is the model: fail the 1st effect, then the 2nd, until a run meets no failure at all.
"""

from __future__ import annotations

from collections.abc import Callable

_plan: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Say that the effect `name` comes next; raises what the installed plan raises."""
    if _plan is not None:
        _plan(name)


def install(plan: Callable[[str], None] | None) -> None:
    """Set the plan (None removes it). Tests only."""
    global _plan
    _plan = plan
