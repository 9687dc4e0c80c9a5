"""The accelerate adapter: a killed loop ends as the one without keepstep. More of it in tests/chaos."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_example_under_torchrun_ends_alike_when_a_rank_is_killed() -> None:
    assert launch_example(kill=True) == launch_example(kill=False)


def launch_example(*, kill: bool) -> str:
    """Its last line, on two ranks under `torchrun --rdzv-backend=keepstep`. One is killed after a complete snapshot."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3"]
    with LocalRun("accelerate-torchrun") as run:
        environ = {**os.environ, **run.environ, "OMP_NUM_THREADS": "1", "PAUSE_S": "0.1"}
        del environ["KEEPSTEP_RUN_ID"]
        backend = ["--rdzv-backend=keepstep", "--rdzv-id=accelerate-torchrun", "--rdzv-endpoint=localhost:0"]
        command = [*launcher, *backend, str(EXAMPLE)]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            lines, pid, killed = [], 0, False
            for line in job.stdout:
                lines.append(line.strip())
                if line.startswith("pid"):
                    pid = int(line.split()[1])
                if kill and not killed and line.startswith("epoch") and run.status().step is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        assert job.returncode == 0
        assert any(line.startswith("restored") for line in lines) == kill
    return next(line for line in lines if line.startswith("the sum of all weights"))


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
