"""The code: every erasure pattern decodes, ragged sources, all kinds of buffers, and what is refused."""

from __future__ import annotations

import itertools
import mmap
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from keepstep.parity import backend, galois, isal
from keepstep.parity.code import Code, coefficients, decoder

SHAPES = [(k, m) for m in range(1, 5) for k in range(1, 11 - m)] + [(10, 4)]


@pytest.fixture(params=["isal", "numpy"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with each implementation."""
    if request.param == "numpy":
        monkeypatch.setattr(isal, "load", lambda: None)
    backend.chosen.cache_clear()
    assert backend.backend() == request.param
    yield request.param
    backend.chosen.cache_clear()


def units_of(code: Code, data: list[bytes], size: int) -> list[bytes]:
    """The data and its parity, computed by the tables."""
    found = []
    for row in range(code.m):
        total = bytes(size)
        for coefficient, source in zip(code.rows[row], data, strict=True):
            total = galois.add(total, galois.scale(coefficient, source.ljust(size, b"\0")))
        found.append(total)
    return [*data, *found]


def random_units(k: int, m: int, size: int, *, ragged: bool = False) -> tuple[Code, list[bytes]]:
    draw = random.Random(k * 1000 + m)
    sizes = [draw.choice((0, 1, size // 2, size - 1, size)) if ragged else size for _ in range(k)]
    code = Code(k, m)
    return code, units_of(code, [draw.randbytes(one) for one in sizes], size)


@pytest.mark.parametrize(("k", "m"), SHAPES)
def test_every_erasure_pattern_decodes(k: int, m: int) -> None:
    code, units = random_units(k, m, 37, ragged=True)
    for row in range(m):
        out = bytearray(b"\xee" * 37)
        code.encode(row, units[:k], out)
        assert out == units[k + row]
    for lost in range(1, m + 1):
        for erased in itertools.combinations(range(k + m), lost):
            available = {i: unit for i, unit in enumerate(units) if i not in erased}
            for index in erased:
                if index < k:
                    out = bytearray(b"\xee" * len(units[index]))
                    code.rebuild(index, available, out)
                    assert out == units[index], (k, m, erased, index)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_the_largest_codes_are_mds(m: int) -> None:
    """Any m of 32 sources can be solved for with any rows: no minor of the coefficients is zero."""
    rows = [coefficients(m, row, 32) for row in range(m)]
    for size in range(1, m + 1):
        for used in itertools.combinations(rows, size):
            # Four of 32 are 35,960 matrices: take those that hold source 0 or 31, and every seventh of the rest.
            for count, columns in enumerate(itertools.combinations(range(32), size)):
                if size < 4 or {0, 31} & set(columns) or count % 7 == 0:
                    galois.inverse([[row[column] for column in columns] for row in used])


def test_rows_are_the_documented_ones() -> None:
    assert coefficients(1, 0, 4) == coefficients(2, 0, 4) == coefficients(3, 0, 4) == b"\1\1\1\1"
    assert coefficients(2, 1, 10) == bytes([1, 2, 4, 8, 16, 32, 64, 128, 0x1D, 0x3A])
    # Cauchy: (x0 + y) / (x1 + y) with x0 = 32, x1 = 33.
    assert [galois.mul(c, 33 ^ y) for y, c in enumerate(coefficients(3, 1, 5))] == [32 ^ y for y in range(5)]
    for m in (2, 3, 4):
        assert all(coefficients(m, row, 32).startswith(coefficients(m, row, 5)) for row in range(m))


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (4, 1), (7, 2), (5, 3), (32, 4)])
@pytest.mark.parametrize("size", [1, 63, 64, 1000, 70_001])
def test_both_implementations_compute_what_the_tables_say(arithmetic: str, k: int, m: int, size: int) -> None:
    code, units = random_units(k, m, size, ragged=True)
    for row in range(m):
        out = bytearray(b"\xee" * size)
        code.encode(row, units[:k], out)
        assert out == units[k + row]
    available = dict(enumerate(units[m:], m))
    for index in range(min(k, m)):
        out = bytearray(len(units[index]))
        code.rebuild(index, available, out)
        assert out == units[index]


def test_a_buffer_longer_than_one_native_call(arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STEP_BYTES", 1000)
    code, units = random_units(3, 2, 3333, ragged=False)
    out = bytearray(3333)
    code.encode(1, units[:3], out)
    assert out == units[4]


def test_absent_sources_are_zero(arithmetic: str) -> None:
    code, data = Code(3, 2), bytes(range(100))
    out = bytearray(b"\xee" * 200)
    code.encode(1, [None, data, b""], out)
    assert out == galois.scale(2, data) + bytes(100)
    code.encode(0, [None, None, None], out)
    assert out == bytes(200)
    code.encode(0, [None, data, None], out)
    assert out == data + bytes(100)


def test_longer_units_are_cut_when_a_short_one_is_rebuilt(arithmetic: str) -> None:
    code, units = random_units(4, 2, 500)
    out = bytearray(123)
    code.rebuild(2, {i: units[i] for i in (0, 1, 5, 4)}, out)
    assert out == units[2][:123]


def test_known_zeros_count_as_available() -> None:
    out = bytearray(4)
    Code(3, 1).rebuild(0, {1: None, 2: b"", 3: b"abcd"}, out)
    assert out == b"abcd"


def test_all_kinds_of_buffers_are_read_and_written_where_they_lie() -> None:
    size = 3 * mmap.PAGESIZE
    code, units = random_units(5, 2, size)
    shared, read_only = mmap.mmap(-1, 2 * size), mmap.mmap(-1, size)
    shared[size:] = units[0]
    read_only[:] = units[1]
    sources = [
        memoryview(shared)[size:], memoryview(read_only).toreadonly(), bytearray(units[2]), units[3],
        np.frombuffer(units[4], dtype=np.float32).reshape(-1, 4),
    ]  # fmt: skip
    code.encode(1, sources, memoryview(shared)[:size])
    assert shared[:size] == units[6]
    out = np.zeros(size, np.uint8)
    code.rebuild(3, {0: sources[0], 1: sources[1], 2: sources[2], 4: sources[4], 6: memoryview(shared)[:size]}, out)
    assert out.tobytes() == units[3]
    del sources
    # No export is left behind: a map that is still held could not be closed.
    shared.close()
    read_only.close()


def test_buffers_are_let_go_when_a_call_is_refused() -> None:
    kept = mmap.mmap(-1, mmap.PAGESIZE)
    with pytest.raises(ValueError, match="more than"):
        Code(2, 1).encode(0, [kept, None], bytearray(3))
    kept.close()


@pytest.mark.parametrize(("k", "m"), [(0, 1), (33, 1), (4, 5), (4, -1)])
def test_codes_that_do_not_exist_are_refused(k: int, m: int) -> None:
    with pytest.raises(ValueError, match="no code"):
        Code(k, m)


def test_nonsense_is_refused_before_a_byte_is_written() -> None:
    code, data = Code(2, 2), [b"1234", b"5678"]
    out = bytearray(b"keep")
    with pytest.raises(ValueError, match="row 2 of 2"):
        code.encode(2, data, out)
    with pytest.raises(ValueError, match="row 0 of 0"):
        Code(2, 0).encode(0, data, out)
    with pytest.raises(ValueError, match="1 sources for a code of 2"):
        code.encode(0, data[:1], out)
    with pytest.raises(ValueError, match="source 1 has 5 bytes"):
        code.encode(0, [b"1234", b"12345"], out)
    with pytest.raises(ValueError, match="cannot be written as contiguous memory"):
        code.encode(0, data, b"four")
    with pytest.raises(ValueError, match="cannot be read as contiguous memory"):
        code.encode(0, [np.zeros(8, np.uint8)[::2], None], out)
    with pytest.raises(TypeError):
        code.encode(0, ["text", None], out)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="overlaps"):
        code.encode(0, [out, None], out)
    with pytest.raises(ValueError, match="data unit 2 of 2"):
        code.rebuild(2, {0: data[0], 1: data[1]}, out)
    with pytest.raises(ValueError, match="and is available"):
        code.rebuild(0, {0: data[0], 1: data[1]}, out)
    with pytest.raises(ValueError, match="1 units are available, 2 are needed"):
        code.rebuild(0, {1: data[1]}, out)
    with pytest.raises(ValueError, match="units"):
        code.rebuild(0, {1: data[1], 4: data[0]}, out)
    assert out == b"keep"


def test_many_threads_share_one_code() -> None:
    code, units = random_units(6, 2, 50_000)
    wrong: list[int] = []

    def work(seed: int) -> None:
        draw, out = random.Random(seed), bytearray(50_000)
        for _ in range(20):
            erased = draw.sample(range(8), 2)
            index = min(erased)
            if index >= 6:
                continue
            code.rebuild(index, {i: units[i] for i in range(8) if i not in erased}, out)
            if out != units[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_caches_are_bounded() -> None:
    assert decoder.cache_parameters()["maxsize"] is not None
    assert coefficients.cache_parameters()["maxsize"] is not None
