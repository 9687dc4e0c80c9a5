"""What a user sees of long preparations: a bar on a terminal, a line in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("keepstep")

SLOW_S = 1.0
LARGE_BYTES = 4 << 30
"""the keeper has as much memory ready in about a second, and nothing is said about it"""


@contextmanager
def waiting_for(size_bytes: int, *, enabled: bool) -> Iterator[None]:
    """While the keeper reserves memory: how far it has come only the kernel knows."""
    if not enabled or size_bytes < LARGE_BYTES:
        yield
        return
    text = f"keepstep waits for {size_bytes / (1 << 30):.1f} GiB of memory"
    log.info(text)
    if not sys.stderr.isatty():
        yield
        return
    with _bar() as bar:
        bar.add_task(text, total=None)
        yield


class ProgressLine:
    """Shown when it has taken a while."""

    def __init__(self, total_bytes: int, *, enabled: bool) -> None:
        self._total, self._enabled = total_bytes, enabled
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Callable[[int], None]:
        return self._show

    def _show(self, done: int) -> None:
        if not self._enabled or time.monotonic() - self._started < SLOW_S:
            return
        if self._bar is None and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("keepstep prepares its memory", total=self._total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        took = time.monotonic() - self._started
        if self._enabled and took >= SLOW_S:
            log.info("prepared %.2f GiB of memory in %.1f s", self._total / (1 << 30), took)


def _bar() -> Any:
    from rich.console import Console  # not before it is wanted
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)
