"""`keepstep check` on programs as a user writes them: exact ones pass, others are found with their cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs")


def check(tmp_path: Path, program: str, *options: str, **environ: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and the report."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "keepstep.cli.main", "check", "--report", str(report), *options, "--"]
    command += [sys.executable, str(PROGRAMS / program)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    with tempfile.TemporaryDirectory(prefix="ks-t-", dir="/tmp") as parent:
        environ["TMPDIR"] = parent
        done = subprocess.run(command, env=kept | environ, capture_output=True, text=True, timeout=115, check=False)
        assert not list(Path(parent).glob("ks-check-*")), "a check leaves nothing"
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return done.returncode, done.stdout + done.stderr, found


@pytest.mark.timeout(120)
def test_batch_that_was_fetched_ahead_is_found(tmp_path: Path) -> None:
    code, text, report = check(tmp_path, "prefetch.py", "--steps", "6", "--kills", "1")
    assert code == 1, text
    assert report["result"]["cause"]["name"] == "outside", text
    assert report["result"]["difference"]["step"] == 1, text


@pytest.mark.timeout(120)
def test_batch_that_is_part_of_the_state_is_exact(tmp_path: Path) -> None:
    code, text, report = check(tmp_path, "prefetch.py", "--steps", "6", "--kills", "1", CARRIED="1")
    assert code == 0, text
    assert report["result"]["restored"] == [0]
