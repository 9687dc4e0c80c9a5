"""The check for writes of an optimizer whose hook did not fire while its tensors were copied."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keepstep.config import TakeConfig
from keepstep.trainer.capture import capture
from keepstep.trainer.capture.capture import Capture, CaptureJob
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.integrity.fingerprints import DeviceFingerprints
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.state.optimizer_fence import CopyGate, OptimizerFence

HOST = torch.device("cpu")


class InFlight:
    """A capture from a device whose copies are not queued yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nobody: Any = None
        owned = torch.nn.Parameter(torch.zeros(3000))
        self.fence = OptimizerFence([("optimizer", torch.optim.SGD([owned]))])
        self.capture = Capture(nobody, TakeConfig(), self.fence, nobody, nobody)
        self.source = owned.detach().view(torch.uint8)
        unit = CopyOp(self.source, 0, self.source.numel(), "weight", frozenset({0}), nobody)
        self.checks = SnapshotChecks(None, [DeviceFingerprints([unit], random.Random(0), whole=True)])
        self.job = CaptureJob(
            nobody, nobody, 0, nobody, nobody, nobody, nobody, {0: CopyGate(0)}, self.checks, transfers=[nobody]
        )
        monkeypatch.setattr(self.capture, "_in_flight", [self.job])
        monkeypatch.setattr(capture, "QUEUE_WAIT_S", 0.2)

    def queue(self) -> None:
        self.checks.compute_fingerprints(HOST)
        self.checks.copy_fingerprints(HOST)
        self.job.queued.set()

    @property
    def distrusted(self) -> str:
        return self.fence.watched[0].untrusted_reason


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> Iterator[InFlight]:
    capture_in_flight = InFlight(monkeypatch)
    yield capture_in_flight
    capture_in_flight.capture._in_flight = []
    capture_in_flight.capture.close()
    capture_in_flight.fence.close()


def test_take_waits_until_the_fingerprints_are_queued(in_flight: InFlight) -> None:
    wanted = in_flight.job.gates[0].waited_for
    thread = threading.Thread(target=lambda: (wanted.wait(10), in_flight.queue()))
    thread.start()
    in_flight.capture.check_unfenced_write()
    thread.join()
    assert wanted.is_set(), "the copy thread must not wait for the snapshot before it"
    assert not in_flight.job.void
    assert not in_flight.distrusted


def test_snapshot_without_fingerprints_is_void_but_its_optimizer_stays_trusted(in_flight: InFlight) -> None:
    in_flight.capture.check_unfenced_write()
    assert "before fingerprints of its tensors were taken" in in_flight.job.void
    assert not in_flight.distrusted, "distrust lasts for the rest of the run"


def test_partly_queued_fingerprints_void_the_snapshot_only(in_flight: InFlight) -> None:
    """As when the copy thread failed."""
    in_flight.checks.compute_fingerprints(HOST)
    in_flight.job.queued.set()
    in_flight.capture.check_unfenced_write()
    assert in_flight.job.void
    assert not in_flight.distrusted


def test_optimizer_that_wrote_without_its_hook_is_distrusted(in_flight: InFlight) -> None:
    in_flight.queue()
    in_flight.source[5] ^= 1
    in_flight.capture.check_unfenced_write()
    assert "weight changed without its optimizer's hook" in in_flight.job.void
    assert in_flight.distrusted
