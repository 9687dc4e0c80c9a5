"""The devices that captures leave from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from keepstep.config import TakeConfig
from keepstep.trainer.capture.device_copy import PIECE_BYTES, DeviceLane

STAGING_FREE_SHARE = 0.05  # of the free device memory; the smaller of this and take.staging_share counts


class DeviceLanes:
    """Made before training where the state is known by then, else with the first snapshot."""

    def __init__(self, config: TakeConfig, *, window_scale: float = 1.0) -> None:
        """`window_scale`: factor on the bytes that the staging policy expects to be copied in time."""
        self._config, self._window_scale = config, window_scale
        self._lanes: dict[torch.device, DeviceLane] = {}

    def of(self, device: torch.device) -> DeviceLane:
        if device not in self._lanes:
            self._lanes[device] = DeviceLane(device, 0)
        return self._lanes[device]

    def prepare(self, sizes: dict[torch.device, int], codes: set[tuple[int, int]]) -> None:
        """Memory for clones, for states of these sizes, and everything loaded; `codes`: (k, m) of parity."""
        for device, size_bytes in sizes.items():
            if device not in self._lanes:
                self._lanes[device] = DeviceLane(device, self._budget(device, size_bytes), scale=self._window_scale)
                self._lanes[device].warm_up(codes)

    def _budget(self, device: torch.device, size_bytes: int) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        wanted = min(self._config.staging_share * size_bytes, STAGING_FREE_SHARE * free_bytes)
        return int(wanted) // PIECE_BYTES * PIECE_BYTES

    def settle(self) -> None:
        """Wait for everything that was queued: what a failed snapshot has begun still writes into its slot."""
        for lane in self._lanes.values():
            lane.cloning.synchronize()
            lane.stream.synchronize()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is queued in here waits for no copy."""
        with ExitStack() as streams:
            for lane in self._lanes.values():
                streams.enter_context(torch.cuda.stream(lane.checking))
            yield
