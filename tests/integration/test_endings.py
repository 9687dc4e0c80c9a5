"""What each end of a program leaves behind, and what it says: real trainers and keepers, without configured logging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.cli.keepers import find_runs
from keepstep.cli.main import main
from keepstep.config import Config
from keepstep.control.status import fetch_status
from keepstep.testing.run import LocalRun, wait_until

SCRIPT = Path(__file__).with_name("ending_trainer.py")
KEPT = "the keeper of run 'test-run' keeps its last complete step"
EXITED = "the last start ended by sys.exit after step 2; if that was its last step, the run has finished"
HOW_ON = "A loop over more steps goes on from here; to begin anew, end this program, then `keepstep release --run-id"
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
    again = train(run, "close", "2")
    assert again.stdout.split() == ["restored", "2"]
    assert again.stderr.count("keepstep: restored step 2 of run 'test-run' from memory, ") == 1
    assert re.search(r"from memory, [\d.]+ (B|KiB|MiB) in [\d.]+ s", again.stderr)
    assert again.stderr.count(EXITED) == (how in ("sys-exit-main", "with-exit", "exit-code"))
    assert again.stderr.count(HOW_ON) == again.stderr.count(EXITED)
    wait_until(lambda: not run.files(), what="the end of the keeper")


def test_second_part_of_a_program_under_the_same_run_is_warned_of(run: LocalRun) -> None:
    ended = train(run, "close-twice")
    assert ended.stdout.split() == ["restored", "None"] * 2
    assert ended.stderr.count("run 'test-run' has finished in this process before") == 1
    assert ended.returncode == 0, ended.stderr


def test_start_after_one_without_a_complete_snapshot_says_that_it_begins_anew(run: LocalRun) -> None:
    anew = "keepstep: the last start of run 'test-run' left no complete snapshot: beginning anew\n"
    first = train(run, "error", "-1")
    assert first.returncode == 1, first.stderr
    assert "beginning anew" not in first.stderr
    second = train(run, "error", "0")
    assert second.stdout.split() == ["restored", "None"]
    assert second.stderr.count(anew) == 1
    third = train(run, "close", "0")
    assert third.stdout.split() == ["restored", "0"]
    assert "beginning anew" not in third.stderr
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


def test_restore_logs_one_line_on_rank_0_only(run: LocalRun) -> None:
    """Two ranks with configured logging; rank 1 fails after the last step, when rank 0 has closed as finished."""
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOGGING": "1"}
    for start in range(2):
        with ThreadPoolExecutor(2) as pool:
            ends = ["close", "error" if start == 0 else "close"]
            told = [ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            first, second = pool.map(lambda how, environ: train(run, how, "2", environ=environ), ends, told)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    lines = [line for line in first.stderr.splitlines() if "restored step" in line]
    assert len(lines) == 1
    assert lines[0].startswith("INFO:keepstep:restored step 2 of run 'test-run' from memory, ")
    assert "step 2 was the last step of a finished run: some of its ranks had closed" in first.stderr
    assert second.stderr == ""
    wait_until(lambda: not run.files(), what="the end of the keeper")


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["close", "with-return"])
def test_program_that_closes_has_finished(run: LocalRun, how: str) -> None:
    ended = train(run, how)
    assert ended.returncode == 0, ended.stderr
    assert KEPT not in ended.stderr
    assert UNPROTECTED not in ended.stderr
    wait_until(lambda: not run.files(), what="the end of the keeper")
