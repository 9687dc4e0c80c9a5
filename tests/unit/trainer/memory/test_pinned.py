"""Ranges that are registered with CUDA: they cover a slot, and no copy crosses the border between two."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from keepstep.arena.memfd import Mapping
from keepstep.arena.slots import Arena, plan_header
from keepstep.layout import SnapshotSize
from keepstep.trainer.memory import arena_view, pinned
from keepstep.trainer.memory.arena_view import ArenaView

PAGE = 4096


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTERED_BYTES", 4 * PAGE)


def test_ranges_end_at_multiples_of_their_size() -> None:
    assert list(pinned.ranges(0, 0)) == []
    assert list(pinned.ranges(PAGE, 3 * PAGE)) == [(PAGE, 3 * PAGE)]
    assert list(pinned.ranges(PAGE, 9 * PAGE)) == [(PAGE, 4 * PAGE), (4 * PAGE, 8 * PAGE), (8 * PAGE, 9 * PAGE)]


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_arrives_whole_and_each_part_lies_in_one_range(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    arena = torch.zeros(40 * PAGE, dtype=torch.uint8)
    begin = rng.randrange(arena.numel())
    size = rng.choice([0, 1, PAGE, 4 * PAGE, 11 * PAGE, 40 * PAGE]) % (arena.numel() - begin + 1)
    source = torch.randint(1, 255, (size,), dtype=torch.uint8)
    parts: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def record(target: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        parts.append((int(target.storage_offset()), target.numel()))
        return copy(target, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "copy_", record)
    pinned.copy_to_host(arena[begin : begin + size], source)
    assert torch.equal(arena[begin : begin + size], source)
    assert int(arena.count_nonzero()) == size
    for start, length in parts:
        assert start // (4 * PAGE) == max(start, start + length - 1) // (4 * PAGE)


class Registry:
    """What CUDA would know of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: bool = False) -> None:
        self.ranges: dict[int, int] = {}
        self.failing = failing
        monkeypatch.setattr(pinned, "in_use", lambda: True)
        monkeypatch.setattr(pinned, "lock_pages", self.lock)
        monkeypatch.setattr(pinned, "unlock_pages", lambda addresses: [self.ranges.pop(each) for each in addresses])
        monkeypatch.setattr(arena_view, "REGISTER_SHARE", 1.0)  # without pauses

    def lock(self, address: int, size_bytes: int) -> int:
        if self.failing:
            return 2
        self.ranges[address] = size_bytes
        return 0


@pytest.fixture
def view() -> ArenaView:
    header = plan_header(
        SnapshotSize(100, 100, 30 * PAGE), slots=2, local_index=0, generation=0,
        run_id="r", node_id="n", instance=bytes(16),
    )  # fmt: skip
    arena = Arena.create(header, reserve=False)
    return ArenaView(arena, Mapping(arena.segment))


def test_all_memory_of_a_view_is_reserved_and_every_slot_registered(
    view: ArenaView, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(monkeypatch)
    memfd = view.arena.segment
    assert memfd.allocated_bytes < memfd.size_bytes
    view.prepare(threading.Event())
    assert memfd.allocated_bytes == memfd.size_bytes
    for slot in range(2):
        span = view.arena.payload_span(slot)
        at = span.offset
        while at < span.offset + span.size_bytes:
            size = registry.ranges[view.mapping.address + at]
            assert at // (4 * PAGE) == (at + size - 1) // (4 * PAGE)
            at += size
        assert at == span.offset + span.size_bytes
    view.close()
    assert registry.ranges == {}


def test_a_view_that_cannot_be_registered_is_usable(
    view: ArenaView, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Registry(monkeypatch, failing=True)
    view.prepare(threading.Event())
    view.payload(0).fill_(1)
    view.close()
    assert caplog.text.count("could not be page-locked (CUDA error 2)") == 1


def test_a_preparation_that_is_stopped_leaves_nothing_registered_behind(
    view: ArenaView, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, stop = Registry(monkeypatch), threading.Event()
    stop.set()
    view.prepare(stop)
    assert len(registry.ranges) <= 1
    view.close()
    assert registry.ranges == {}
