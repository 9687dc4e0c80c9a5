"""What holding the snapshots of one rank costs in memory, as the kernel counts it, against the published formula.

`s * (U + V) + headers`: s slots, U bytes of tensors (each padded to 64), V bytes of values. The kernel's count is
the blocks of the keeper's memfds; PSS stands beside it because it does not count a shared page twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

MEMFD_LINK = "/memfd:keepstep"
PAGE_BYTES = 4096
ENTRY_ALIGN_BYTES = 64
VALUE_BYTES = 16 * 1024
"""V: the random states of torch (5 KB), python and numpy (2.5 KB each), and the parameter groups"""
CHUNK_BYTES = 4 * 1024 * 1024
CHECKSUM_BYTES = 16
LAYOUT_ENTRY_BYTES = 128
"""one tensor's path, dtype, shape, region and offset in the layout"""


class Keeper(NamedTuple):
    """The process that holds the snapshots, and how many each rank may have, by its own account."""

    pid: int
    num_slots: int


def measure_memory(keeper: Keeper, tensors: list[torch.Tensor]) -> dict[str, Any]:
    counted = memfd_bytes(keeper.pid)
    expected = formula_bytes(keeper.num_slots, [tensor.nbytes for tensor in tensors])
    return {
        "num_slots": keeper.num_slots,
        "memfd_bytes": counted,
        "formula_bytes": expected,
        "ratio": counted / expected,
        "keeper_pss_bytes": pss_bytes(keeper.pid),
        "trainer_pss_bytes": pss_bytes(os.getpid()),
    }


def formula_bytes(num_slots: int, sizes_bytes: list[int]) -> int:
    payload = sum(_align(size, ENTRY_ALIGN_BYTES) for size in sizes_bytes)
    # Both headers of a slot are written twice (A/B); the keeper's carries the checksum table.
    checksums = _align(payload, CHUNK_BYTES) // CHUNK_BYTES * CHECKSUM_BYTES
    headers = 2 * PAGE_BYTES + 2 * _align(checksums + PAGE_BYTES, PAGE_BYTES)
    layout = _align(len(sizes_bytes) * LAYOUT_ENTRY_BYTES, PAGE_BYTES)
    return num_slots * (_align(payload + VALUE_BYTES, PAGE_BYTES) + headers + layout) + PAGE_BYTES


def memfd_bytes(pid: int) -> int:
    """Memory behind the memfds that `pid` holds open, each counted once however often it is open."""
    blocks: dict[tuple[int, int], int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith(MEMFD_LINK):
                found = link.stat()
                blocks[found.st_dev, found.st_ino] = found.st_blocks * 512
        except FileNotFoundError:
            continue  # closed between the listing and the look
    return sum(blocks.values())


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss line")


def _align(size_bytes: int, to: int) -> int:
    return -(-size_bytes // to) * to
