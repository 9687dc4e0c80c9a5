"""GF(256) over 0x11d with generator 2: the field of every code, table and fingerprint here.

Pure Python, because a keeper never imports numpy where ISA-L works: only coefficients are computed here, never data.
It is also the reference: native code is used only after it agreed with these tables (`isal.self_test`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

POLYNOMIAL = 0x11D
GENERATOR = 2
ORDER = 255  # of the generator: its powers are every element but zero


def _powers() -> bytes:
    powers, value = bytearray(), 1
    for _ in range(ORDER):
        powers.append(value)
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return bytes(powers * 2)


# Two periods, so that the sum of two logarithms needs no remainder.
EXP = _powers()
LOG = {value: power for power, value in enumerate(EXP[:ORDER])}


def mul(a: int, b: int) -> int:
    return EXP[LOG[a] + LOG[b]] if a and b else 0


def inv(a: int) -> int:
    if a == 0:
        raise ZeroDivisionError("zero has no inverse in GF(256)")
    return EXP[ORDER - LOG[a]]


def power(exponent: int) -> int:
    """The generator to this power, which may be any whole number."""
    return EXP[exponent % ORDER]


@lru_cache(maxsize=256)
def products(a: int) -> bytes:
    """a times each element: a table for `bytes.translate`, which multiplies a whole buffer by a."""
    return bytes(mul(a, b) for b in range(256))


def scale(a: int, data: bytes) -> bytes:
    return data.translate(products(a))


def add(a: bytes, b: bytes) -> bytes:
    """The sum of two byte strings of one length; addition is exclusive or, and its own inverse."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} bytes cannot be added")
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def inverse(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """The inverse of a small square matrix; ValueError when it has none."""
    size = len(matrix)
    if any(len(row) != size for row in matrix):
        raise ValueError("only a square matrix has an inverse")
    work = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if work[row][column]), None)
        if pivot is None:
            raise ValueError("the matrix has no inverse")
        work[column], work[pivot] = work[pivot], work[column]
        factor = inv(work[column][column])
        work[column] = [mul(factor, value) for value in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [value ^ mul(factor, above) for value, above in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]
