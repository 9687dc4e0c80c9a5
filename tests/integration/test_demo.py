"""`keepstep demo` as a user runs it, only shorter: real trainers, real kills, and nothing left when it is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli.story.comparison import VERDICT
from keepstep.cli.story.record import FAULTS

STEPS = 20
"""Leaves two steps after the last failure: with one, a late signal may find the training done."""
DEMO_S = 130.0
"""It takes 40 to 60 s on two busy cores; the test's own limit leaves time to end it in order."""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where the demo puts its runtime directories. Short: a unix socket path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ks-", dir="/tmp") as directory:
        yield Path(directory)


def run_demo(*, out: Path, scratch: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "keepstep.cli.main", "demo", f"--steps={STEPS}", f"--out={out}"]
    environ = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        try:
            said, _ = demo.communicate(timeout=DEMO_S)
        except subprocess.TimeoutExpired:
            demo.send_signal(signal.SIGINT)  # as Ctrl-C does: the demo ends what it started
            raise
    return demo.returncode, said


def find_processes(mark: str) -> list[int]:
    """Every process that was started with `mark` in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or not ours to read
    return found


@pytest.mark.timeout(170)
def test_the_demo_ends_identical_and_leaves_its_results_and_nothing_else(tmp_path: Path, scratch: Path) -> None:
    code, said = run_demo(out=tmp_path, scratch=scratch)
    assert code == 0, said
    assert said.rstrip().endswith(VERDICT)

    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["identical"]
    assert [row["failure"] for row in summary["failures"]] == [fault.name for fault in FAULTS]
    assert [row["source"] for row in summary["failures"]] == ["memory", "memory", None, "memory"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    assert [run["leftovers"] for run in summary["runs"].values()] == [[], []]
    assert find_processes(f"TMPDIR={scratch}") == []
    assert list(scratch.glob("keepstep*")) == [], "torch leaves directories of its own there; keepstep does not"
