"""Containers: a /dev/shm of one mebibyte does not matter, a cgroup too small is one clear error before step 0."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.testing.run import LocalRun, wait_until

TRAINER = Path(__file__).with_name("trainer.py")
root_only = pytest.mark.skipif(os.getuid() != 0, reason="namespaces and cgroups need root")


@root_only
def test_a_dev_shm_of_one_mebibyte_does_not_matter() -> None:
    with LocalRun() as run:
        script = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {TRAINER} 3 32"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            env={**os.environ, **run.environ}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('"survives": "PROCESS"') == 3


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup of this test's own, v1 or v2."""
    base = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes"
    if not base.is_dir():
        base, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = base / f"keepstep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: _is_removed(group), timeout_s=10, what=lambda: f"the end of {group}")


def _is_removed(group: Path) -> bool:
    """A process that has just ended still counts for a moment."""
    try:
        group.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


@root_only
def test_a_cgroup_that_is_too_small_is_one_clear_error_before_the_first_step() -> None:
    with LocalRun() as run, memory_cgroup(1 << 30) as group:
        script = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} {TRAINER} 3 600"
        done = subprocess.run(
            ["sh", "-c", script],
            env={**os.environ, **run.environ}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("keepstep.errors.KeeperError: the arena of local rank 0 (2 slots) needs 1.1"), last
        for text in ("can be had", "cgroup limit: 1.00 GiB with", "in use", "MemAvailable", "try:"):
            assert text in last, last
        assert '"step"' not in done.stdout
        run.end()
