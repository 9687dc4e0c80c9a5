"""SIGTERM and SIGHUP as an exception, for commands that must clean up (a frozen keeper, a cluster of their own)."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received. Propagates like Ctrl-C: no `except Exception` stops it."""


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise, so that every `finally` runs; a second one is ignored meanwhile."""
    caught = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for caught_signal in caught:
            signal.signal(caught_signal, signal.SIG_IGN)
        raise TerminatedError(signal.Signals(number).name)

    before = {caught_signal: signal.signal(caught_signal, end) for caught_signal in caught}
    try:
        yield
    finally:
        for caught_signal, handler in before.items():
            signal.signal(caught_signal, handler)
