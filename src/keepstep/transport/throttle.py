"""How fast bytes may go, and how fast they went. Shared by all streams of a keeper, each way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE_BYTES = 256 << 10
"""what is moved between two looks at the deadline and the cap; still in the second-level cache when it is hashed"""
SMALLEST_SLICE_BYTES = 4096
BURST_S = 0.02
"""how much of an idle moment may be made up for"""
LONGEST_NAP_S = 0.05
"""how long a stream sleeps before it looks whether it should stop"""
METER_S = 1.0


class TokenBucket:
    """A token bucket. Turns are reserved in the order of asking, so no stream starves another."""

    def __init__(
        self,
        rate_bytes_s: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._now, self._sleep = now, sleep
        self.slice_bytes = SLICE_BYTES
        if rate_bytes_s:
            self.slice_bytes = max(SMALLEST_SLICE_BYTES, min(SLICE_BYTES, int(rate_bytes_s * BURST_S)))
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size_bytes: int, stopped: Callable[[], bool]) -> bool:
        """Wait until `size_bytes` more may move. False: told to stop meanwhile."""
        if not self.rate_bytes_s:
            return True
        with self._lock:
            now = self._now()
            turn = max(self._free_at, now - BURST_S)
            self._free_at = turn + size_bytes / self.rate_bytes_s
        while (wait := turn - self._now()) > 0:
            if stopped():
                return False
            self._sleep(min(wait, LONGEST_NAP_S))
        return True

    def give_back(self, size_bytes: int) -> None:
        """Of what was taken, this did not move."""
        if self.rate_bytes_s and size_bytes:
            with self._lock:
                self._free_at -= size_bytes / self.rate_bytes_s


class RateMeter:
    """Total and recent rate of one direction."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._mark = 0
        self._rate = 0.0

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self.total += size_bytes

    def rate_bytes_s(self) -> float:
        """Over the last second or more: since the look before the last."""
        with self._lock:
            now = time.monotonic()
            if (elapsed := now - self._since) >= METER_S:
                self._rate = (self.total - self._mark) / elapsed
                self._since, self._mark = now, self.total
            return self._rate


class TransferCounters:
    """Named totals that several threads add to."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(names, 0.0)

    def add(self, name: str, count: float = 1) -> None:
        with self._lock:
            self._totals[name] += count

    def all(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


COUNTERS = (
    "messages_in", "messages_out", "messages_dropped",
    "fetched", "served", "refused", "bad_checksums", "failed", "links", "reconnects", "strangers",
)  # fmt: skip
"""refused: by our server and by theirs. strangers: connections that did not authenticate. links: ever made."""
