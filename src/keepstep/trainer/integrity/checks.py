"""Checks of one snapshot, from source to arena: samples of host memory and fingerprints of device memory.

Host tensors are sampled at `take`: windows of bytes, compared with the copy in the arena. Tensor version counters do
not count the writes that matter (optimizer_fence.py), so bytes are compared: other operations and other windows each
time, so that in time every byte is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch

from keepstep.layout import ALIGN, align
from keepstep.trainer.integrity.fingerprints import DeviceFingerprints
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp

# A lazily copied tensor is sampled at `take`: this share of its bytes, within these bounds.
SAMPLE_SHARE = 256
SAMPLE_MIN, SAMPLE_MAX = 64, 1 << 20
MAX_SAMPLES = 256


@dataclass
class SnapshotChecks:
    """Of one snapshot; empty when nothing is copied after `take`, or fingerprints are off."""

    samples: HostSamples | None = None
    fingerprints: list[DeviceFingerprints] = field(default_factory=list)

    @classmethod
    def first(cls, schedule: CopySchedule, rng: random.Random) -> SnapshotChecks:
        """Made inside `take`, so nothing that waits for a device."""
        return cls(HostSamples.choose(schedule.lazy, rng))

    @classmethod
    def next(cls, schedule: CopySchedule, rng: random.Random, *, whole: bool) -> SnapshotChecks:
        """Made in advance. `whole`: fingerprints of all chunks of devices."""
        host = schedule.lazy_on_host
        devices = {op.device for op in schedule.lazy} - {torch.device("cpu")}
        fingerprints = [
            DeviceFingerprints([op for op in schedule.lazy if op.device == device], rng, whole=whole)
            for device in devices
        ]
        return cls(HostSamples.choose(host, rng) if host else None, fingerprints)

    def __bool__(self) -> bool:
        return self.samples is not None or bool(self.fingerprints)

    def take(self) -> None:
        """Copy the samples, inside `take`; fingerprints of devices are queued after it (`DeviceTransfer`)."""
        if self.samples is not None:
            self.samples.take()

    def compute_fingerprints(self, device: torch.device) -> None:
        """Queue the fingerprints of a device on its current stream."""
        for fingerprints in self.fingerprints:
            if fingerprints.device == device:
                fingerprints.compute()

    def copy_fingerprints(self, device: torch.device) -> None:
        """Queue their copy to the host on the current stream."""
        for fingerprints in self.fingerprints:
            if fingerprints.device == device:
                fingerprints.copy_to_host()

    @property
    def fingerprints_queued(self) -> bool:
        """Whether every fingerprint of `take` is computed and copied to the host, or will be."""
        return all(fingerprints.is_queued for fingerprints in self.fingerprints)

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        """The first operation of these optimizers whose source has changed since `take`."""
        checks: list[HostSamples | DeviceFingerprints] = [*self.fingerprints]
        if self.samples is not None:
            checks.append(self.samples)
        return next((op for check in checks if (op := check.changed_at_source(owners)) is not None), None)

    def changed_in_transit(self, payload: torch.Tensor, readers: Executor | None = None) -> CopyOp | ParityOp | None:
        """The first operation whose copy differs from its source at `take`. `readers`: threads that compare."""
        for fingerprints in self.fingerprints:
            if (op := fingerprints.changed_in_transit(payload, readers)) is not None:
                return op
        return self.samples.changed_in_transit(payload) if self.samples is not None else None

    def encode(self) -> bytes:
        """The fingerprints, to be stored with the snapshot."""
        return b"".join(fingerprints.encode() for fingerprints in self.fingerprints)


# Samples of host tensors


class HostSamples:
    """The windows of one snapshot."""

    def __init__(self, windows: list[SampleWindow]) -> None:
        self.windows = windows
        self._sources = [source for window in windows for source in window.sources]
        self._starts, sizes = _pack(self._sources)
        # One buffer per device: to copy hundreds of windows one by one takes half a second beside the snapshot.
        self._taken = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}

    @classmethod
    def choose(cls, lazy: Sequence[CopyOp | ParityOp], rng: random.Random) -> HostSamples:
        ops = lazy if len(lazy) <= MAX_SAMPLES else rng.sample(lazy, MAX_SAMPLES)
        return cls([SampleWindow.choose(op, rng) for op in ops])

    def take(self) -> None:
        if self._sources:
            torch._foreach_copy_(self._parts(self._taken), self._sources)

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        """The first operation of these optimizers whose source has changed since `take`."""
        for window, taken in self._each(self._taken):
            if window.op.owners & owners and not all(map(torch.equal, taken, window.sources)):
                return window.op
        return None

    def changed_in_transit(self, payload: torch.Tensor) -> CopyOp | ParityOp | None:
        """The first operation whose copy differs from its source at `take`."""
        here = {device: buffer.to(payload.device) for device, buffer in self._taken.items()}
        return next((window.op for window, taken in self._each(here) if not window.matches(payload, taken)), None)

    def _each(self, buffers: dict[torch.device, torch.Tensor]) -> Iterator[tuple[SampleWindow, list[torch.Tensor]]]:
        parts = iter(self._parts(buffers))
        return ((window, [next(parts) for _ in window.sources]) for window in self.windows)

    def _parts(self, buffers: dict[torch.device, torch.Tensor]) -> list[torch.Tensor]:
        placed = zip(self._sources, self._starts, strict=True)
        return [buffers[source.device][start : start + source.numel()] for source, start in placed]


@dataclass(frozen=True)
class SampleWindow:
    """A range of the target of one operation, and the source bytes that it is computed from."""

    op: CopyOp | ParityOp
    offset: int  # in the operation
    size_bytes: int
    sources: list[torch.Tensor]
    parity: ParityOp | None = None  # of the window only

    @classmethod
    def choose(cls, op: CopyOp | ParityOp, rng: random.Random) -> SampleWindow:
        size = min(op.size_bytes, max(SAMPLE_MIN, min(SAMPLE_MAX, op.size_bytes // SAMPLE_SHARE)))
        offset = rng.randrange(op.size_bytes - size + 1)
        parity = op.window(offset, size) if isinstance(op, ParityOp) else None
        sources = (
            [part.source for part in parity.inputs()] if parity is not None else [op.source[offset : offset + size]]  # type: ignore[union-attr]
        )
        return cls(op, offset, size, sources, parity)

    def matches(self, payload: torch.Tensor, taken: list[torch.Tensor]) -> bool:
        """Whether the payload has the sampled bytes, or their parity."""
        begin = self.op.offset + self.offset
        copied = payload[begin : begin + self.size_bytes]
        return torch.equal(self.parity.compute_from(taken) if self.parity is not None else taken[0], copied)


def _pack(sources: list[torch.Tensor]) -> tuple[list[int], dict[torch.device, int]]:
    """The offset of each source in the buffer of its device, and the sizes of the buffers."""
    starts, sizes = [], dict[torch.device, int]()
    for source in sources:
        starts.append(sizes.get(source.device, 0))
        sizes[source.device] = align(starts[-1] + source.numel(), ALIGN)
    return starts, sizes
