"""Arithmetic on bytes: ISA-L where it is installed and passes its self-test, else numpy. Same bits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from keepstep.parity import isal
from keepstep.parity.buffer_pins import MemorySpan, Pointers, pointers

STEP_BYTES = 1 << 20  # per native call: far below the C int that ISA-L takes; a call costs less than a thousandth

log = logging.getLogger("keepstep")


class Backend(Protocol):
    """A library that computes sums over GF(256) in native memory."""

    name: str
    path: str

    def mix(self, matrix: bytes, sources: Pointers, targets: Pointers, size: int) -> None:
        """targets = matrix x sources over GF(256), for `size` bytes at each address."""


def backend() -> str:
    """The backend in use: `isal` or `numpy`."""
    return chosen().name


@cache
def chosen() -> Backend:
    """The backend that every computation of this process uses; found once."""
    library = isal.load()
    if library is not None:
        return library
    log.warning(
        "no ISA-L that works was found (pip install pyeclib): parity is computed by numpy, several times slower"
    )
    from keepstep.parity.numpy_backend import NumpyBackend

    return NumpyBackend()


def mix_ragged(rows: Sequence[bytes], sources: Sequence[MemorySpan], targets: Sequence[int], size: int) -> None:
    """Sums over sources of unequal length, which are zero beyond their end and are not copied.

    The range is cut where a source ends; between two cuts the sum has fewer terms.
    """
    native, start = chosen(), 0
    for end in sorted({min(source.size, size) for source in sources} | {size}):
        if end == start:
            continue
        active = [i for i, source in enumerate(sources) if source.size > start]
        matrix = bytes(row[i] for row in rows for i in active)
        for at in range(start, end, STEP_BYTES):
            step = min(STEP_BYTES, end - at)
            if not active:
                for target in targets:
                    ctypes.memset(target + at, 0, step)
            elif matrix == b"\x01":
                ctypes.memmove(targets[0] + at, sources[active[0]].address + at, step)
            else:
                reading = pointers([sources[i].address + at for i in active])
                native.mix(matrix, reading, pointers([target + at for target in targets]), step)
        start = end
