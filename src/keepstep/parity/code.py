"""An erasure code: k data units, m parity units, and any k of these k + m determine the others.

Each row of coefficients is independent of the others, so that each can be computed by another node:

    m = 1   ones                               P: exclusive or
    m = 2   ones, powers of the generator      P + Q
    m >= 3  Cauchy, scaled so that the first row is ones; every square part has an inverse, so any m may be lost

The coefficient of source i in row r depends on (m, r, i) and not on k: an absent source counts as zeros.

Data is read and written in place. Sources may be shorter than the result, or absent: they are zero beyond their end,
without being copied. The only state is bounded caches: use it from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from keepstep.parity import galois
from keepstep.parity.backend import mix_ragged
from keepstep.parity.buffer_pins import MemorySpan, Pins

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_DATA = 32
MAX_PARITY = 4
DECODERS_KEPT = 1024


class Code:
    """k data units protected by m parity units. Indices 0..k-1 are data, k..k+m-1 parity."""

    def __init__(self, k: int, m: int) -> None:
        if not (1 <= k <= MAX_DATA and 0 <= m <= MAX_PARITY):
            raise ValueError(f"no code for {k} data and {m} parity units: 1 to {MAX_DATA} and 0 to {MAX_PARITY}")
        self.k = k
        self.m = m
        self.rows = tuple(coefficients(m, row, k) for row in range(m))

    def encode(self, row: int, sources: Sequence[Buffer | None], out: Buffer) -> None:
        """Fill `out` with parity row `row` of the k sources."""
        if not 0 <= row < self.m:
            raise ValueError(f"parity row {row} of {self.m}")
        if len(sources) != self.k:
            raise ValueError(f"{len(sources)} sources for a code of {self.k}")
        with Pins() as pins:
            target, spans = pins.write(out), [pins.read(source) for source in sources]
            for index, span in enumerate(spans):
                if span.size > target.size:
                    raise ValueError(f"source {index} has {span.size} bytes, more than the {target.size} of the result")
            _check_apart(spans, target)
            mix_ragged([self.rows[row]], spans, [target.address], target.size)

    def rebuild(self, erased: int, available: Mapping[int, Buffer | None], out: Buffer) -> None:
        """Fill `out` with data unit `erased`, from any k of the available units; longer ones are cut to its size."""
        if not 0 <= erased < self.k:
            raise ValueError(f"data unit {erased} of {self.k}")
        chosen = self._choose(erased, available)
        with Pins() as pins:
            target, spans = pins.write(out), [pins.read(available[index]) for index in chosen]
            _check_apart(spans, target)
            mix_ragged([decoder(self.k, self.m, chosen, erased)], spans, [target.address], target.size)

    def _choose(self, erased: int, available: Iterable[int]) -> tuple[int, ...]:
        """The k units to use: data first, then the cheapest rows."""
        indices = sorted(available)
        if any(not 0 <= index < self.k + self.m for index in indices):
            raise ValueError(f"units {indices} of a code of {self.k} + {self.m}")
        if erased in indices:
            raise ValueError(f"unit {erased} is to be rebuilt and is available")
        if len(indices) < self.k:
            raise ValueError(f"{len(indices)} units are available, {self.k} are needed to rebuild one")
        return tuple(indices[: self.k])


def weighted_sum(weights: bytes, sources: Sequence[Buffer], out: Buffer) -> None:
    """Fill `out` with the sum of weight times source; sources are zero beyond their end."""
    with Pins() as pins:
        target, spans = pins.write(out), [pins.read(source) for source in sources]
        _check_apart(spans, target)
        mix_ragged([weights], spans, [target.address], target.size)


@lru_cache(maxsize=DECODERS_KEPT)
def coefficients(m: int, row: int, k: int) -> bytes:
    """Coefficients of parity row `row` of a code with m rows, for sources 0..k-1."""
    if row == 0:
        return bytes([1] * k)
    if m == 2:
        return bytes(galois.power(source) for source in range(k))
    # Cauchy: 1 / (x + y) with all x (rows) and y (sources) different; each column times a constant, still every
    # square part has an inverse.
    first = MAX_DATA
    return bytes(galois.mul(first ^ source, galois.inv((first + row) ^ source)) for source in range(k))


@lru_cache(maxsize=DECODERS_KEPT)
def decoder(k: int, m: int, chosen: tuple[int, ...], erased: int) -> bytes:
    """Coefficients of the erased unit as a sum over the chosen units.

    There are as many unknowns as parity rows in use (at most four): P_r = sum over data, so the unknowns are the
    inverse of their part of the rows, times P_r minus the known data.
    """
    given = [index for index in chosen if index < k]
    rows = [coefficients(m, index - k, k) for index in chosen if index >= k]
    unknown = [index for index in range(k) if index not in given]
    solved = galois.inverse([[row[index] for index in unknown] for row in rows])[unknown.index(erased)]
    of_given = []
    for index in given:
        total = 0
        for factor, row in zip(solved, rows, strict=True):
            total ^= galois.mul(factor, row[index])
        of_given.append(total)
    return bytes([*of_given, *solved])


def _check_apart(spans: Sequence[MemorySpan], target: MemorySpan) -> None:
    """Refuse a result that overlaps a source: native code reads sources after it has begun to write."""
    for span in spans:
        if span.address < target.address + target.size and target.address < span.address + span.size:
            raise ValueError("the result overlaps a source")
