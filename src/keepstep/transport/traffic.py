"""What all streams of one keeper share: the settings, the rate caps, the meters and the counters."""

from __future__ import annotations

from keepstep.config import PeersConfig
from keepstep.transport.throttle import COUNTERS, RateMeter, TokenBucket, TransferCounters


class Traffic:
    """Both ways."""

    def __init__(self, config: PeersConfig, *, num_streams: int, timeout_s: float) -> None:
        self.config, self.num_streams, self.timeout_s = config, num_streams, timeout_s
        self.counters = TransferCounters(*COUNTERS)
        self.cap_in, self.cap_out = TokenBucket(config.rate_bytes_s), TokenBucket(config.rate_bytes_s)
        self.meter_in, self.meter_out = RateMeter(), RateMeter()

    def all(self) -> dict[str, float]:
        return self.counters.all() | {
            "bytes_in": float(self.meter_in.total),
            "bytes_out": float(self.meter_out.total),
            "rate_in_bytes_s": self.meter_in.rate_bytes_s(),
            "rate_out_bytes_s": self.meter_out.rate_bytes_s(),
        }
