"""Rate caps, rate meters and counters, shared by all connections of one keeper."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keepstep.config import PeersConfig

SLICE_BYTES = 256 << 10  # Moved between two checks of deadline and cap; still in the L2 cache when it is hashed.
SMALLEST_SLICE_BYTES = 4096
BURST_S = 0.02  # An idle moment of at most this length may be caught up.
LONGEST_SLEEP_S = 0.05  # A throttled stream checks this often whether it should stop.
METER_S = 1.0
# The keys are metric names. refused: by our server and by theirs. strangers: connections that did not authenticate.
# links: all that were ever made.
COUNTERS = (
    "messages_in", "messages_out", "messages_dropped",
    "fetched", "served", "refused", "bad_checksums", "failed", "links", "reconnects", "strangers",
)  # fmt: skip


class TokenBucket:
    """A rate cap. Turns are reserved in the order of the calls, so no stream starves another."""

    def __init__(
        self,
        rate_bytes_s: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`rate_bytes_s` = 0: no cap."""
        self.rate_bytes_s = rate_bytes_s
        self._now, self._sleep = now, sleep
        self.slice_bytes = SLICE_BYTES
        if rate_bytes_s:
            self.slice_bytes = max(SMALLEST_SLICE_BYTES, min(SLICE_BYTES, int(rate_bytes_s * BURST_S)))
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size_bytes: int, stopped: Callable[[], bool]) -> bool:
        """Wait until `size_bytes` more may move. False: `stopped` became true meanwhile."""
        if not self.rate_bytes_s:
            return True
        with self._lock:
            now = self._now()
            turn = max(self._free_at, now - BURST_S)
            self._free_at = turn + size_bytes / self.rate_bytes_s
        while (wait := turn - self._now()) > 0:
            if stopped():
                return False
            self._sleep(min(wait, LONGEST_SLEEP_S))
        return True

    def give_back(self, size_bytes: int) -> None:
        """Return what was taken and did not move."""
        if self.rate_bytes_s and size_bytes:
            with self._lock:
                self._free_at -= size_bytes / self.rate_bytes_s


class RateMeter:
    """Total and recent rate of one direction."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self._measured_at = time.monotonic()
        self._measured_total = 0
        self._rate = 0.0

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self.total += size_bytes

    def rate_bytes_s(self) -> float:
        """Rate over the last second or more: between the last two measurements."""
        with self._lock:
            now = time.monotonic()
            if (elapsed := now - self._measured_at) >= METER_S:
                self._rate = (self.total - self._measured_total) / elapsed
                self._measured_at, self._measured_total = now, self.total
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


class Traffic:
    """Settings, caps, meters and counters of both directions."""

    def __init__(self, config: PeersConfig, *, num_streams: int, timeout_s: float) -> None:
        self.config, self.num_streams, self.timeout_s = config, num_streams, timeout_s
        self.counters = TransferCounters(*COUNTERS)
        self.cap_in, self.cap_out = TokenBucket(config.rate_bytes_s), TokenBucket(config.rate_bytes_s)
        self.meter_in, self.meter_out = RateMeter(), RateMeter()

    def all(self) -> dict[str, float]:
        """Every counter, total and recent rate."""
        return self.counters.all() | {
            "bytes_in": float(self.meter_in.total),
            "bytes_out": float(self.meter_out.total),
            "rate_in_bytes_s": self.meter_in.rate_bytes_s(),
            "rate_out_bytes_s": self.meter_out.rate_bytes_s(),
        }
