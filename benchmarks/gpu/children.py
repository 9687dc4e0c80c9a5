"""Each measurement runs in a process of its own, with a time box: a crash, a hang or a leak of one is its own.

A child writes into the results file itself. Its parent only adds `error` when it did not end well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from results import Results, say
from sizes import Task

from keepstep.testing.run import LocalRun

CHILD = Path(__file__).with_name("child.py")
LEASE_S = "60"
"""a keeper whose benchmark was killed with all its trainers goes after this, and its memory with it"""
ERROR_CHARS = 1500
LEAST_S = 5.0
"""with less than this left nothing is begun"""


@dataclass(frozen=True)
class Bench:
    """What every part needs: the results, and what its children are told."""

    results: Results
    task: Task
    """name and option are each child's own"""
    only: frozenset[str] = frozenset()
    """measurements to run; empty: all"""

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only

    def left_s(self) -> float:
        return self.task.deadline - time.monotonic()

    def give(self, name: str, option: str = "", *, box_s: float, scratch: str = "") -> Task:
        deadline = min(time.monotonic() + box_s, self.task.deadline)
        return replace(self.task, name=name, option=option, deadline=deadline, scratch=scratch)

    def run(self, task: Task, environ: dict[str, str], *keys: str) -> None:
        """Run a child to its end, or to the end of its box; `error` is put under `keys` when it does not end well."""
        name = " ".join(keys)
        say(f"{name}: begins, at most {task.deadline - time.monotonic():.0f} s")
        with tempfile.TemporaryFile() as errors:
            child = start(task, environ, errors=errors.fileno())
            try:
                status: int | None = child.wait(max(LEAST_S, task.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(child)
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()[-ERROR_CHARS:]
        if status == 0:
            return
        error = "not finished within its time box" if status is None else _ending(status, text)
        self.results.measure(*keys, "error", value=error)
        say(f"{name}: {error}")
        if text:
            print(text, flush=True)


@contextlib.contextmanager
def private_run(results: Results, key: str) -> Iterator[LocalRun]:
    """A keeper of its own; what it leaves behind is a finding, not the end of the benchmark."""
    run = LocalRun()
    try:
        yield run
    finally:
        try:
            run.end()
        except AssertionError as error:
            results.measure(key, "left_behind", value=str(error))
            say(f"{key}: left behind: {error}")


@contextlib.contextmanager
def scratch_directory(size_bytes: int = 0) -> Iterator[str]:
    """On tmpfs where that has room, so that nobody is measured by a disk."""
    shared_memory = Path("/dev/shm")
    roomy = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > size_bytes
    parent = str(shared_memory) if roomy else None
    with tempfile.TemporaryDirectory(prefix="kb-", dir=parent, ignore_cleanup_errors=True) as directory:
        yield directory


def start(task: Task, environ: dict[str, str], *, errors: int | None = None) -> subprocess.Popen[bytes]:
    own = {"KEEPSTEP_KEEPER_LEASE_S": LEASE_S, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(CHILD), task.encode()], env={**own, **os.environ, **environ}, stderr=errors,
        start_new_session=True,
    )  # fmt: skip


def end(child: subprocess.Popen[bytes]) -> None:
    """The child and what it started in its session. Its keeper has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ending(status: int, text: str) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return text.rpartition("\n")[2] or f"exit status {status}"
