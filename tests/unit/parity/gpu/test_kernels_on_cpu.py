"""Batches give the bits of the native code: natively on the CPU, and by the kernels under Triton's interpreter.

The interpreter takes milliseconds for an operation, so what it gets is small. The kernels are compiled and run on a
device in tests/gpu/test_kernels.py. Triton is no dependency: where it is not installed, the half that needs it is
skipped.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import FOLDS, fingerprint
from keepstep.parity.gpu import batches
from keepstep.parity.gpu.batches import Source, Stripe, TensorBytes

FIRST, SECOND = FOLDS[0].block_bytes, FOLDS[1].block_bytes
ALIGNED = 16


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("with a device the kernels are compiled: TRITON_INTERPRET=1 is for the interpreter")
    # Read when Triton is imported. Without a device there is nothing else that it could do in this process.
    os.environ["TRITON_INTERPRET"] = "1"
    from keepstep.parity.gpu import kernels

    return kernels


@pytest.fixture(params=["native", "interpreted"])
def encode_batch(request: pytest.FixtureRequest) -> Callable[[int, int, Sequence[Stripe]], None]:
    if request.param == "native":
        return lambda k, m, stripes: batches.EncodeBatch(k, m, stripes).run()
    kernels = request.getfixturevalue("kernels")

    def run(k: int, m: int, stripes: Sequence[Stripe]) -> None:
        sums = [
            kernels.SumTables(
                tuple(Code(k, m).rows[row] for row in rows), [batches._parts(one) for one in sources], outs
            )
            for rows, sources, outs in stripes
        ]
        kernels.EncodeTables(sums, torch.device("cpu")).run()

    return run


@pytest.fixture(params=["native", "interpreted"])
def fingerprint_spans(request: pytest.FixtureRequest) -> Callable[[Sequence[Source]], Tensor]:
    if request.param == "native":
        return lambda spans: batches.FingerprintBatch(spans).run()
    kernels = request.getfixturevalue("kernels")

    def run(spans: Sequence[Source]) -> Tensor:
        parts = [batches._parts(span) for span in spans]
        return kernels.FingerprintTables(kernels.extents(parts), len(parts), torch.device("cpu")).run()

    return run


def memory(size: int, offset: int = 0, seed: int = 0) -> Tensor:
    """Random bytes that begin `offset` bytes after a multiple of 16."""
    whole = torch.frombuffer(bytearray(random.Random(seed).randbytes(size + 2 * ALIGNED)), dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNED + offset
    return whole[start : start + size]


def read(source: Source, size: int) -> bytes:
    whole = bytearray(size)
    for part in batches._parts(source):
        whole[part.begin : part.end] = bytes(part.source.tolist())
    return bytes(whole)


def check(k: int, m: int, stripes: Sequence[Stripe]) -> None:
    for rows, sources, outs in stripes:
        data = [read(source, outs[0].numel()) for source in sources]
        for row, out in zip(rows, outs, strict=True):
            expected = bytearray(out.numel())
            Code(k, m).encode(row, data, expected)
            assert bytes(out.tolist()) == expected


def test_many_copies(kernels: ModuleType) -> None:
    sizes = [1, 3, 16, 17, 64, 100, 4096, 70_001]
    for offset in (0, 1, 4):
        sources = [memory(size, offset, seed) for seed, size in enumerate(sizes)]
        outs = [memory(size, 0, 99) for size in sizes]
        kernels.CopyTables(sources, outs).run()
        assert all(map(torch.equal, sources, outs))


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 2), (7, 1), (7, 2), (9, 2), (5, 3), (4, 4), (17, 2)])
def test_rows_of_one_stripe(encode_batch: Callable, k: int, m: int) -> None:
    sources = [memory(200 if index != k - 1 else 90, 0, index) for index in range(k)]
    stripe = Stripe(range(m), sources, [memory(200, 0, 99) for _ in range(m)])
    encode_batch(k, m, [stripe])
    check(k, m, [stripe])


def test_stripes_with_other_rows_and_absent_sources(encode_batch: Callable) -> None:
    stripes = [
        Stripe([0, 1], [memory(100, seed=1), None], [memory(100), memory(100)]),
        Stripe([1], [None, memory(64, seed=2)], [memory(128)]),
        Stripe([0], [None, None], [memory(33, 1)]),
        Stripe([1], [memory(16, seed=3), memory(48, seed=4)], [memory(64)]),
    ]
    encode_batch(2, 2, stripes)
    check(2, 2, stripes)


def test_a_source_in_parts_with_gaps(encode_batch: Callable) -> None:
    parts = [
        TensorBytes(0, memory(40, seed=1)),
        TensorBytes(64, memory(3, seed=2)),
        TensorBytes(67, memory(50, 3, seed=3)),
    ]
    stripes = [Stripe([0, 1, 2], [parts, memory(150, seed=4)], [memory(160) for _ in range(3)])]
    encode_batch(2, 3, stripes)
    check(2, 3, stripes)


def test_ranges_longer_than_a_row_of_the_table(encode_batch: Callable) -> None:
    stripes = [Stripe([1], [memory(150_000, seed=1), memory(140_001, seed=2)], [memory(150_000)])]
    encode_batch(2, 2, stripes)
    check(2, 2, stripes)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_any_alignment_and_length(encode_batch: Callable, draw: st.DataObject) -> None:
    size = draw.draw(st.integers(1, 70))
    source = st.none() | st.builds(memory, st.integers(0, size), st.integers(0, 15), st.integers(0, 9))
    sources = draw.draw(st.tuples(source, source))
    stripes = [Stripe([1], sources, [memory(size, draw.draw(st.integers(0, 15)), 10)])]
    encode_batch(2, 2, stripes)
    check(2, 2, stripes)


@pytest.mark.parametrize("size", [1, 15, 16, 2001])
@pytest.mark.parametrize("offset", [0, 3])
def test_fingerprints_of_short_spans(fingerprint_spans: Callable, size: int, offset: int) -> None:
    span = memory(size, offset)
    assert bytes(fingerprint_spans([span])[0].tolist()) == fingerprint(bytes(span.tolist()))


# The places where blocks of a fold begin and end, and the end of the chunk.
PLACES = [
    SECOND - 10, FIRST - 20, 3 * FIRST + 5, FIRST - SECOND * (FIRST // SECOND) - 7, 16 * FIRST + 1000, CHUNK_BYTES - 40,
]  # fmt: skip


@pytest.mark.parametrize("begin", PLACES)
def test_fingerprints_of_bytes_anywhere_in_a_chunk(fingerprint_spans: Callable, begin: int) -> None:
    span = [TensorBytes(begin, memory(40, begin % ALIGNED))]
    assert bytes(fingerprint_spans([span])[0].tolist()) == fingerprint(read(span, CHUNK_BYTES))


def test_fingerprints_of_many_spans_keep_their_order(fingerprint_spans: Callable) -> None:
    spans = [
        memory(100, seed=1),
        None,
        [TensorBytes(0, memory(5, seed=2)), TensorBytes(1000, memory(70, 1, seed=3))],
        memory(33, 1),
    ]
    found = fingerprint_spans(spans)
    assert [bytes(row) for row in found.tolist()] == [fingerprint(read(span, 2000)) for span in spans]
    assert fingerprint_spans([]).shape == (0, 16)


def test_tables_run_again_over_other_bytes(kernels: ModuleType) -> None:
    span = memory(50)
    tables = kernels.FingerprintTables(kernels.extents([[TensorBytes(0, span)]]), 1, torch.device("cpu"))
    for filling in (1, 2):
        span.fill_(filling)
        assert bytes(tables.run()[0].tolist()) == fingerprint(bytes([filling] * 50))


def test_a_span_over_several_blocks_of_the_first_fold(kernels: ModuleType) -> None:
    """Every block of every fold; most of a minute under the interpreter."""
    span = memory(2 * FIRST + 12345)
    found = kernels.fingerprint_chunks(span, CHUNK_BYTES)
    assert bytes(found[0].tolist()) == fingerprint(span.numpy().data)


def test_wrong_kernels_are_not_believed() -> None:
    """And right ones are: here the native code stands in for them."""

    def encode_rows(rows: Sequence[bytes], sources: Sequence[Sequence[TensorBytes]], outs: Sequence[Tensor]) -> None:
        batches.EncodeBatch(3, 2, [Stripe(range(2), sources, outs)]).run()

    def fingerprint_chunks(data: Tensor, chunk_bytes: int) -> Tensor:
        return batches.fingerprints(data)

    right = SimpleNamespace(encode_rows=encode_rows, fingerprint_chunks=fingerprint_chunks)
    assert batches.self_test(right, torch.device("cpu")) == ""
    right.fingerprint_chunks = lambda data, chunk_bytes: batches.fingerprints(data) ^ 1
    assert "fingerprints" in batches.self_test(right, torch.device("cpu"))
    right.encode_rows = lambda rows, sources, outs: [out.zero_() for out in outs]
    assert "parity" in batches.self_test(right, torch.device("cpu"))


def test_nonsense_in_a_batch_is_refused() -> None:
    row = torch.zeros(8, dtype=torch.uint8)
    for call, reason in [
        (lambda: batches.EncodeBatch(1, 1, [Stripe([0], [row], [])]).run(), "0 results for 1 rows"),
        (lambda: batches.EncodeBatch(1, 1, [Stripe([1], [row], [row.clone()])]).run(), "row 1 of 1"),
        (
            lambda: batches.EncodeBatch(1, 2, [Stripe([0, 1], [row], [row.clone(), row[:4]])]).run(),
            "results of 4 and 8",
        ),
        (lambda: batches.EncodeBatch(1, 1, [Stripe([0], [[TensorBytes(1, row)]], [row.clone()])]).run(), "9 bytes"),
        (lambda: batches.FingerprintBatch([[TensorBytes(0, row), TensorBytes(7, row)]]).run(), "begins at 7"),
        (lambda: batches.FingerprintBatch([[TensorBytes(CHUNK_BYTES, row)]]).run(), "bytes on cpu"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
