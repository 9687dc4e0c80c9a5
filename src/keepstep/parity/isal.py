"""ISA-L through ctypes: found, tested, and refused when a result differs from `galois`.

The library is a private file of pyeclib's wheel, not an API of it, so nothing is assumed: each candidate is tried in
turn; one that is absent, lacks a function or fails the self-test is skipped with a line in the log.

Traps that are handled here: lengths are C ints and ctypes truncates silently (`MAX_BYTES`); the tables of
`ec_init_tables` depend on the processor, so they never leave the process; calls release the GIL, so the caller must
hold the memory (`buffer_pins.Pins`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from keepstep.parity import galois
from keepstep.parity.buffer_pins import Pointers, pointers

SYSTEM_LIBRARY = "libisal.so.2"
MAX_BYTES = 1 << 30  # in one call
TABLES_KEPT = 512  # for different matrices; each takes 32 bytes per coefficient

log = logging.getLogger("keepstep")


class IsalBackend:
    """The two functions of ISA-L that keepstep needs."""

    name = "isal"

    def __init__(self, library: Any, path: str = "") -> None:
        self.path = path
        self._init_tables = library.ec_init_tables
        self._init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
        self._init_tables.restype = None
        self._encode_data = library.ec_encode_data
        self._encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3
        self._encode_data.restype = None
        self._tables: Callable[[bytes, int], Any] = lru_cache(maxsize=TABLES_KEPT)(self._make_tables)

    def mix(self, matrix: bytes, sources: Pointers, targets: Pointers, size: int) -> None:
        """targets = matrix x sources, for `size` bytes at each address; the matrix is row after row."""
        num_sources, num_targets = len(sources), len(targets)
        assert 0 < size <= MAX_BYTES, size
        assert len(matrix) == num_sources * num_targets > 0, len(matrix)
        self._encode_data(size, num_sources, num_targets, self._tables(matrix, num_sources), sources, targets)

    def _make_tables(self, matrix: bytes, num_sources: int) -> Any:
        tables = ctypes.create_string_buffer(32 * len(matrix))
        self._init_tables(num_sources, len(matrix) // num_sources, matrix, tables)
        return tables


def load(paths: Iterable[str] | None = None, *, open_library: Callable[[str], Any] = ctypes.CDLL) -> IsalBackend | None:
    """Load the first candidate that works, or None."""
    for path in candidates() if paths is None else paths:
        try:
            library = IsalBackend(open_library(path), path)
        except (OSError, AttributeError) as error:
            log.debug("no ISA-L in %s: %s", path, error)
            continue
        problem = self_test(library)
        if not problem:
            return library
        log.warning("the ISA-L in %s is not used: %s", path, problem)
    return None


def candidates() -> Iterator[str]:
    """Paths of libraries to try: in pyeclib's wheel, then the system's."""
    try:
        files = importlib.metadata.files("pyeclib") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    yield from (str(file.locate()) for file in files if file.name.startswith("libisal"))
    yield SYSTEM_LIBRARY


def self_test(library: IsalBackend) -> str:
    """The reason why the library must not be used; empty when it is correct."""
    every = bytes(range(256))
    got = _mix(library, every[1:], 255, [every], 256)
    for coefficient in range(1, 256):
        if got[coefficient - 1] != galois.products(coefficient):
            return f"products with {coefficient} are wrong"
    # Kernels differ by the number of targets, and handle short buffers and the end of long ones separately.
    for num_sources, num_targets, size in ((1, 1, 1), (4, 1, 4099), (7, 2, 1000), (32, 4, 95), (3, 3, 31), (5, 6, 64)):
        rows = [bytes(galois.power(t * s + t) for s in range(num_sources)) for t in range(num_targets)]
        sources = [every[s:].ljust(size, bytes([s + 1]))[:size] for s in range(num_sources)]
        got = _mix(library, b"".join(rows), num_targets, sources, size)
        if got != [_expected(row, sources, size) for row in rows]:
            return f"{num_targets} sums over {num_sources} sources of {size} bytes are wrong"
    return ""


def _expected(row: bytes, sources: Sequence[bytes], size: int) -> bytes:
    total = bytes(size)
    for coefficient, source in zip(row, sources, strict=True):
        total = galois.add(total, galois.scale(coefficient, source))
    return total


def _mix(library: IsalBackend, matrix: bytes, num_targets: int, sources: Sequence[bytes], size: int) -> list[bytes]:
    """Results in unaligned memory with guards; a target whose guard changed is returned empty."""
    guard, stride = b"\xa5" * 64, size + 129
    inputs = ctypes.create_string_buffer(b"".join(s.ljust(stride, b"\x5a") for s in sources))
    outputs = ctypes.create_string_buffer(b"\xa5" * (num_targets * stride + 64))
    start_in, start_out = ctypes.addressof(inputs), ctypes.addressof(outputs) + 64
    library.mix(
        matrix,
        pointers(range(start_in, start_in + len(sources) * stride, stride)),
        pointers(range(start_out, start_out + num_targets * stride, stride)),
        size,
    )
    raw, results = outputs.raw, []
    for at in range(64, 64 + num_targets * stride, stride):
        whole = raw[at - 64 : at + size + 64]
        results.append(whole[64:-64] if whole[:64] == guard == whole[-64:] else b"")
    return results
