"""Finding ISA-L, and refusing one that lies."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.parity import backend, isal
from keepstep.parity.buffer_pins import pointers


def real_path() -> str:
    found = isal.load()
    assert found is not None
    return found.path


def doctored(*, when: Any) -> Any:
    """The real library, but results are changed where `when(size, sources, targets)` says so."""

    def open_library(path: str) -> Any:
        library = ctypes.CDLL(path)
        library.ec_encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3

        def encode(size: int, num_sources: int, num_targets: int, tables: Any, sources: Any, targets: Any) -> None:
            library.ec_encode_data(size, num_sources, num_targets, tables, sources, targets)
            if when(size, num_sources, num_targets):
                last = (ctypes.c_ubyte * size).from_address(targets[num_targets - 1])
                last[size - 1] ^= 0x40

        return SimpleNamespace(ec_init_tables=library.ec_init_tables, ec_encode_data=encode)

    return open_library


def test_the_library_of_the_wheel_is_found_and_works() -> None:
    found = isal.load()
    assert found is not None
    assert "pyeclib" in found.path
    assert isal.self_test(found) == ""


@pytest.mark.parametrize(
    "when",
    [
        lambda size, sources, targets: targets == 255,
        lambda size, sources, targets: size < 32,
        lambda size, sources, targets: size > 4096,
        lambda size, sources, targets: targets == 2,
        lambda size, sources, targets: sources == 32,
    ],
)
def test_a_library_with_one_wrong_bit_is_refused(when: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert isal.load([real_path()], open_library=doctored(when=when)) is None
    assert "is not used" in caplog.text


def test_a_library_that_writes_beyond_the_end_is_refused() -> None:
    path = real_path()

    def open_library(_: str) -> Any:
        library = ctypes.CDLL(path)
        library.ec_encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3

        def encode(size: int, num_sources: int, num_targets: int, tables: Any, sources: Any, targets: Any) -> None:
            library.ec_encode_data(size, num_sources, num_targets, tables, sources, targets)
            ctypes.memset(targets[0] + size, 0, 1)

        return SimpleNamespace(ec_init_tables=library.ec_init_tables, ec_encode_data=encode)

    assert isal.load([path], open_library=open_library) is None


def test_the_next_candidate_is_tried() -> None:
    path = real_path()

    def open_library(name: str) -> Any:
        return doctored(when=lambda *_: True)(path) if name == "broken" else ctypes.CDLL(name)

    found = isal.load(["/nowhere/libisal.so.2", "broken", path], open_library=open_library)
    assert found is not None
    assert found.path == path


def test_a_library_without_the_functions_is_passed_over() -> None:
    assert isal.load(["libc.so.6"]) is None
    assert isal.load([]) is None


def test_the_system_library_comes_after_the_wheel() -> None:
    names = list(isal.candidates())
    assert names[-1] == isal.SYSTEM_LIBRARY
    assert len(names) >= 2


def test_lengths_that_a_c_int_would_cut_are_refused() -> None:
    found = isal.load()
    assert found is not None
    with pytest.raises(AssertionError):
        found.mix(b"\x01", pointers([0]), pointers([0]), (1 << 32) + 64)


def test_numpy_takes_over_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(isal, "load", lambda: None)
    backend.chosen.cache_clear()
    try:
        assert backend.backend() == "numpy"
        assert "slower" in caplog.text
    finally:
        backend.chosen.cache_clear()


def test_neither_numpy_nor_torch_is_loaded_where_isal_works() -> None:
    program = """
import sys
from keepstep.parity import backend, code, fingerprint, placement
code.Code(2, 1).encode(0, [b"ab", b"cd"], bytearray(2))
fingerprint.fingerprint(b"ab")
assert backend.backend() == "isal"
print(*({"numpy", "torch"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
