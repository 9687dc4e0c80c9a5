"""The accelerate adapter: a killed loop ends as the one without keepstep. More of it in tests/chaos."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate_runs import AccelerateServer, compare_with_bare

from keepstep.testing.run import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"


@pytest.fixture(scope="module")
def server() -> Iterator[AccelerateServer]:
    this = AccelerateServer()
    yield this
    this.close()


def test_killed_loop_ends_as_the_loop_without_keepstep(server: AccelerateServer) -> None:
    kills = ["0.3:backward", "0.4:step", "0.9:step", "0.end:evaluation", "1.5:evaluation"]
    compare_with_bare(server, kills, accumulate=2, evaluate_every=3)


def test_example_that_was_killed_goes_on() -> None:
    with LocalRun("accelerate-example") as run:
        assert run_example(run, batches_before_kill=7).startswith("the sum of all weights is")


@pytest.mark.chaos
def test_example_that_was_killed_ends_as_if_it_was_not() -> None:
    ends = []
    for batches_before_kill in (None, 7):
        with LocalRun("accelerate-example") as run:
            ends.append(run_example(run, batches_before_kill))
    assert ends[0] == ends[1]


def run_example(run: LocalRun, batches_before_kill: int | None) -> str:
    """Its last line. When killed, it is killed after some batches and a complete snapshot, then started again."""
    environ = {**os.environ, **run.environ, "OMP_NUM_THREADS": "1", "PAUSE_S": "0.03"}
    if batches_before_kill is not None:
        first = subprocess.Popen([sys.executable, str(EXAMPLE)], env=environ, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        with first, first.stdout:
            for line in first.stdout:
                if (
                    line.startswith("epoch")
                    and int(line.split()[3]) >= batches_before_kill
                    and run.status().step is not None
                ):
                    first.kill()
                    break
        assert first.returncode == -9
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ("restored" in done.stdout) == (batches_before_kill is not None)
    return done.stdout.splitlines()[-1]
