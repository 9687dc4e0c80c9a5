"""How the workers of this launcher ended: read from the kernel before torch's agent reaps them.

torch's agent knows the exit codes and tells its rendezvous handler nothing. So a thread waits for children with
WNOWAIT, which leaves them to be reaped by those who started them. An exit that the agent reaped first is not known.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keepstep.control.spawn import ALREADY_RUNNING

POLL_S = 0.02  # Between two looks at children that have ended and are not reaped yet.
IDLE_S = 0.1  # While there are no children.
TOGETHER_S = 1.0  # Who ends so soon after the first one counts too: one of them may be the cause.
# Signals that a process raises by itself. All others, SIGKILL above all, come from outside: another process, the OOM
# killer, a scheduler.
OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)


@dataclass(frozen=True)
class WorkerExit:
    """The end of one child with a failure."""

    pid: int
    code: int  # Exit code; negative: the signal that ended it, as in subprocess.
    at: float

    @property
    def killed(self) -> bool:
        """Whether another process ended it."""
        return self.code < 0 and -self.code not in OWN_SIGNALS

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"signal {-self.code}"


class WorkerExits:
    """The failed exits of a round, in the order in which they happened."""

    def __init__(self) -> None:
        self._exits: dict[int, WorkerExit] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="keepstep-exits", daemon=True)

    def begin(self) -> None:
        """Forget the exits of the last round: workers are started now."""
        with self._lock:
            self._exits = {}
        if self._thread.ident is None:
            self._thread.start()

    def first(self) -> WorkerExit | None:
        """Who failed first; of those that failed within a second, one that was killed by SIGKILL."""
        with self._lock:
            exits = sorted(self._exits.values(), key=lambda end: end.at)
        if not exits:
            return None
        together = [end for end in exits if end.at - exits[0].at <= TOGETHER_S]
        # The agent ends the others by SIGTERM, and only much later by SIGKILL.
        return next((end for end in together if end.code == -signal.SIGKILL), exits[0])

    def _watch(self) -> None:
        while True:
            ended, pause_s = None, IDLE_S
            with contextlib.suppress(ChildProcessError):  # There are no children.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # Blocks until there is one to be reaped.
            if ended is not None:
                pause_s = POLL_S
                for pid in {ended.si_pid, *_children()}:  # It names only the oldest of them.
                    self._look_at(pid)
            time.sleep(pause_s)

    def _look_at(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):  # Reaped since.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is None:
                return
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            # The process that starts a keeper is no worker; it ends so when another one runs.
            if code not in (0, ALREADY_RUNNING):
                with self._lock:
                    self._exits.setdefault(pid, WorkerExit(pid, code, time.monotonic()))


def _children() -> Iterator[int]:
    """The children of this process, those that have ended included."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # The thread has ended.
            yield from map(int, (task / "children").read_text().split())
