"""Small tensors of the host on their way into the arena: thousands of them in a handful of system calls.

A list of addresses and lengths is made once per layout; the system gathers what it names. One copy for each tensor
takes ten times as long, inside `take`. An address that is no more gives an error, not a fault.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keepstep import faults
from keepstep.errors import CaptureError
from keepstep.layout import ALIGN
from keepstep.trainer.capture.small_tensors import runs_of
from keepstep.trainer.plan.units import CopyOp

MOST_PIECES = 1024
"""in one call (IOV_MAX)"""
MOST_BYTES = 1 << 30
"""in one call: the system takes 2 GiB at most, and says so only by a short count"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwritev.restype = ctypes.c_ssize_t
_libc.pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_ZEROS = np.zeros(ALIGN, dtype=np.uint8)


@dataclass(frozen=True)
class _Call:
    pieces: np.ndarray
    """rows of (address, bytes), as the system wants them"""
    offset: int
    """in the payload"""
    size_bytes: int


class Scattered:
    """Units of the host, and the calls that write them."""

    def __init__(self, units: Sequence[CopyOp]) -> None:
        self.units = units  # the calls have addresses only
        self._calls = [call for run in runs_of(units) for call in _calls(run)]

    def write(self, fd: int, start: int) -> None:
        """Into a payload that starts there in the memory behind `fd`."""
        for call in self._calls:
            faults.point("capture.eager")
            address, count = call.pieces.ctypes.data, len(call.pieces)
            if _libc.pwritev(fd, address, count, start + call.offset) != call.size_bytes:
                why = os.strerror(ctypes.get_errno())
                raise CaptureError(f"small tensors from {self.units[0].path} on could not be read: {why}")


def _calls(run: list[CopyOp]) -> list[_Call]:
    """What lies between two units is padding, and written as zeros."""
    ends = [*(unit.offset for unit in run[1:]), run[-1].offset + run[-1].size_bytes]
    pieces, calls, start = list[tuple[int, int]](), list[_Call](), run[0].offset
    for unit, end in zip(run, ends, strict=True):
        if pieces and (len(pieces) + 2 > MOST_PIECES or end - start > MOST_BYTES):
            calls.append(_Call(np.array(pieces, dtype=np.uint64), start, unit.offset - start))
            pieces, start = [], unit.offset
        pieces.append((unit.source.data_ptr(), unit.size_bytes))
        if padding := end - unit.offset - unit.size_bytes:
            pieces.append((_ZEROS.ctypes.data, padding))
    return [*calls, _Call(np.array(pieces, dtype=np.uint64), start, ends[-1] - start)]
