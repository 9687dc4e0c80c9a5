"""The processes of one run: those that carry its runtime directory in their environment, and no others.

Invariant: a signal reaches such a process only. It goes through a pidfd that is opened before the look at the
environment, so that a pid that changes hands in between is never hit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.errors import Error

POLL_S = 0.02


class Processes:
    """Finds and ends what was started with `runtime_dir`, this process itself excepted."""

    def __init__(self, runtime_dir: Path) -> None:
        self.mark = f"KEEPSTEP_RUNTIME_DIR={runtime_dir}".encode()

    def living(self) -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and self._owns(pid)]

    def wait_for_quiet(self, *, timeout_s: float) -> list[str]:
        """The processes that are still there after `timeout_s`, with their commands; empty once there are none."""
        wait_until(lambda: not self.living(), timeout_s=timeout_s)
        return [f"{pid} {read_command(pid)}" for pid in self.living()]

    def kill(self, pid: int) -> bool:
        """SIGKILL to one of our processes; False when there is no such process (any more)."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            # The handle first, then the look: the process looked at is the one that is hit.
            if not self._owns(pid):
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def end(self, *, timeout_s: float) -> None:
        """Killed, not asked: what is still here was left behind, and a keeper would stay for its whole lease."""

        def none_left() -> bool:
            living = self.living()
            for pid in living:
                self.kill(pid)
            return not living

        if not wait_until(none_left, timeout_s=timeout_s):
            raise Error(f"processes of the demo do not end: {self.living()}", hint="look at them with ps and end them")

    def _owns(self, pid: int) -> bool:
        """Zombies, strangers and processes of other users have no environment to read: never ours."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return self.mark in environment.split(b"\0")


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"
