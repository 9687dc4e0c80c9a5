"""Runs `keepstep check` on the programs of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")


def check(
    tmp_path: Path, program: str, *options: str, launcher: tuple[str, ...] = (), **environ: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and the report. `launcher`: arguments between the interpreter and the program."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "keepstep.cli.main", "check", "--report", str(report), *options, "--"]
    command += [sys.executable, *launcher, str(PROGRAMS / program)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    with tempfile.TemporaryDirectory(prefix="ks-t-", dir="/tmp") as parent:
        environ["TMPDIR"] = parent
        done = subprocess.run(command, env=kept | environ, capture_output=True, text=True, timeout=590, check=False)
        assert not list(Path(parent).glob("ks-check-*")), "a check leaves nothing"
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return done.returncode, done.stdout + done.stderr, found
