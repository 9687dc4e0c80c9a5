"""Lives of a Lightning fit: killed, started again, and compared with the fit without keepstep. Not a test."""

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

SCRIPT = Path(__file__).with_name("lightning_program.py")
MAX_LIVES = 40


class FitServer:
    """Forks lives on demand: importing Lightning for each would be most of the time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def live(self, fit: dict[str, Any], environ: dict[str, str]) -> int:
        """One life; returns its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"fit": fit, "env": environ}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())[0]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


class FitRecord:
    """The directory of one fit, through all its lives."""

    def __init__(self, **options: Any) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="fit-", dir="/tmp"))
        self.fit = {"out": str(self.out), **options}
        self.run = LocalRun("fit")

    def finish(self, server: FitServer) -> int:
        """Lives until one ends normally. Returns how many were killed."""
        for kills in range(MAX_LIVES):
            code = server.live(self.fit, self.run.environ)
            if not code:
                return kills
            assert code == -signal.SIGKILL, f"ended with {code}: {self.log()}"
        raise AssertionError(f"not finished after {MAX_LIVES} lives: {self.log()}")

    def launch(self, *, backend: str, timeout_s: float = 240) -> None:
        """All lives under torchrun, which restarts what is killed."""
        environ = {**os.environ, **self.run.environ, "OMP_NUM_THREADS": "1"}
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={self.fit['ranks']}",
            "--max-restarts=20", f"--rdzv-backend={backend}", "--rdzv-id=fit", "--rdzv-endpoint=localhost:0",
        ]  # fmt: skip
        with (self.out / "log").open("a") as log:
            done = subprocess.run(
                [*launcher, str(SCRIPT), "fit", json.dumps(self.fit)], env=environ, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, timeout=timeout_s, check=False,
            )  # fmt: skip
        assert done.returncode == 0, self.log()

    @property
    def num_killed(self) -> int:
        return len(list(self.out.glob("killed-*")))

    def check_no_trace(self) -> None:
        """After a normal end nothing is left: no keeper, no socket, no file."""
        run = self.run
        wait_until(
            lambda: not run.processes() and not run.files(), timeout_s=60,
            what=lambda: f"the end of {run.processes()} and {run.files()} after a normal end",
        )  # fmt: skip

    def rows(self, rank: int = 0) -> dict[str, set[str]]:
        """What was recorded, by what it is. Repeated steps record again."""
        rows: dict[str, set[str]] = {}
        for line in (self.out / f"rows-{rank}").read_text().splitlines():
            key, _, value = line.partition(" = ")
            rows.setdefault(key, set()).add(value)
        return rows

    def final(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.out / f"final-{rank}.json").read_text())

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.out.glob("log*")))

    def clear(self) -> None:
        for pid in self.run.processes():
            os.kill(pid, signal.SIGKILL)
        for directory in (self.out, self.run.directory):
            shutil.rmtree(directory, ignore_errors=True)


def compare(truth: FitRecord, other: FitRecord, ranks: int = 1) -> None:
    """Every value, of repeated steps too, is that of the fit without keepstep, and none is missing."""
    for rank in range(ranks):
        expected, found = truth.rows(rank), other.rows(rank)
        differing = [f"{key}: {expected.get(key)} {found.get(key)}" for key in expected | found
                     if expected.get(key) != found.get(key)]  # fmt: skip
        assert not differing, f"rank {rank}: {len(differing)} of {len(expected)} rows: {differing[:8]}"
        first, second = truth.final(rank), other.final(rank)
        assert first == second, f"rank {rank}: {[key for key in first if first[key] != second[key]]}"
