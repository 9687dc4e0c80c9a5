"""What a snapshot queues on a CUDA device beside its large copies does not wait for them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from keepstep.trainer.capture.device_copy import DeviceTransfer, TransferPlan, cut
from keepstep.trainer.capture.device_lane import PIECE_BYTES, DeviceLane
from keepstep.trainer.capture.host_copy import RateCap
from keepstep.trainer.capture.small_tensors import make_batches
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.integrity.fingerprints import DeviceFingerprints
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.state.optimizer_fence import CopyGate, ReadCounter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BYTES = 2 << 30
LATE_BYTES = 4 * PIECE_BYTES
PATIENCE_S = 30.0


def reads_of(departure: DeviceTransfer) -> ReadCounter:
    gates = {owner: CopyGate(owner, [departure]) for owner in departure.owners}
    return ReadCounter(gates, [departure.owners])


def test_clones_and_fingerprints_are_done_long_before_the_copies() -> None:
    """All of it begins together, as in a training loop that is ahead of its device: the copies are there at once, and
    an engine that has begun with them serves nobody else until they are done."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.randint(256, (BYTES,), dtype=torch.uint8, device=device)
    payload = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True)
    lane = DeviceLane(device, LATE_BYTES)
    lane.warm_up(set())
    nobody: Any = None
    unit = CopyOp(source, 0, BYTES, "tensor", frozenset({0}), nobody)
    checks = SnapshotChecks(None, [DeviceFingerprints([unit], random.Random(0), whole=False)])
    cargo = TransferPlan(payload, (), cut(payload, source, unit.owners))
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(2):  # once to load everything
        torch.cuda.synchronize()
        for _ in range(8):
            busy @ busy
        departure = DeviceTransfer(lane, cargo, (), checks)
        assert not departure.begin.query(), "the device must still be busy: otherwise this shows nothing"
        departure.issue(reads_of(departure), RateCap(0))
        deadline = time.monotonic() + PATIENCE_S
        while not lane.cloning.query():
            assert time.monotonic() < deadline
        assert not departure._done.query(), "they have waited for the copies"
        departure.finish()
        assert checks.changed_in_transit(payload) is None
    assert torch.equal(payload, source.cpu())


def test_snapshots_in_a_row_hold_what_was_there_when_each_began() -> None:
    """Nothing waits on the host: clones and gathered tensors of one are overwritten by the next when they have left."""
    device = torch.device("cuda", torch.cuda.current_device())
    large = torch.empty(8 * PIECE_BYTES + 4, dtype=torch.uint8, device=device)
    small = [torch.empty(100, dtype=torch.uint8, device=device) for _ in range(50)]
    nobody: Any = None
    sizes = [128 * index for index in range(len(small))]
    units = [CopyOp(one, at, 100, "small", frozenset({0}), nobody) for one, at in zip(small, sizes, strict=True)]
    begin = 128 * len(small)
    unit = CopyOp(large, begin, large.numel(), "large", frozenset({0}), nobody)
    gathered = make_batches(units)
    lane = DeviceLane(device, LATE_BYTES)
    lane.warm_up(set())
    begun: list[tuple[DeviceTransfer, SnapshotChecks, torch.Tensor]] = []
    for number in range(4):
        large.random_(0, 256)
        for one in small:
            one.fill_(number)
        payload = torch.zeros(begin + large.numel(), dtype=torch.uint8, pin_memory=True)
        checks = SnapshotChecks(None, [DeviceFingerprints([unit], random.Random(0), whole=True)])
        cargo = TransferPlan(payload, gathered, cut(payload[begin:], large, unit.owners))
        departure = DeviceTransfer(lane, cargo, (), checks)
        departure.issue(reads_of(departure), RateCap(0))
        departure.wait_on_device(0)
        begun.append((departure, checks, payload))
    for number, (departure, checks, payload) in enumerate(begun):
        departure.finish()
        assert checks.changed_in_transit(payload) is None
        assert all(bool((payload[at : at + 100] == number).all()) for at in sizes)
    assert torch.equal(begun[-1][2][begin:], large.cpu())


def test_training_reads_its_loss_while_a_snapshot_is_copied() -> None:
    """The engine that copies to the host goes on with one stream as long as it has work there."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.randint(256, (BYTES,), dtype=torch.uint8, device=device)
    payload = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True)
    lane = DeviceLane(device, 0)
    lane.warm_up(set())
    nobody: Any = None
    unit = CopyOp(source, 0, BYTES, "tensor", frozenset({0}), nobody)
    checks = SnapshotChecks(None, [DeviceFingerprints([unit], random.Random(0), whole=False)])
    cargo = TransferPlan(payload, (), cut(payload, source, unit.owners))
    for _ in range(2):  # once to load everything
        loss = torch.ones((), device=device) + 1
        torch.cuda.synchronize()
        departure = DeviceTransfer(lane, cargo, (), checks)
        departure.issue(reads_of(departure), RateCap(0))
        for _ in range(3):
            assert loss.item() == 2
        assert not departure._done.query(), "the loss has waited for the whole snapshot"
        departure.finish()
    assert torch.equal(payload, source.cpu())
