"""Another user of the machine prepares the runtime directory, or serves the keeper's sockets: nothing is sent to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun

PROGRAM = Path(__file__).parent / "foreign_keeper.py"
LIAR = Path(__file__).parent / "lying_keeper.py"
REFUSED_S = 5.0  # on a busy machine; the attempts of a keeper that is only late go on for 30 s

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can play two users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which anybody may make files, as /tmp."""
    made = Path(tempfile.mkdtemp(prefix="ks-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("client", ["trainer", "launcher", "status", "command"])
@pytest.mark.parametrize("case", ["no socket", "socket", "socket of another user", "link"])
def test_nothing_is_sent_to_another_user(case: str, client: str, shared: Path) -> None:
    if (case, client) == ("socket of another user", "command"):
        pytest.skip("the command finds no card there, and connects to nothing")
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), case, client, str(shared)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    outcome = json.loads(ran.stdout)
    assert outcome["error"] in ("ForeignDirectoryError", "ForeignKeeperError", "KeeperError"), outcome
    named = "belongs to user 61001" if case == "socket of another user" else "is not a directory of this user"
    assert named in outcome["text"], outcome
    assert outcome["received"] == 0, outcome
    if case != "socket of another user":
        assert outcome["accepted"] == 0, outcome
    assert outcome["seconds"] < REFUSED_S, outcome


@pytest.fixture
def status_of_a_run(shared: Path) -> Path:
    """What a real keeper with one trainer reports, as a file."""
    with LocalRun() as run, keepstep.Snapshotter({"weights": torch.zeros(8)}, run.config()) as snapshots:
        snapshots.restore()
        path = shared / "status.json"
        path.write_bytes(msgspec.json.encode(run.status()))
    return path


@contextlib.contextmanager
def lying(shared: Path, pid: int, status: Path) -> Iterator[list[str]]:
    """A keeper that lies; the options that make a command ask it."""
    shared.chmod(0o755)
    liar = subprocess.Popen(
        [sys.executable, str(LIAR), str(shared / "r"), str(pid), str(status)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert liar.stdout is not None
        assert liar.stdout.readline() == "listening\n"
        yield ["--runtime-dir", str(shared / "r")]
    finally:
        liar.kill()
        liar.wait()
        if liar.stdout is not None:
            liar.stdout.close()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("drill", [["kill-trainer"], ["kill-node", "--force"]])
def test_roots_drill_signals_no_process_of_another_user(drill: list[str], shared: Path, status_of_a_run: Path) -> None:
    victim = subprocess.Popen(["sleep", "600"], user=61003)
    try:
        with lying(shared, victim.pid, status_of_a_run) as where:
            ran = command("drill", *drill, *where, "--yes")
        assert victim.poll() is None, ran.stdout
        state = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "S", "the process was stopped"
        if drill == ["kill-trainer"]:
            assert ran.returncode == 1
            assert f"process {victim.pid} does not belong to user 61001" in ran.stderr
    finally:
        victim.kill()
        victim.wait()


def test_no_escape_sequence_reaches_the_terminal(shared: Path, status_of_a_run: Path) -> None:
    arguments = [
        ["status"], ["status", "--json"], ["status", "--all"], ["verify"], ["plan", "--lost", "test-node"], ["inspect"],
        ["release"], ["drill", "kill-trainer", "--yes"], ["drill", "kill-node", "--yes"],
        ["drill", "cut-link", "--yes"],
    ]  # fmt: skip
    shown = 0
    with lying(shared, 0, status_of_a_run) as where:
        for each in arguments:
            ran = command(*each, *where)
            text = ran.stdout + ran.stderr
            assert "Traceback" not in text, text
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), f"{each}: {text!r}"
            shown += "owned" in text
    assert shown >= 5, "the commands show what the keeper sent"
