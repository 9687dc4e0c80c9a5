"""Wait until the first `take` after `restore()` will be granted: the memory is prepared behind the first steps."""

from __future__ import annotations

import time

from keepstep.trainer.snapshotter import Snapshotter

TIMEOUT_S = 10.0


def wait_for_grant(snapshots: Snapshotter, timeout_s: float = TIMEOUT_S) -> bool:
    """False when there is none in time: some tests see to that."""
    deadline = time.monotonic() + timeout_s
    memory = snapshots._memory
    while time.monotonic() < deadline and snapshots._link.up:
        view = memory.view
        if view is not None and not memory.busy:
            grant = view.arena.grant()
            if grant is not None and grant.incarnation == snapshots._link.incarnation:
                return True
        time.sleep(0.002)
    return False
