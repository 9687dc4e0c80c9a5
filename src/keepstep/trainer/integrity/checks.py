"""Checks of one snapshot: samples of host memory and fingerprints of device memory, from source to arena."""

from __future__ import annotations

import random
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch

from keepstep.trainer.integrity.fingerprints import DeviceFingerprints
from keepstep.trainer.integrity.samples import HostSamples
from keepstep.trainer.plan.copy_plan import CopyOp, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp


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
