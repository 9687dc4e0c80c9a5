"""What each end of a program leaves behind, and what it says: real trainers and keepers, without configured logging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from keepstep.cli.keepers import find_runs
from keepstep.cli.main import main
from keepstep.config import Config
from keepstep.control.status import fetch_status
from keepstep.testing.run import LocalRun, wait_until

SCRIPT = Path(__file__).with_name("ending_trainer.py")
KEPT = "the keeper of run 'test-run' keeps its last complete step"
UNPROTECTED = "the run is unprotected"


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as local:
        yield local


def train(
    run: LocalRun, how: str, *last_step: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One start of the program, from its beginning to its end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCH"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), how, *last_step],
        env={**clean, **run.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_program_that_returns_without_close_has_finished(run: LocalRun) -> None:
    ended = train(run, "return")
    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: not run.files(), what="the end of the keeper")
    assert KEPT not in ended.stderr
    assert UNPROTECTED not in ended.stderr


ENDS = {
    "sys-exit-main": (0, "ended by sys.exit"),
    "error": (1, "ended by ValueError"),
    "close-in-finally": (1, "ended by ValueError"),
    "exit-code": (3, "ended by sys.exit"),
    "ctrl-c": (-2, "ended by KeyboardInterrupt"),
    "with-exit": (0, "ended by sys.exit"),
    "with-error": (1, "ended by ValueError"),
    "with-ctrl-c": (-2, "ended by KeyboardInterrupt"),
    "sigterm": (-15, ""),  # Python does not handle it: nothing is said, and the state is kept.
}
QUICK = ("sys-exit-main", "close-in-finally")


@pytest.mark.parametrize("how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.chaos) for how in ENDS])
def test_program_that_ends_otherwise_keeps_the_state_and_says_so(run: LocalRun, how: str) -> None:
    code, said = ENDS[how]
    ended = train(run, how)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert ended.stderr.count(KEPT) == bool(said)
    assert train(run, "close", "2").stdout.split() == ["restored", "2"]
    wait_until(lambda: not run.files(), what="the end of the keeper")


def test_keeper_of_a_failed_launch_without_a_name_is_named_found_and_soon_gone(run: LocalRun) -> None:
    ended = train(run, "error", environ={"KEEPSTEP_RUN_ID": ""})
    named = re.search(r"this run has no id, it is called '(launch-[\d-]+)': no later start restores", ended.stderr)
    assert named, ended.stderr
    assert f"`keepstep release --run-id {named[1]}` frees it" in ended.stderr
    config = Config(runtime_dir=str(run.identity.runtime_dir))
    found = find_runs(config)
    assert [known.identity.run_id for known in found] == [named[1]]
    keeper = found[0].identity
    wait_until(
        lambda: fetch_status(keeper).keeper.lease_left_s is not None, what="the trainer's end, seen by its keeper"
    )
    assert (fetch_status(keeper).keeper.lease_left_s or 0) <= 60
    assert main(["release", "--runtime-dir", config.runtime_dir]) == 0
    assert run.files() == []


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["close", "with-return"])
def test_program_that_closes_has_finished(run: LocalRun, how: str) -> None:
    ended = train(run, how)
    assert ended.returncode == 0, ended.stderr
    assert KEPT not in ended.stderr
    assert UNPROTECTED not in ended.stderr
    wait_until(lambda: not run.files(), what="the end of the keeper")
