"""examples/batches.py ends with the same weights when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from keepstep.testing.run import LocalRun, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "batches.py"
KILL_AT_BATCH = "batch  50"


def start(environ: dict[str, str], pause_s: float) -> subprocess.Popen[str]:
    environ = {**os.environ, **environ, "PAUSE_S": str(pause_s), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    )


def test_killed_example_ends_as_the_undisturbed_one() -> None:
    with LocalRun("undisturbed") as local:
        undisturbed = start(local.environ, 0.0).communicate(timeout=100)[0].splitlines()
    with LocalRun("killed") as local:
        process = start(local.environ, 0.05)
        assert process.stdout is not None
        for line in process.stdout:
            if KILL_AT_BATCH in line:
                wait_until(lambda: local.status().step is not None, timeout_s=60.0, what="a complete version")
                os.kill(process.pid, signal.SIGKILL)
                break
        process.communicate(timeout=60)
        resumed = start(local.environ, 0.0).communicate(timeout=100)[0].splitlines()
    lines = [line for line in resumed if line.startswith(("epoch", "the sum"))]
    assert lines[-1].startswith("the sum of all weights"), resumed
    assert set(lines) <= set(undisturbed), (resumed, undisturbed)
    assert len(lines) < len([line for line in undisturbed if line.startswith(("epoch", "the sum"))])
