"""Streams and staging memory of each CUDA device that snapshots are copied from, and how much of a snapshot is staged.

What can be copied before the optimizer writes again is copied straight from the live tensors (direct). The rest is
staged: cloned on the device just before the update and copied from the clone. Clones cost device memory and a little
time, waiting costs more, so the staged part is as small as the last snapshots allow: after each one it is known by how
much the direct copies ended too early or too late. Host and device are at different places in the program, so nothing
but that measurement can decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from keepstep.config import TakeConfig
from keepstep.parity.gpu import batches as parity

PIECE_BYTES = 64 << 20  # Size of one copy: small enough to pace, large enough for link speed.
MARGIN_S = 0.006  # Direct copies should end this long before the update, because steps vary.
TRUST = 0.25  # Share of a measured spare time that is used at once: one long step must not make the next one wait.
TURN_BYTES = PIECE_BYTES  # Copied on one stream before the other one has its turn: 1.2 ms at 55 GB/s.
STAGING_FREE_SHARE = 0.05  # of the free device memory; the smaller of this and take.staging_share counts


class DeviceLanes:
    """One DeviceLane per device: made in restore() where the state is known then, else with the first snapshot."""

    def __init__(self, config: TakeConfig, *, window_scale: float = 1.0) -> None:
        """`window_scale`: factor on the bytes that the staging policy expects to be copied in time."""
        self._config, self._window_scale = config, window_scale
        self._lanes: dict[torch.device, DeviceLane] = {}
        self._cold: list[DeviceLane] = []
        self._codes: set[tuple[int, int]] = set()

    def of(self, device: torch.device) -> DeviceLane:
        if device not in self._lanes:
            self._lanes[device] = DeviceLane(device, 0)
        return self._lanes[device]

    def prepare(self, sizes: dict[torch.device, int], codes: set[tuple[int, int]]) -> None:
        """Allocate memory for clones, for states of these sizes. `codes`: (k, m) of the parity to compute."""
        self._codes = codes
        for device, size_bytes in sizes.items():
            if device not in self._lanes:
                lane = DeviceLane(device, self._budget(device, size_bytes), scale=self._window_scale)
                self._lanes[device] = lane
                self._cold.append(lane)

    def warm_up(self) -> None:
        """Load all kernels that the first snapshot needs, on a thread of the caller's choice."""
        while self._cold:
            self._cold[-1].warm_up(self._codes)
            self._cold.pop()

    def _budget(self, device: torch.device, size_bytes: int) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        wanted = min(self._config.staging_share * size_bytes, STAGING_FREE_SHARE * free_bytes)
        return int(wanted) // PIECE_BYTES * PIECE_BYTES

    def queued_work(self) -> QueuedWork:
        """Mark what training has queued on these devices up to now."""
        return QueuedWork(list(self._lanes))

    def settle(self) -> None:
        """Wait for everything that captures queued: copies of a failed snapshot still write into its slot."""
        for lane in self._lanes.values():
            lane.cloning.synchronize()
            lane.copies.synchronize()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Queue kernels in this context on streams that wait for no copy."""
        with ExitStack() as streams:
            for lane in self._lanes.values():
                streams.enter_context(torch.cuda.stream(lane.checking))
            yield


class QueuedWork:
    """What training had queued on some CUDA devices at one moment: an event at the end of each current stream."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def is_pending(self) -> bool:
        """Whether a device has not done all of it. Does not block."""
        return not all(event.query() for event in self._events)


