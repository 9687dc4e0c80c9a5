"""Small tensors that the system gathers: every byte in its place, padding zero, nothing else touched."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import pytest
import torch

from keepstep.errors import CaptureError
from keepstep.layout import ALIGN, align
from keepstep.trainer.capture.host_copy import MAX_BUFFERS_PER_CALL, SmallHostTensors
from keepstep.trainer.plan.copy_plan import CopyOp

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


@pytest.mark.parametrize(
    "count",
    [
        1,
        2,
        50,
        MAX_BUFFERS_PER_CALL // 2,
        MAX_BUFFERS_PER_CALL // 2 + 1,
        MAX_BUFFERS_PER_CALL,
        3 * MAX_BUFFERS_PER_CALL + 7,
    ],
)
@pytest.mark.parametrize("gap", [0, ALIGN, 10 * ALIGN])
def test_everything_is_where_it_belongs(fd: int, count: int, gap: int) -> None:
    rng = random.Random(count)
    sizes = [rng.choice([1, 4, 8, 63, 64, 65, 300]) for _ in range(count)]
    units = units_of(sizes, dict.fromkeys(range(3, count, 17), gap))
    end = align(units[-1].offset + units[-1].size_bytes)
    os.pwrite(fd, b"\xaa" * (START + end + 100), 0)
    shuffled = rng.sample(units, len(units))
    SmallHostTensors(shuffled).write(fd, START)
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
    small = SmallHostTensors(units)
    for value in (1, 2):
        units[1].source.fill_(value)
        small.write(fd, 0)
        assert os.pread(fd, 8, units[1].offset) == bytes([value] * 8)


def test_memory_that_cannot_be_read_is_an_error_that_names_the_tensor(fd: int) -> None:
    units = units_of([8, 8], {})
    small = SmallHostTensors(units)
    unreadable = mmap.mmap(-1, mmap.PAGESIZE, prot=0)
    small._calls[0].buffers[2] = memoryview(unreadable)[:8]
    with pytest.raises(CaptureError, match="tensor 0"):
        small.write(fd, 0)


def test_tensors_may_still_be_resized_by_their_owner(fd: int) -> None:
    """`Tensor.numpy()` would forbid it for good."""
    owner = torch.zeros(2, 3)
    SmallHostTensors([CopyOp(owner.view(-1).view(torch.uint8), 0, 24, "t", frozenset(), None)])  # type: ignore[arg-type]
    owner.resize_(4, 3)


def test_buffers_keep_the_memory_of_their_tensors(fd: int) -> None:
    source = torch.full((1 << 20,), 7, dtype=torch.uint8)
    small = SmallHostTensors([CopyOp(source, 0, 1 << 20, "t", frozenset(), None)])  # type: ignore[arg-type]
    del source
    small.write(fd, 0)
    assert os.pread(fd, 1 << 20, 0) == b"\x07" * (1 << 20)
