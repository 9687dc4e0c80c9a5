"""`arena.slots = auto`: as many slots as memory allows, with the reason in the status."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import keepstep
from keepstep.config import ArenaConfig
from keepstep.testing.run import LocalRun, wait_until

STATE_BYTES = 4 << 20


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as run:
        yield run


@pytest.mark.parametrize(
    ("arena", "slots", "reason"),
    [
        (ArenaConfig(), 3, "auto: four slots of"),
        (ArenaConfig(memory_limit_bytes=3 * STATE_BYTES), 2, "exceed arena.memory_limit_bytes"),
        (ArenaConfig(slots=4), 4, "arena.slots"),
    ],
)
def test_status_says_how_many_slots_there_are_and_why(
    run: LocalRun, arena: ArenaConfig, slots: int, reason: str
) -> None:
    state = {"tensor": torch.zeros(STATE_BYTES, dtype=torch.uint8)}
    with keepstep.Snapshotter(state, run.config(arena=arena)) as snapshots:
        snapshots.restore()
        steps = itertools.count()
        wait_until(lambda: not snapshots.take(next(steps)).skipped, timeout_s=20, what="a snapshot")
        status = snapshots.status()
        assert (status.slots, reason in status.slots_reason) == (slots, True), status.slots_reason
        assert [len(rank.slots) for rank in status.ranks] == [slots]


def test_a_rank_that_asks_again_keeps_the_arena_it_has(run: LocalRun) -> None:
    """Chosen once: a keeper that is asked again after a restart must not make another arena."""
    state = {"tensor": torch.zeros(STATE_BYTES, dtype=torch.uint8)}
    held = []
    for arena in (ArenaConfig(slots=4), ArenaConfig()):
        with keepstep.Snapshotter(state, run.config(arena=arena)) as snapshots:
            snapshots.restore()
            held.append(snapshots.status().memory_bytes)
            snapshots.close(finished=False)
    assert held[0] == held[1]
