"""transformers' Trainer with keepstep: killed anywhere, it ends as the run without keepstep. More in tests/chaos."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers_trials import Place, Server, Trial, run_trial

from keepstep.testing.run import LocalRun

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    this = Server()
    yield this
    this.close()


@pytest.fixture
def places() -> Iterator[list[Place]]:
    made: list[Place] = []
    yield made
    for place in made:
        place.clear()


def test_trainer_that_is_killed_anywhere_ends_as_the_one_without_keepstep(server: Server, places: list[Place]) -> None:
    trial = Trial(
        "3:substep 7:evaluating 9:took 13:epoch_end 13:took 14:begin 26:end",
        life={"noise": True, "epochs": 2}, options={"eval_strategy": "steps", "eval_steps": 7},
    )  # fmt: skip
    run_trial(trial, server, places)


@pytest.mark.chaos
def test_example_that_was_killed_ends_as_if_it_was_not(tmp_path: Path) -> None:
    ends = []
    for last_step in (None, 16):
        with LocalRun("trainer-example") as run:
            ends.append(run_example(run, tmp_path, last_step))
    assert ends[0] == ends[1]
    assert ends[0][0].startswith("the sum of all weights is")


def run_example(run: LocalRun, directory: Path, last_step: int | None) -> list[str]:
    """Its last lines. When killed, it is killed after some steps and a complete snapshot, then started again."""
    environ = {**os.environ, **run.environ, "OMP_NUM_THREADS": "1", "PAUSE_S": "0.02", "OUTPUT_DIR": str(directory)}
    if last_step is not None:
        first = subprocess.Popen([sys.executable, str(EXAMPLE)], env=environ, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        with first, first.stdout:
            for line in first.stdout:
                if line.startswith("step") and int(line.split()[1]) >= last_step and run.status().step is not None:
                    first.kill()
                    break
        assert first.returncode == -9
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ("restored" in done.stdout + done.stderr) == (last_step is not None)
    return done.stdout.splitlines()[-2:]
