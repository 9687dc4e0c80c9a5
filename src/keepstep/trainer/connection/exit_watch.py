"""How the program ends: a Snapshotter that nobody has closed is closed when the interpreter exits.

Training counts as finished only if the main code returned: the outermost frame of the main thread stopped at a return
instruction. An exception and `sys.exit` leave that frame at another instruction, whatever the exit code is. Where the
main code is not what trains (a thread, a child of multiprocessing, an interactive interpreter) nothing has finished.
A signal that Python does not handle, `os._exit` and SIGKILL end a process without any of this.
"""

from __future__ import annotations

import atexit
import dis
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager
from types import FrameType

log = logging.getLogger("keepstep")


class ExitWatch:
    """Leaves the `with` block of its owner when the program ends, as the main code ended. Cancelled by `cancel`."""

    def __init__(self, owner: AbstractContextManager[object]) -> None:
        self._owner, self._pid, self._thread = owner, os.getpid(), threading.current_thread()
        self._main = _outermost_frame()
        atexit.register(self._exit)

    def cancel(self) -> None:
        """The owner is closed."""
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        if os.getpid() != self._pid:
            return  # A forked child: the trainer is its parent.
        error = self._error()
        try:
            self._owner.__exit__(type(error) if error is not None else None, error, None)
        except Exception:
            log.exception("the Snapshotter could not be closed at the end of the program")

    def _error(self) -> BaseException | None:
        """What ended the main code; None: it returned."""
        raised: BaseException | None = getattr(sys, "last_value", None)
        if self._is_interactive() or self._thread is not threading.main_thread():
            return SystemExit()
        if raised is not None:
            return raised
        return None if has_returned(self._main) else SystemExit()

    def _is_interactive(self) -> bool:
        return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def has_returned(frame: FrameType) -> bool:
    """Whether a frame that no longer runs ended by a return."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _outermost_frame() -> FrameType:
    """The main code. It lives as long as the module that it runs, so that it keeps nothing alive."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
