"""A forked child inherits the Snapshotter, and has no part in the training."""

from __future__ import annotations

import subprocess
import sys

from keepstep.testing.run import LocalRun

PROGRAM = """
import os, sys, time, torch, keepstep

def take(first, end):
    for step in range(first, end):  # until the keeper has granted one
        if snapshots.take(step).wait(timeout_s=60) is keepstep.Survives.PROCESS:
            return
        time.sleep(0.05)
    raise AssertionError("no snapshot")

def fork(leave):
    pid = os.fork()
    if pid == 0:
        leave()
    assert os.waitpid(pid, 0)[1] == 0

def close():
    snapshots.close(finished=True)
    os._exit(0)

with keepstep.Snapshotter({"model": torch.nn.Linear(2, 2)}) as snapshots:
    snapshots.restore()
    take(1, 1000)
    fork(sys.exit)
    fork(close)
    take(1000, 2000)
    print("the parent goes on", flush=True)
"""


def test_a_forked_child_that_leaves_or_closes_reports_nothing_and_ends_nothing(local: LocalRun) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the parent goes on"]
    assert "ended by" not in done.stderr
    assert "progress" not in done.stderr
