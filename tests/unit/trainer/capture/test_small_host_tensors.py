"""Small tensors that the system gathers: every byte in its place, padding zero, nothing else touched."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from keepstep.errors import CaptureError
from keepstep.layout import ALIGN, align
from keepstep.trainer.capture.scattered import MOST_PIECES, Scattered
from keepstep.trainer.plan.units import CopyOp

START = 4096


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


def units_of(sizes: list[int], gaps: dict[int, int]) -> list[CopyOp]:
    """Side by side, each at its alignment; `gaps`: bytes of something else before the unit with this index."""
    found, at = [], 0
    for index, size in enumerate(sizes):
        at += gaps.get(index, 0)
        source = torch.randint(256, (size,), dtype=torch.uint8)
        found.append(CopyOp(source, at, size, f"tensor {index}", frozenset(), None))  # type: ignore[arg-type]
        at = align(at + size)
    return found


@pytest.mark.parametrize("count", [1, 2, 50, MOST_PIECES // 2, MOST_PIECES // 2 + 1, MOST_PIECES, 3 * MOST_PIECES + 7])
@pytest.mark.parametrize("gap", [0, ALIGN, 10 * ALIGN])
def test_everything_is_where_it_belongs(fd: int, count: int, gap: int) -> None:
    rng = random.Random(count)
    sizes = [rng.choice([1, 4, 8, 63, 64, 65, 300]) for _ in range(count)]
    units = units_of(sizes, dict.fromkeys(range(3, count, 17), gap))
    end = align(units[-1].offset + units[-1].size_bytes)
    os.pwrite(fd, b"\xaa" * (START + end + 100), 0)
    shuffled = rng.sample(units, len(units))
    Scattered(shuffled).write(fd, START)
    expected = bytearray(b"\xaa" * (START + end + 100))
    for before, unit in zip([None, *units], units, strict=False):
        if before is not None and unit.offset - before.offset - before.size_bytes < ALIGN:
            expected[START + before.offset + before.size_bytes : START + unit.offset] = bytes(
                unit.offset - before.offset - before.size_bytes
            )
        expected[START + unit.offset : START + unit.offset + unit.size_bytes] = bytes(unit.source.tolist())
    assert os.pread(fd, len(expected), 0) == bytes(expected)


def test_it_writes_what_stands_there_now(fd: int) -> None:
    units = units_of([8, 8, 8], {})
    scattered = Scattered(units)
    for value in (1, 2):
        units[1].source.fill_(value)
        scattered.write(fd, 0)
        assert os.pread(fd, 8, units[1].offset) == bytes([value] * 8)


def test_an_address_that_is_no_more_is_an_error_and_no_fault(fd: int) -> None:
    units = units_of([8, 8], {})
    scattered = Scattered(units)
    scattered._calls[0].pieces[2, 0] = 8  # where nothing is mapped
    with pytest.raises(CaptureError, match="tensor 0"):
        scattered.write(fd, 0)
