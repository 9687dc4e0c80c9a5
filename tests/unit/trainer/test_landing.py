"""What the keeper is told has landed: whole chunks, each once, and never one that a later copy writes into."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from keepstep.layout import CHUNK_BYTES
from keepstep.trainer.landing import LEAST_BYTES, MOST_MARKS, MOST_RANGES, marks

MIB = 1 << 20


def copies_of(rng: random.Random, payload_bytes: int, *, shuffled: bool) -> list[tuple[int, int]]:
    """As a plan makes them: of any size, with gaps that nothing writes, in any order."""
    found, at = [], 0
    while at < payload_bytes:
        size = min(rng.choice([64, 4096, 3 * MIB, CHUNK_BYTES, 9 * MIB + 64]), payload_bytes - at)
        found.append((at, size))
        at += size + rng.choice([0, 0, 64, 2 * CHUNK_BYTES])
    if shuffled:
        rng.shuffle(found)
    return found


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_is_announced_once_and_behind_its_last_copy(seed: int, shuffled: bool) -> None:
    rng = random.Random(seed)
    payload_bytes = 2 * LEAST_BYTES + rng.randrange(200 * MIB)
    shared_offset = rng.choice([0, payload_bytes, rng.randrange(payload_bytes // 64) * 64])
    copies = copies_of(rng, payload_bytes, shuffled=shuffled)
    found = marks(copies, payload_bytes, shared_offset)
    borders = {*range(0, shared_offset, CHUNK_BYTES), *range(shared_offset, payload_bytes, CHUNK_BYTES), payload_bytes}
    announced: list[tuple[int, int]] = []
    for index, ranges in found.items():
        for begin, end in ranges:
            later = [(at, size) for at, size in copies[index + 1 :] if at < end and begin < at + size]
            assert not later, f"{later} come after {begin} to {end} was called whole"
            assert {begin, end} <= borders
            announced.append((begin, end))
    assert all(len(ranges) <= MOST_RANGES for ranges in found.values())
    announced.sort()
    if shuffled:
        assert all(a[1] <= b[0] for a, b in pairwise(announced)), "said twice"
        return
    assert [begin for begin, _ in announced] == [0, *(end for _, end in announced[:-1])], "a gap, or said twice"
    assert announced[-1][1] == payload_bytes
    assert len(found) <= MOST_MARKS + 1


def test_of_a_small_payload_nothing_is_said() -> None:
    assert marks([(0, LEAST_BYTES)], LEAST_BYTES, 0) == {}


def test_the_keeper_is_told_at_even_distances() -> None:
    size = 512 * MIB
    found = marks([(at, 8 * MIB) for at in range(0, size, 8 * MIB)], size, 0)
    assert list(found.values()) == [((at, at + 32 * MIB),) for at in range(0, size, 32 * MIB)]
