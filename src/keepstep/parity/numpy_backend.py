"""Arithmetic with numpy, where there is no ISA-L: same bits, a fifth of the speed.

Eight bytes at a time: doubling in the field is a shift and a masked exclusive or on 64-bit words. A sum with
coefficients processes their bits from the highest: double the total, add the sources that have this bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.parity import galois
from keepstep.parity.buffer_pins import Pointers

BLOCK_BYTES = 64 << 10  # processed at a time, so that intermediate results stay in the cache
SHORT_BYTES = 512  # up to this size a table of products is faster than eight passes

Words = npt.NDArray[Any]


class NumpyBackend:
    """`Backend` with numpy."""

    name = "numpy"
    path = np.__file__ or ""

    def mix(self, matrix: bytes, sources: Pointers, targets: Pointers, size: int) -> None:
        assert len(matrix) == len(sources) * len(targets) > 0, len(matrix)
        data = [_bytes_at(address, size) for address in sources]
        if size <= SHORT_BYTES:
            data = [np.stack(data)]
        for target, address in enumerate(targets):
            row, out = matrix[target * len(sources) : (target + 1) * len(sources)], _bytes_at(address, size)
            if size <= SHORT_BYTES:
                out[:] = _sum_by_table(row, data[0])
            else:
                _sum_by_blocks(row, data, out)


def _bytes_at(address: int | None, size: int) -> Words:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address or 0))


def _sum_by_table(row: bytes, sources: Words) -> Words:
    factors = np.frombuffer(row, dtype=np.uint8)[:, np.newaxis]
    total: Words = np.bitwise_xor.reduce(_all_products()[factors, sources], axis=0)
    return total


@cache
def _all_products() -> Words:
    return np.frombuffer(b"".join(galois.products(a) for a in range(256)), dtype=np.uint8).reshape(256, 256)


def _sum_by_blocks(row: bytes, sources: Sequence[Words], out: Words) -> None:
    for start in range(0, out.size, BLOCK_BYTES):
        end = min(start + BLOCK_BYTES, out.size)
        whole = end - (end - start) % 8
        for low, high, dtype in ((start, whole, np.uint64), (whole, end, np.uint8)):
            if low < high:
                out[low:high] = _sum(row, [source[low:high].view(dtype) for source in sources]).view(np.uint8)


def _sum(row: bytes, sources: Sequence[Words]) -> Words:
    total = np.zeros_like(sources[0])
    for bit in range(max(row).bit_length() - 1, -1, -1):
        _double(total)
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient >> bit & 1:
                np.bitwise_xor(total, source, out=total)
    return total


def _double(words: Words) -> None:
    """Multiply each byte by the generator, in place."""
    every = words.dtype.type(int.from_bytes(b"\x01" * words.itemsize, "little"))
    carry = (words >> words.dtype.type(7)) & every
    np.left_shift(words, 1, out=words)
    np.bitwise_and(words, ~every, out=words)
    np.bitwise_xor(words, carry * words.dtype.type(0x1D), out=words)
