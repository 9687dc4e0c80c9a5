"""Fingerprints: 16 bytes of a chunk, linear like the code: F(a + b) = F(a) + F(b), F(c a) = c F(a).

So the fingerprint of a parity chunk follows from those of its sources, and keepers find a replica that differs, or a
parity chunk that is not the sum of its sources, by exchanging 16 bytes per chunk and reading nothing twice.

A chunk is folded four times: cut into blocks B_0, B_1, ..., and row r of the result is the sum of g^(r j) B_j. The
rows of a fold are a Vandermonde matrix with different points, and each fold has twice the rows of the one before:
so a change of one or two bytes, wherever they are, always changes the fingerprint. Any other change, two blocks in
each other's place included, is missed about once in 2^128. It finds faults, it does not stop an attacker.

Zeros at the end change nothing: blocks are places in a chunk of 4 MiB, whatever its length.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity import galois
from keepstep.parity.backend import chosen, mix_ragged
from keepstep.parity.buffer_pins import MemorySpan, Pins, pointers

if TYPE_CHECKING:
    from typing_extensions import Buffer

FINGERPRINT_BYTES = 16


class FoldStep(NamedTuple):
    """A step: blocks of the input become rows of one block each."""

    num_blocks: int
    block_bytes: int
    num_rows: int


# Points are powers of the generator, so there are at most 255 blocks; 17 is the fewest that the first fold can do with.
# It reads the chunk, the others stay in the cache: more streams outrun the prefetcher (20: a third slower), and
# streams that are a power of two apart fall into the same places of the cache (16: a third slower).
FOLDS = (FoldStep(17, 246848, 2), FoldStep(253, 1952, 4), FoldStep(252, 31, 8), FoldStep(248, 1, 16))
SHORTEST = 64  # bytes per native call: below, kernels work byte by byte, so short blocks are read with what follows


def fingerprint(chunk: Buffer) -> bytes:
    """The fingerprint of a chunk of up to 4 MiB. Native, reads the chunk once, releases the GIL."""
    first = FOLDS[0]
    with Pins() as pins:
        data = pins.read(chunk)
        if data.size > CHUNK_BYTES:
            raise ValueError(f"a chunk of {data.size} bytes: {CHUNK_BYTES} is the most")
        starts = range(0, first.num_blocks * first.block_bytes, first.block_bytes)
        blocks = [MemorySpan(data.address + at, max(0, min(first.block_bytes, data.size - at))) for at in starts]
        scratch = _scratch()
        mix_ragged([fold_row(0, row) for row in range(first.num_rows)], blocks, scratch.rows, first.block_bytes)
    return scratch.fold_the_rest()


def combine(coefficients: Sequence[int], fingerprints: Sequence[bytes]) -> bytes:
    """The fingerprint of the sum of coefficient times chunk, from the fingerprints of the chunks."""
    if any(len(part) != FINGERPRINT_BYTES for part in fingerprints):
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes")
    total = bytes(FINGERPRINT_BYTES)
    for coefficient, part in zip(coefficients, fingerprints, strict=True):
        total = galois.add(total, galois.scale(coefficient, part))
    return total


@lru_cache(maxsize=64)
def fold_row(level: int, row: int) -> bytes:
    """The coefficients of one row of a fold."""
    return bytes(galois.power(row * block) for block in range(FOLDS[level].num_blocks))


@lru_cache(maxsize=len(FOLDS))
def _matrix(level: int) -> bytes:
    return b"".join(fold_row(level, row) for row in range(FOLDS[level].num_rows))


class _Scratch:
    """Buffers of a thread for the folds after the first: their inputs, and the addresses of sources and targets.

    The input of a fold is the rows of the previous one, at the start of its buffer. The bytes behind them are never
    written and stay zero: the end of the last block, and the bytes that are read with a short block.
    """

    def __init__(self) -> None:
        self._inputs = [ctypes.create_string_buffer(f.num_blocks * f.block_bytes + SHORTEST) for f in FOLDS[1:]]
        # Rows of a fold with short blocks are written further apart, and moved together afterwards.
        self._wide = ctypes.create_string_buffer(FINGERPRINT_BYTES * SHORTEST)
        self._views = [memoryview(block).cast("B") for block in self._inputs]
        self._wide_view = memoryview(self._wide).cast("B")
        inputs, wide = [ctypes.addressof(block) for block in self._inputs], ctypes.addressof(self._wide)
        targets = [
            _spaced(wide, fold.num_rows, SHORTEST)
            if fold.block_bytes < SHORTEST
            else _spaced(inputs[level], fold.num_rows, fold.block_bytes)
            for level, fold in enumerate(FOLDS)
        ]
        self.rows = targets[0]  # of the first fold
        # Made once: an array of 250 pointers takes longer to make than to use.
        self._targets = [pointers(some) for some in targets]
        self._sources = [
            pointers(_spaced(start, fold.num_blocks, fold.block_bytes))
            for start, fold in zip(inputs, FOLDS[1:], strict=True)
        ]

    def fold_the_rest(self) -> bytes:
        native = chosen()
        for level, fold in enumerate(FOLDS[1:], 1):
            size = max(fold.block_bytes, SHORTEST)
            native.mix(_matrix(level), self._sources[level - 1], self._targets[level], size)
            if fold.block_bytes < SHORTEST and level + 1 < len(FOLDS):
                self._move_together(self._views[level], fold)
        return self._wide.raw[::SHORTEST]

    def _move_together(self, target: memoryview, fold: FoldStep) -> None:
        """Pack spaced rows. ctypes.memmove would release the GIL for each of dozens of moves of a few bytes."""
        size, wide = fold.block_bytes, self._wide_view
        for row in range(fold.num_rows):
            target[row * size : (row + 1) * size] = wide[row * SHORTEST : row * SHORTEST + size]


def _spaced(start: int, count: int, step: int) -> list[int]:
    return [start + index * step for index in range(count)]


_threads = threading.local()


def _scratch() -> _Scratch:
    scratch: _Scratch | None = getattr(_threads, "scratch", None)
    if scratch is None:
        scratch = _threads.scratch = _Scratch()
    return scratch
