"""Nine steps of a training that asks first where it begins. Killed after each third step. Not a test.

Prints the step that `find` named, and the one that was restored.
"""

from __future__ import annotations

import os
import signal

import torch
from granted import wait_for_grant

import keepstep

STEPS = 9


def main() -> None:
    found = keepstep.find()
    state = {"counter": {"next": torch.zeros(1)}}
    with keepstep.Snapshotter(state) as snapshots:
        restored = snapshots.restore()
        print(found, restored.step if restored else None, flush=True)
        for step in range(found + 1 if found is not None else 0, STEPS):
            state["counter"]["next"] += 1
            assert wait_for_grant(snapshots)
            assert snapshots.take(step).wait(timeout_s=60.0)
            if step % 3 == 2 and step < STEPS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    assert state["counter"]["next"].item() == STEPS


if __name__ == "__main__":
    main()
