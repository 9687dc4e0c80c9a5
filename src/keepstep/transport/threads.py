"""Threads of a transport: named, counted, and joined when it closes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("keepstep")
JOIN_S = 10.0  # `close` waits this long for handlers that do not return, then logs the threads they block


class ThreadGroup:
    """Starts daemon threads and can wait for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread. Raises RuntimeError when the system cannot create one."""

        def run() -> None:
            try:
                work()
            except Exception:
                log.exception("the thread %s failed", name)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"keepstep-peer-{name}", daemon=True)
        with self._lock:  # `join` must not see a thread before it started, and `run` ends by taking the lock.
            thread.start()
            self._threads.add(thread)

    def join(self, timeout_s: float = JOIN_S) -> list[str]:
        """Wait for all threads but the caller. Returns the names of those that still run."""
        deadline = time.monotonic() + timeout_s
        caller = threading.current_thread()
        while True:
            with self._lock:
                others = [thread for thread in self._threads if thread is not caller]
            if not others or time.monotonic() >= deadline:
                return [thread.name for thread in others]
            others[0].join(min(0.2, max(0.0, deadline - time.monotonic())))
