"""Records of the state for `keepstep check`: digests of everything captured, at each `take` and after a restore.

Switched on by the environment variable `KEEPSTEP_CHECK` alone; without it nothing here runs. Correct before fast: the
devices are waited for, and every byte is read from the live objects, not from the snapshot.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.control.check_events import (
    AFTER,
    BEFORE,
    CHECK,
    KEPT,
    OPENED,
    REACHED,
    REFUSED,
    RESTORED,
    SKIPPED,
    TAKE,
    read_orders,
)
from keepstep.errors import Error
from keepstep.trainer.check.digests import RNG, read_state
from keepstep.trainer.check.event_log import EventLog, KillSwitch
from keepstep.trainer.check.step_watch import StepWatch
from keepstep.trainer.check.surroundings import read_surroundings
from keepstep.trainer.state.objects import LOADER, StateObjects

GRANT_S = 30.0  # `take` waits this long for a grant: a kill at step k must restore k or the step before it
COMPLETE_S = 60.0  # and this long until the snapshot is complete
PAUSE_S = 0.002
HELD_S = 600.0  # A trainer that reached the last step waits this long for its end.
GIVEN_UP = 75  # its exit code after that


class StateRecorder:
    """Writes the events of one trainer."""

    def __init__(self, directory: Path, objects: StateObjects, rank: int, world_size: int) -> None:
        self._objects = objects
        self._log, self._orders = EventLog(directory, rank, world_size), read_orders(directory)
        self._kills = KillSwitch(self._log, self._orders)
        self._watch = StepWatch(objects, self._kills)
        self._taken: set[int] = set()
        self._log.write(OPENED)
        self._watch.open(-1)

    @classmethod
    def from_environment(cls, objects: StateObjects, rank: int, world_size: int) -> StateRecorder | None:
        """None unless this process is under `keepstep check`."""
        directory = os.environ.get(CHECK)
        return cls(Path(directory), objects, rank, world_size) if directory else None

    def restored(self, step: int | None) -> None:
        """Record what the live objects hold after `restore()`."""
        output, size = _output()
        if step is None:
            self._log.write(RESTORED, output=output, output_bytes=size)
        else:
            # Asking a loader for its state may build its iterator.
            loaders = {item.path for item in self._objects.of(LOADER)}
            state = {path: value for path, value in read_state(self._objects).items() if not _is_below(path, loaders)}
            self._log.write(RESTORED, step=step, state=state, output=output, output_bytes=size)
        self._watch.open(-1 if step is None else step)

    def refused(self, error: Exception) -> None:
        """Record why `restore()` raised."""
        self._log.write(REFUSED, text=str(error))

    def begin_take(self, step: int, *, in_batches: bool) -> None:
        """Record the state as it is now, before anything of it is captured."""
        output, size = _output()
        trace = self._watch.finish(in_batches)
        try:
            state, text = read_state(self._objects), ""
        except Error as error:
            state, text = {}, str(error)
        around = read_surroundings(self._objects)
        self._log.write(
            TAKE, step=step, text=text, state=state, around=around, trace=trace, output=output, output_bytes=size
        )
        self._taken.add(step)
        self._kills.strike(step, BEFORE)

    def end_take(self, step: int, reason: str) -> None:
        """Record the outcome. `reason`: why the snapshot was skipped or void."""
        self._log.write(SKIPPED if reason else KEPT, step=step, text=reason)
        self._kills.strike(step, AFTER)
        limit, last = self._orders.takes, self._orders.last_step
        if (limit and len(self._taken) >= limit) or (last >= 0 and step >= last):
            self._log.write(REACHED, step=step)
            time.sleep(HELD_S)  # The check ends the run.
            os._exit(GIVEN_UP)
        self._watch.open(step)


def wait_for(is_done: Callable[[], bool], timeout_s: float = GRANT_S) -> None:
    """Wait until it is done, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)


def _is_below(path: str, tops: set[str]) -> bool:
    return any(path == top or path.startswith((f"{top}.", f"{RNG}.{top}.")) for top in tops)


def _output() -> tuple[str, int]:
    """The file that standard output is, and its length; nothing where it is no file."""
    try:
        sys.stdout.flush()
        path = os.readlink("/proc/self/fd/1")
        return (path, os.fstat(1).st_size) if os.path.isfile(path) else ("", -1)
    except (OSError, ValueError, AttributeError):
        return "", -1
