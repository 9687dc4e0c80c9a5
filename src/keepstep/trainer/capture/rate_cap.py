"""The rate cap of copies after `take` (`take.rate_bytes_s`): a pause after each copy, until an optimizer waits."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.trainer.state.optimizer_fence import CopyGate


class RateCap:
    """Bytes per second that copies after `take` may read; 0: no cap."""

    def __init__(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s

    def pace(self, size_bytes: int, gates: Iterable[CopyGate]) -> None:
        """Pause for as long as a copy of this size may take, unless an optimizer waits at one of these gates."""
        if self.rate_bytes_s:
            gate = min(gates, key=id)
            if not gate.waited_for.is_set():
                gate.waited_for.wait(size_bytes / self.rate_bytes_s)
