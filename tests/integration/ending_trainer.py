"""A training script that ends in the way that its argument names: `ending_trainer.py HOW [LAST_STEP]`. Not a test.

Prints the restored step. Ends that begin with `with-` use the Snapshotter as a context manager.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time

import torch
from granted import wait_for_grant

import keepstep

LAST_STEP = 2


def main(how: str, last_step: int) -> int:
    if "LOGGING" in os.environ:
        logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    with contextlib.ExitStack() as stack:
        snapshots = keepstep.Snapshotter({"model": model})
        if how.startswith("with-"):
            stack.enter_context(snapshots)
        restored = snapshots.restore()
        print("restored", restored and restored.step, flush=True)
        wait_for_grant(snapshots)
        for step in range(restored.step + 1 if restored else 0, last_step + 1):
            with torch.no_grad():
                model.weight += 1
            snapshots.take(step).wait()
        end(snapshots, how.removeprefix("with-"))
    return 0


def end(snapshots: keepstep.Snapshotter, how: str) -> None:
    if how == "exit":
        sys.exit(0)
    if how == "exit-code":
        sys.exit(3)
    if how == "error":
        raise ValueError("the data is gone")
    if how == "close-in-finally":
        try:
            raise ValueError("the data is gone")
        finally:
            snapshots.close()
    if how in ("ctrl-c", "sigterm"):
        os.kill(os.getpid(), signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        time.sleep(60)
    if how == "close":
        snapshots.close()


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "close-twice":
        main("close", LAST_STEP)
        how = "close"
    if how == "sys-exit-main":
        sys.exit(main(how, *map(int, sys.argv[2:] or [LAST_STEP])))
    main(how, *map(int, sys.argv[2:] or [LAST_STEP]))
