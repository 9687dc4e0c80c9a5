"""What is looked at when a snapshot begins: windows of host memory, fingerprints of devices."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from keepstep.trainer.integrity.fingerprints import DeviceFingerprints, Over
from keepstep.trainer.integrity.samples import HostSamples
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp


@dataclass
class SnapshotChecks:
    """Of one snapshot; empty where nothing is copied behind `take`, or nobody wants it."""

    samples: HostSamples | None = None
    prints: list[DeviceFingerprints] = field(default_factory=list)

    @classmethod
    def first(cls, parts: CopySchedule, rng: random.Random) -> SnapshotChecks:
        """Inside `take`, so only what does not wait for a device."""
        return cls(HostSamples.choose(parts.lazy, rng))

    @classmethod
    def next(cls, parts: CopySchedule, rng: random.Random, *, whole: bool) -> SnapshotChecks:
        host = parts.lazy_on_host
        devices = {unit.device for unit in parts.lazy} - {torch.device("cpu")}
        prints = [
            DeviceFingerprints([unit for unit in parts.lazy if unit.device == device], rng, whole=whole)
            for device in devices
        ]
        return cls(HostSamples.choose(host, rng) if host else None, prints)

    def __bool__(self) -> bool:
        return self.samples is not None or bool(self.prints)

    def take(self) -> None:
        """Inside `take`; fingerprints of devices are queued behind it (`Departure`)."""
        if self.samples is not None:
            self.samples.take()

    def look(self, device: torch.device) -> None:
        """Queue the fingerprints of a device on its current stream."""
        for one in self.prints:
            if one.device == device:
                one.compute()

    def leave(self, device: torch.device) -> None:
        """Queue their way to the host."""
        for one in self.prints:
            if one.device == device:
                one.leave()

    @property
    def have_looked(self) -> bool:
        """Whether all that is to be seen at `take` is known, or will be."""
        return all(one.has_left for one in self.prints)

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        return next((unit for one in self._all() if (unit := one.changed_at_source(owners)) is not None), None)

    def changed_on_the_way(self, payload: torch.Tensor, over: Over = map) -> CopyOp | ParityOp | None:
        for one in self.prints:
            if (unit := one.changed_on_the_way(payload, over)) is not None:
                return unit
        return self.samples.changed_on_the_way(payload) if self.samples is not None else None

    def _all(self) -> list[HostSamples | DeviceFingerprints]:
        return [*self.prints, *([self.samples] if self.samples is not None else [])]

    def encode(self) -> bytes:
        return b"".join(one.encode() for one in self.prints)
