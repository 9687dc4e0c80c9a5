"""What a snapshot queues on a CUDA device beside its large copies does not wait for them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from keepstep.trainer.checks import Checks
from keepstep.trainer.leaving import PIECE_BYTES, Cargo, Departure, Lane, cut
from keepstep.trainer.prints import Prints
from keepstep.trainer.units import Unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BYTES = 2 << 30
LATE_BYTES = 4 * PIECE_BYTES
PATIENCE_S = 30.0


def test_clones_and_fingerprints_are_done_long_before_the_copies() -> None:
    """All of it begins together, as in a training loop that is ahead of its device: the copies are there at once, and
    an engine that has begun with them serves nobody else until they are done."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.randint(256, (BYTES,), dtype=torch.uint8, device=device)
    payload = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True)
    lane = Lane(device, LATE_BYTES)
    lane.warm_up(set())
    nobody: Any = None
    unit = Unit(source, 0, BYTES, "tensor", frozenset({0}), nobody)
    checks = Checks(None, [Prints([unit], random.Random(0), whole=False)])
    cargo = Cargo(payload, (), cut(payload, source, unit.owners))
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(2):  # once to load everything
        torch.cuda.synchronize()
        for _ in range(8):
            busy @ busy
        departure = Departure(lane, cargo, (), lambda: checks.look(device), lambda: checks.leave(device))
        assert not departure.begin.query(), "the device must still be busy: otherwise this shows nothing"
        departure.issue(lambda owner: None, lambda size: None)
        deadline = time.monotonic() + PATIENCE_S
        while not lane.cloning.query():
            assert time.monotonic() < deadline
        assert not lane.stream.query(), "they have waited for the copies"
        departure.finish()
        assert checks.changed_on_the_way(payload) is None
    assert torch.equal(payload, source.cpu())
