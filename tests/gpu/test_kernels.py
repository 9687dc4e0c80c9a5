"""Parity and fingerprints on a CUDA device have the bits of ISA-L. Runs under pytest, or by itself:

    PYTHONPATH=src:.carry python tests/gpu/test_kernels.py [--device cpu]

With Triton where it is installed, and with torch operations.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import FOLDS, fingerprint
from keepstep.parity.gpu import batches
from keepstep.parity.gpu.batches import CopyBatch, EncodeBatch, FingerprintBatch, Source, Stripe, TensorBytes

pytestmark = [pytest.mark.gpu]
DEVICE = os.environ.get("KEEPSTEP_TEST_DEVICE", "cuda")
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
FIRST, SECOND = FOLDS[0].block_bytes, FOLDS[1].block_bytes


def memory(size: int, offset: int = 0) -> Tensor:
    """Random bytes that begin `offset` bytes after a multiple of 16."""
    return torch.randint(256, (size + offset,), dtype=torch.uint8, device=DEVICE)[offset:]


def read(source: Source, size: int) -> bytes:
    whole = torch.zeros(size, dtype=torch.uint8)
    for part in batches._parts(source):
        whole[part.begin : part.end] = part.source.cpu()
    return bytes(whole.numpy())


def check(k: int, m: int, stripes: Sequence[Stripe]) -> None:
    for index, (rows, sources, outs) in enumerate(stripes):
        data = [read(source, outs[0].numel()) for source in sources]
        for row, out in zip(rows, outs, strict=True):
            expected = bytearray(out.numel())
            Code(k, m).encode(row, data, expected)
            assert bytes(out.cpu().numpy()) == expected, (k, m, index, row)


def check_spans(spans: Sequence[Source], found: Tensor) -> None:
    for index, (span, row) in enumerate(zip(spans, found.cpu(), strict=True)):
        end = max((part.end for part in batches._parts(span)), default=0)
        assert bytes(row.numpy()) == fingerprint(read(span, end)), index


@contextmanager
def with_torch() -> Iterator[None]:
    """No kernels."""
    known = batches._kernels
    batches._kernels = lambda where: None  # type: ignore[assignment]
    try:
        yield
    finally:
        batches._kernels = known


SHAPES = [(1, 1), (2, 2), (6, 2), (7, 1), (7, 2), (32, 2), (5, 3), (6, 4)]


@pytest.mark.parametrize(("k", "m"), SHAPES)
def test_single_rows(k: int, m: int) -> None:
    draw = random.Random(k)
    for size, offset in ((100_003, 0), (65_536, 0), (70_000, 5), (17, 0), (0, 0)):
        data = [
            memory(draw.choice((0, min(1, size), size // 2, size, size)), draw.choice((0, offset))) for _ in range(k)
        ]
        sources = [one if len(one) else None for one in data]
        for row in range(m):
            out = memory(size, offset)
            batches.encode(row, k, m, sources, out)
            check(k, m, [Stripe([row], sources, [out])])


@pytest.mark.parametrize(("k", "m"), SHAPES)
def test_batches_of_whole_chunks(k: int, m: int) -> None:
    """All rows at once and each by itself; the last stripe lacks sources."""
    stripes = []
    for rows in [range(m), *([row] for row in range(m))]:
        sources: list[Source] = [memory(CHUNK_BYTES) for _ in range(k)]
        stripes.append(Stripe(rows, sources, [memory(CHUNK_BYTES) for _ in rows]))
    short = [memory(CHUNK_BYTES), memory(CHUNK_BYTES - 12_345), *[None] * k][:k]
    stripes.append(Stripe(range(m), short, [memory(CHUNK_BYTES) for _ in range(m)]))
    batch = EncodeBatch(k, m, stripes)
    for _ in range(2):
        for stripe in stripes:
            for out in stripe.outs:
                out.fill_(0xEE)
        batch.run()
        check(k, m, stripes)


def mixed_stripes(count: int) -> list[Stripe]:
    """Any alignment, any length, absent sources, and sources in parts."""
    draw, stripes = random.Random(count), []
    for _ in range(count):
        size = draw.choice((1, 100, 4096, 200_000, draw.randrange(1, 300_000)))
        sources: list[Source] = []
        for _ in range(3):
            if draw.random() < 0.4:
                cuts = sorted(draw.randrange(size + 1) for _ in range(4))
                pairs = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
                sources.append(
                    [TensorBytes(a, memory(b - a, draw.choice((a % 16, draw.randrange(16))))) for a, b in pairs]
                )
            else:
                sources.append(
                    memory(draw.randrange(size + 1), draw.choice((0, 0, 4, 3))) if draw.random() > 0.2 else None
                )
        rows = draw.choice(([0], [1], [0, 1], [1, 0]))
        stripes.append(Stripe(rows, sources, [memory(size, draw.choice((0, 0, 8, 1))) for _ in rows]))
    return stripes


def test_a_batch_of_everything() -> None:
    stripes = mixed_stripes(60)
    batches.EncodeBatch(3, 2, stripes).run()
    check(3, 2, stripes)


def test_many_small_copies() -> None:
    rng = random.Random(1)
    sizes = [rng.choice([1, 4, 16, 100, 4096, 32768, 1_000_001]) for _ in range(3000)]
    sources = [memory(size, rng.choice([0, 0, 0, 1, 4])) for size in sizes]
    buffer = torch.zeros(sum(sizes) + 64 * len(sizes), dtype=torch.uint8, device=DEVICE)
    outs, at = [], 0
    for size in sizes:
        outs.append(buffer[at : at + size])
        at += -(-size // 64) * 64
    batch = CopyBatch(sources, outs)
    for _ in range(2):
        buffer.fill_(7)
        batch.run()
        assert all(map(torch.equal, sources, outs))
        padding = [buffer[a.storage_offset() + a.numel() : b.storage_offset()] for a, b in pairwise(outs)]
        assert all(bool((gap == 7).all()) for gap in padding)


def test_torch_operations_have_the_same_bits() -> None:
    stripes, spans = (
        mixed_stripes(20),
        [memory(100), None, [TensorBytes(3, memory(5)), TensorBytes(300_000, memory(9_999))]],
    )
    with with_torch():
        batches.EncodeBatch(3, 2, stripes).run()
        found = batches.FingerprintBatch(spans).run()
    check(3, 2, stripes)
    check_spans(spans, found)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 1_000_001, CHUNK_BYTES, 2 * CHUNK_BYTES + 12_345])
def test_fingerprints_of_chunks(size: int, offset: int) -> None:
    data = memory(size, offset)
    check_spans(data.split(CHUNK_BYTES) if size else [], batches.fingerprints(data))


def test_fingerprints_of_spans_of_all_kinds() -> None:
    draw = random.Random(1)
    spans: list[Source] = [None, memory(CHUNK_BYTES), memory(CHUNK_BYTES - 1, 1)]
    for begin in (SECOND - 8, FIRST - 8, FIRST - 3, 16 * FIRST + 1000, CHUNK_BYTES - 16):
        spans += [[TensorBytes(begin, memory(16, offset))] for offset in (begin % 16, 3)]
    for _ in range(100):
        cuts = sorted(draw.randrange(CHUNK_BYTES + 1) for _ in range(6))
        pairs = zip(cuts[::2], cuts[1::2], strict=True)
        spans.append(
            [TensorBytes(a, memory(b - a, draw.choice((a % 16, a % 16, draw.randrange(16))))) for a, b in pairs]
        )
    check_spans(spans, batches.FingerprintBatch(spans).run())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_runs_queue_on_the_current_stream_and_wait_for_nothing() -> None:
    """Behind a kernel that is busy for long, after which the sources change; nothing is allocated either."""
    if DEVICE == "cpu":
        return
    sources, filling = [memory(CHUNK_BYTES) for _ in range(3)], memory(CHUNK_BYTES)
    stripes = [Stripe([0, 1], sources, [memory(CHUNK_BYTES), memory(CHUNK_BYTES)])]
    encode, fingerprints = EncodeBatch(3, 2, stripes), FingerprintBatch(sources)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            sources[1].copy_(filling)
            encode.run()
            found = fingerprints.run()
        assert not stream.query(), "run has waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    stream.synchronize()
    assert torch.equal(sources[1], filling)
    check(3, 2, stripes)
    check_spans(sources, found)


def test_triton_is_used_where_it_is_installed() -> None:
    if DEVICE == "cuda" and find_spec("triton") and os.environ.get(batches.TRITON_VARIABLE) != "0":
        batches.warm_up(DEVICE, 7, 2)
        assert batches._kernels(torch.empty(0, device=DEVICE).device) is not None


if __name__ == "__main__":
    if "--device" in sys.argv:
        DEVICE = sys.argv[sys.argv.index("--device") + 1]
    test_triton_is_used_where_it_is_installed()
    for shape in SHAPES:
        test_single_rows(*shape)
        test_batches_of_whole_chunks(*shape)
        print("passed", shape, flush=True)
    test_a_batch_of_everything()
    test_torch_operations_have_the_same_bits()
    for size in (0, 1, 1_000_001, CHUNK_BYTES, 2 * CHUNK_BYTES + 12_345):
        for offset in (0, 1, 4, 8):
            test_fingerprints_of_chunks(size, offset)
    test_fingerprints_of_spans_of_all_kinds()
    test_runs_queue_on_the_current_stream_and_wait_for_nothing()
    print("passed", DEVICE, "all")
