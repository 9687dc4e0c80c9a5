"""A private run on this machine: a runtime directory, its keeper, and a check that nothing of it remains.

    with LocalRun() as run:
        with keepstep.Snapshotter(state, run.config()) as snapshots: ...
        run.kill_keeper()

Leaving the block releases the keeper and raises when a process or a file of the run is still there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.control.client import KeeperClient
from keepstep.control.messages import (
    Done,
    Hold,
    Release,
    StatusIs,
    Verified,
    VerifyResult,
    WantArenas,
    WantStatus,
    WantVerify,
)
from keepstep.errors import KeeperError
from keepstep.identity import Identity
from keepstep.types import Status

END_S = 20.0
M = TypeVar("M")


class LocalRun:
    """A run with a directory of its own, and all processes that are started for it."""

    def __init__(self, run_id: str = "test-run", node_id: str = "test-node") -> None:
        # Short: a unix socket path has 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="ks-", dir="/tmp"))
        self.identity = Identity(run_id, node_id, self.directory / "r", outlives_launch=True)

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for a process of this run."""
        return {
            "KEEPSTEP_RUN_ID": self.identity.run_id,
            "KEEPSTEP_NODE_ID": self.identity.node_id,
            "KEEPSTEP_RUNTIME_DIR": str(self.identity.runtime_dir),
        }

    def config(self, **settings: Any) -> Config:
        """Settings for a Snapshotter of this run in this process."""
        identity = self.identity
        return Config(
            run_id=identity.run_id, node_id=identity.node_id, runtime_dir=str(identity.runtime_dir), **settings
        )

    # The keeper

    def ask(self, message: Any, expect: type[M], *, timeout_s: float = 20.0) -> tuple[M, list[int]]:
        client = KeeperClient(self.identity, "cli")
        try:
            return client.request(message, expect, timeout_s=timeout_s)
        finally:
            client.close()

    def status(self) -> Status:
        return msgspec.json.decode(self.ask(WantStatus(), StatusIs)[0].json, type=Status)

    def verify(self) -> list[VerifyResult]:
        """Have the keeper verify every sealed slot, byte for byte."""
        return self.ask(WantVerify(), Verified)[0].results

    @contextlib.contextmanager
    def arenas(self) -> Iterator[list[Arena]]:
        """The arenas by local rank, for inspection or for damage."""
        _, fds = self.ask(WantArenas(), Hold)
        with contextlib.ExitStack() as stack:
            for fd in fds:
                stack.callback(os.close, fd)
            arenas = [Arena.adopt(fd, run_id=self.identity.run_id, node_id=self.identity.node_id) for fd in fds]
            yield sorted(arenas, key=lambda arena: (arena.header.local_index, arena.header.generation))

    def keeper_pid(self) -> int:
        return keeper_pid(self.identity)

    def kill_keeper(self) -> int:
        """SIGKILL the keeper and wait for its end. Returns the pid."""
        pid = self.keeper_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), what=f"the end of keeper {pid}")
        return pid

    # The end

    def end(self) -> None:
        """Release the keeper. Raises AssertionError if a process or a file remains."""
        released = False
        try:
            with contextlib.suppress(KeeperError):
                self.ask(Release(force=True), Done)
                released = True
            # A killed keeper that no process replaces leaves its files behind.
            wait_until(
                lambda: not self.processes() and not (released and self.files()),
                timeout_s=END_S,
                what=lambda: f"the end of processes {self.processes()} and files {self.files()}",
            )
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.directory, ignore_errors=True)

    def files(self) -> list[str]:
        return [str(path) for path in self.identity.runtime_dir.rglob("*")]

    def processes(self) -> list[int]:
        """Every other process that was started with this run in its environment."""
        return marked_processes(f"KEEPSTEP_RUNTIME_DIR={self.identity.runtime_dir}".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def wait_until(
    condition: Callable[[], Any], *, timeout_s: float = 20.0, what: str | Callable[[], str] = "a condition"
) -> None:
    """Poll a condition. Raises AssertionError if it is not true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs. One that waits to be reaped does not."""
    if pid <= 0:
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def keeper_pid(identity: Identity) -> int:
    """The pid on the keeper's card; 0 when there is none. The card of a killed keeper stays."""
    try:
        return int(json.loads(identity.card.read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError):
        return 0


def marked_processes(*marks: bytes) -> list[int]:
    """Every other living process that was started with all of these (NAME=value) in its environment."""
    pids = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid != os.getpid() and set(marks) <= set(_environment(pid)) and alive(pid):
            pids.append(pid)
    return pids


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
