"""A command that has something to put right (a frozen keeper, a cluster of its own) must not die without doing so."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP came. Passes where Ctrl-C passes: no `except Exception` stops it."""


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise, so that every `finally` runs; a second one is ignored meanwhile."""
    caught = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        raise TerminatedError(signal.Signals(number).name)

    before = {one: signal.signal(one, end) for one in caught}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
