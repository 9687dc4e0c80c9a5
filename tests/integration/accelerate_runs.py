"""Runs of `train_accelerate.py`: without keepstep, and with it under SIGKILL, compared bit for bit. Not a test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keepstep.testing.run import LocalRun, wait_until

SCRIPT = Path(__file__).with_name("train_accelerate.py")
END_S = 60.0


class AccelerateRun:
    """The files and the keeper of one run."""

    def __init__(self, options: dict[str, Any], ranks: int = 1) -> None:
        self.run = LocalRun("accelerate")
        self.out = Path(tempfile.mkdtemp(prefix="accelerate-", dir="/tmp"))
        self.options, self.ranks = {**options, "out": str(self.out)}, ranks
        self.environ = {**self.run.environ, "OMP_NUM_THREADS": "1"}

    @property
    def arguments(self) -> list[str]:
        return [json.dumps(self.options)]

    def read(self, name: str, rank: int = 0) -> list[str]:
        path = self.out / f"{name}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def final(self, rank: int) -> dict[str, Any]:
        return json.loads((self.out / f"final-{rank}.json").read_text())

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.out.glob("log*")))

    def check_no_trace(self) -> None:
        run = self.run
        wait_until(
            lambda: not run.processes() and not run.files(), timeout_s=END_S,
            what=lambda: f"the end of {run.processes()} and {run.files()} after a normal end",
        )  # fmt: skip

    def clear(self) -> None:
        for pid in self.run.processes():
            os.kill(pid, signal.SIGKILL)
        for directory in (self.out, self.run.directory):
            shutil.rmtree(directory, ignore_errors=True)


class AccelerateServer:
    """Forks lives on demand from a process that has imported torch and accelerate."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def live(self, run: AccelerateRun) -> list[int]:
        """One life of all ranks; returns their exit codes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"argv": run.arguments, "env": run.environ, "ranks": run.ranks, "log": str(run.out)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def finish(self, run: AccelerateRun) -> None:
        """Lives until one ends normally, and one more than there are kills at most."""
        for _ in range(len(run.options.get("kills", [])) + 1):
            codes = self.live(run)
            if not any(codes):
                return
            assert -signal.SIGKILL in codes, f"ended with {codes}: {run.log()}"
        raise AssertionError(f"killed more often than asked: {run.read('lives')}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def compare_with_bare(server: AccelerateServer, kills: list[str], *, ranks: int = 1, **options: Any) -> None:
    """The killed run must end as the one without keepstep, and each batch, repeated ones too, must be the same."""
    bare = AccelerateRun({**options, "bare": True}, ranks)
    killed = AccelerateRun({**options, "kills": kills}, ranks)
    try:
        server.finish(bare)
        server.finish(killed)
        killed.check_no_trace()
        check_equal(bare, killed)
        lives = killed.read("lives")
        assert len(lives) == len(kills) + 1, f"{lives} after {kills}"
        assert "None" not in lives[1:] or "0.0" in kills[0], f"nothing was restored: {lives}"
    finally:
        bare.clear()
        killed.clear()


def check_equal(bare: AccelerateRun, killed: AccelerateRun) -> None:
    for rank in range(bare.ranks):
        expected = dict(line.split(maxsplit=1) for line in bare.read("losses", rank))
        found = [line.split(maxsplit=1) for line in killed.read("losses", rank)]
        for where, line in found:
            assert line == expected[where], f"rank {rank} differs at {where}: {line}, not {expected[where]}"
        assert {where for where, _ in found} == expected.keys()
        for name, value in bare.final(rank).items():
            assert killed.final(rank)[name] == value, f"rank {rank} ended with another {name}"
