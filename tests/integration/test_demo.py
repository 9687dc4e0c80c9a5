"""`keepstep demo` as a user runs it, only shorter: real trainers, real kills, and nothing left when it is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.demo.comparison import VERDICT
from keepstep.demo.run_record import FAULTS
from keepstep.testing.run import wait_until

STEPS = 36
"""Leaves some steps after the last failure: it waits for a protected version, and a late one may find the end."""
DEMO_S = 400.0
"""It takes 90 s on two idle cores, and four minutes where six others want them."""


MARK = f"DEMO_TEST={os.getpid()}"
"""In the environment of everything that these tests start."""


def start_demo(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "keepstep.cli.main", "demo", f"--steps={STEPS}", f"--out={out}"]
    environ = {**os.environ, "DEMO_TEST": str(os.getpid())}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_demo(out: Path) -> tuple[int, str]:
    with start_demo(out) as demo:
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


@pytest.mark.timeout(450)
def test_the_demo_ends_identical_and_leaves_its_results_and_nothing_else(tmp_path: Path) -> None:
    code, said = run_demo(tmp_path)
    assert code == 0, said
    assert said.rstrip().endswith(VERDICT)

    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["identical"]
    assert [row["failure"] for row in summary["failures"]] == [fault.name for fault in FAULTS]
    assert [row["source"] for row in summary["failures"]] == ["memory", None, "parity", "parity"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    assert [run["leftovers"] for run in summary["runs"].values()] == [[], []]
    assert find_processes(MARK) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.chaos)])
def test_an_interrupted_demo_ends_what_it_started(number: signal.Signals, tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    try:
        wait_until(lambda: len(find_processes(MARK)) > 3, timeout_s=60, what="the nodes")
        demo.send_signal(number)
        said, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], said
    assert "Traceback" not in said
    assert find_processes(MARK) == []
    assert json.loads((tmp_path / "summary.json").read_bytes())["verdict"] == "interrupted"
