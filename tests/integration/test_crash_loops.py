"""Jobs whose trainers fail again and again, under real torchrun: they end with the reason, kills do not count."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("failing_trainer.py")

pytestmark = pytest.mark.timeout(240)


@dataclass
class FailedJob:
    """A finished job of one node with one trainer."""

    code: int
    log: str
    starts: list[str]


@dataclass
class Launcher:
    """Runs one job in a directory of its own."""

    base: Path

    @property
    def environ(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCH"))}
        return clean | {"KEEPSTEP_RUNTIME_DIR": str(self.base / "r"), "TMPDIR": str(self.base), "OMP_NUM_THREADS": "1"}

    def run(self, how: str) -> FailedJob:
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=keepstep", "--rdzv-id=looping"]
        command += ["--nproc-per-node=1", "--max-restarts=100", str(SCRIPT), str(self.base), how]
        with (self.base / "log").open("w") as log:
            done = subprocess.run(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=200, check=False
            )
        starts = self.base / "starts"
        lines = starts.read_text().splitlines() if starts.exists() else []
        return FailedJob(done.returncode, (self.base / "log").read_text(), lines)

    def release(self) -> None:
        keepstep = Path(sys.executable).with_name("keepstep")
        subprocess.run(
            [keepstep, "release", "--run-id", "looping", "--force"], env=self.environ, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while (self.base / "r").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher(Path(tempfile.mkdtemp(dir="/tmp")))  # The path of a socket has 107 bytes at most.
    try:
        yield made
    finally:
        made.release()
        shutil.rmtree(made.base)


def test_restore_that_fails_twice_alike_ends_the_job(launcher: Launcher) -> None:
    job = launcher.run("another-model")
    assert job.code != 0
    assert job.starts[0] == "None", job.log
    assert len(job.starts) == 3, job.log
    assert job.starts[1] == job.starts[2]
    assert "restore() has failed in the same way in 2 starts in a row: RecoveryError: " + job.starts[1] in job.log
    assert "keepstep release --run-id looping" in job.log
    assert job.log.count("\nRestarting does not cure this: ") == 2
    assert "goes on from step 2 while its keepers hold it" in job.log


def test_program_that_fails_by_itself_before_any_snapshot_starts_three_times(launcher: Launcher) -> None:
    job = launcher.run("exit")
    assert job.code != 0
    assert len(job.starts) == 3, job.log
    assert "the trainers started 3 times from the beginning and failed each time before another" in job.log
    assert "(exit code 3)" in job.log
    assert "repair what the workers' first error names, and start the job again" in job.log


def test_trainers_that_are_killed_start_again_each_time(launcher: Launcher) -> None:
    job = launcher.run("killed")
    assert job.code == 0, job.log
    assert len(job.starts) == 6


@pytest.mark.chaos
def test_program_that_fails_at_one_step_starts_three_times_from_the_one_before(launcher: Launcher) -> None:
    job = launcher.run("batch")
    assert job.code != 0
    assert job.starts == ["None", "2", "2", "2"], job.log
    assert "started 3 times from step 2 (incarnation 1)" in job.log
    assert "(exit code 1: ValueError: a batch that no model can bear)" in job.log