class CopyStreams:
    """Two streams for copies to the host, used in turn: what is queued runs in order, as on one stream.

    The copy engine goes on with one stream for as long as it has work there. A loss that training reads with `.item()`
    would wait for the whole snapshot. Where one stream ends and the other must wait for it, the engine serves others.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._queued_bytes = 0  # In the turn of the current stream.

    @property
    def current(self) -> torch.cuda.Stream:
        """The stream for what is queued next."""
        return self._streams[0]

    def count(self, size_bytes: int) -> None:
        """Count bytes that were queued on the current stream; the other one follows when the turn is over."""
        self._queued_bytes += size_bytes
        if self._queued_bytes >= TURN_BYTES:
            end = self._streams[0].record_event()
            self._streams.reverse()
            self._streams[0].wait_event(end)
            self._queued_bytes = 0

    def synchronize(self) -> None:
        """Wait for everything that is queued."""
        for stream in self._streams:
            stream.synchronize()


class DeviceLane:
    """Streams, staging memory and staging policy of one device."""

    def __init__(self, device: torch.device, budget_bytes: int, *, scale: float = 1.0) -> None:
        self.device = device
        self.copies = CopyStreams(device)
        self.cloning = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Compares copies while the next snapshot is being copied.
        self.checking = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.direct_end: torch.cuda.Event | None = None  # The direct copies of the last snapshot are done.
        self.staged_end: torch.cuda.Event | None = None  # Its staged copies are done: clones may be overwritten.
        self.memory = _staging_memory(device, budget_bytes)
        self.policy = StagingPolicy(self.memory.numel(), scale=scale)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def warm_up(self, codes: set[tuple[int, int]]) -> None:
        """Load and compile everything that a snapshot uses, which takes up to seconds at first use."""
        for k, m in {*codes, (1, 1)}:
            parity.warm_up(self.device, k, m)
        host = torch.empty(64, dtype=torch.uint8)
        small = [torch.zeros(64, dtype=torch.uint8, device=self.device) for _ in range(2)]
        current = torch.cuda.current_stream(self.device)
        for dtype in (torch.uint8, torch.int64):
            torch._foreach_copy_([small[0].view(dtype)], [small[1].view(dtype)])
        small[0].clone()
        begin = current.record_event(timing_event())
        stream = self.copies.current
        with torch.cuda.stream(stream):
            stream.wait_event(begin)
            torch._foreach_copy_([small[0]], [small[1]])
            host.copy_(small[0], non_blocking=True)
            end = stream.record_event(timing_event())
        end.synchronize()
        begin.elapsed_time(end)

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """Return a buffer for parity that is copied next. Used in the order of the copy stream, so one is enough."""
        if self._scratch.numel() < size_bytes:
            self._scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return self._scratch[:size_bytes]


def _staging_memory(device: torch.device, budget_bytes: int) -> torch.Tensor:
    """Allocate as much as fits: without it the update waits, which is slower and not wrong."""
    while budget_bytes >= PIECE_BYTES:
        try:
            return torch.empty(budget_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            budget_bytes //= 2
    return torch.empty(0, dtype=torch.uint8, device=device)


@dataclass
class StagingPolicy:
    """How much of a snapshot is staged on one device. `scale` is for tests: a factor on the bytes expected in time."""

    budget_bytes: int
    staged_bytes: int = -1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.staged_bytes < 0:
            self.staged_bytes = self.budget_bytes  # Nothing was measured yet: as much as fits.

    def staged_of(self, total_bytes: int) -> int:
        """Return how much of a snapshot of this size is staged."""
        staged = min(self.staged_bytes, total_bytes)
        if self.scale != 1.0:
            staged = int(total_bytes - (total_bytes - staged) * self.scale)
        return max(0, min(staged, self.budget_bytes, total_bytes))

    def learn(self, spare_s: float, rate_bytes_s: float) -> None:
        """Adapt: direct copies ended `spare_s` before the update; negative: the update waited for them that long."""
        wanted = self.staged_bytes - (spare_s - MARGIN_S) * rate_bytes_s
        change = wanted - self.staged_bytes
        self.staged_bytes = round(
            max(0.0, min(self.staged_bytes + (change if change > 0 else TRUST * change), self.budget_bytes))
        )


def timing_event() -> torch.cuda.Event:
    """An event that `elapsed_time` accepts."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
