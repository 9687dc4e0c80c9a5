"""The demo signals the processes of its own run, finds what is left of it, and touches nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli.story.processes import Processes


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environ = {**os.environ, "KEEPSTEP_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=environ) as process:
        yield process
        process.kill()


def test_a_process_left_behind_is_found_by_its_environment_and_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    own = Processes(tmp_path)
    assert own.living() == [sleeper.pid]
    assert own.wait_for_quiet(timeout_s=0.0) == [f"{sleeper.pid} sleep 60"]
    own.end(timeout_s=10.0)
    assert own.wait_for_quiet(timeout_s=0.0) == []
    assert sleeper.wait(timeout=10) == -9
    assert not own.kill(sleeper.pid), "it is gone"


def test_a_process_of_another_run_is_never_signalled(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    others = Processes(tmp_path / "other")
    assert others.living() == []
    assert not others.kill(sleeper.pid)
    others.end(timeout_s=10.0)
    assert sleeper.poll() is None
