"""A `take` finds the last capture on its way and an optimizer silent: has it written? Nobody is accused unheard."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keepstep.config import TakeConfig
from keepstep.trainer.capture import capture
from keepstep.trainer.capture.capture import Capture
from keepstep.trainer.capture.job import CaptureJob
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.integrity.fingerprints import DeviceFingerprints
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.state.optimizer_fence import CopyGate, OptimizerFence

HOST = torch.device("cpu")


class Flying:
    """A capture that leaves a device: the copy thread has queued nothing yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nobody: Any = None
        owned = torch.nn.Parameter(torch.zeros(3000))
        self.fence = OptimizerFence([("optimizer", torch.optim.SGD([owned]))])
        self.capture = Capture(nobody, TakeConfig(), self.fence, committed=lambda *_: None, voided=lambda *_: None)
        self.source = owned.detach().view(torch.uint8)
        unit = CopyOp(self.source, 0, self.source.numel(), "weight", frozenset({0}), nobody)
        self.checks = SnapshotChecks(None, [DeviceFingerprints([unit], random.Random(0), whole=True)])
        self.job = CaptureJob(
            nobody, nobody, 0, nobody, 0, nobody, nobody, nobody, {0: CopyGate()}, self.checks, lambda: b"", lambda: "",
            departures=[nobody],
        )  # fmt: skip
        monkeypatch.setattr(self.capture, "_flying", [self.job])
        monkeypatch.setattr(capture, "LOOK_S", 0.2)

    def queue(self) -> None:
        self.checks.look(HOST)
        self.checks.leave(HOST)
        self.job.queued.set()

    @property
    def distrusted(self) -> str:
        return self.fence.watched[0].distrusted


@pytest.fixture
def flying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flying]:
    made = Flying(monkeypatch)
    yield made
    made.capture._flying = []
    made.capture.close()
    made.fence.close()


def test_it_waits_until_the_devices_were_told_to_look(flying: Flying) -> None:
    wanted = flying.job.gates[0].wanted
    thread = threading.Thread(target=lambda: (wanted.wait(10), flying.queue()))
    thread.start()
    flying.capture.suspect()
    thread.join()
    assert wanted.is_set(), "the copy thread waits for its turn no longer"
    assert not flying.job.void
    assert not flying.distrusted


def test_before_anybody_has_looked_the_snapshot_is_void_but_nobody_is_distrusted(flying: Flying) -> None:
    flying.capture.suspect()
    assert "before the devices had looked" in flying.job.void
    assert not flying.distrusted, "for ever, and for nothing"


def test_what_was_queued_only_in_part_says_nothing(flying: Flying) -> None:
    """The copy failed."""
    flying.checks.look(HOST)
    flying.job.queued.set()
    flying.capture.suspect()
    assert flying.job.void
    assert not flying.distrusted


def test_an_optimizer_that_has_written_is_distrusted(flying: Flying) -> None:
    flying.queue()
    flying.source[5] ^= 1
    flying.capture.suspect()
    assert "weight changed without its optimizer's hook" in flying.job.void
    assert flying.distrusted
