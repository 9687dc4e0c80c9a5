"""A thread that moves bytes until it is done or stopped."""

from __future__ import annotations

import threading


class TransferThread(threading.Thread):
    """Subclasses implement `run` and check `stopped`. Its end is a result in the keeper's queue, not an exception."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"keepstep-{name}", daemon=True)
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Ask it to end. Until it has, what it writes to is its own."""
        self.stopped.set()
