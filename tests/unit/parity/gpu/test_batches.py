"""The torch half computes the bits of the native one: on the CPU here, on CUDA with `-m gpu`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import fingerprint
from keepstep.parity.gpu import batches

WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensor(data: bytes, where: str = "cpu") -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8) if where == "cpu" else tensor(data).to(where)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 2), (4, 1), (7, 2), (32, 2), (5, 3), (6, 4)])
def test_torch_computes_the_bits_of_the_native_code(where: str, k: int, m: int) -> None:
    draw, size = random.Random(k), 10_003
    data = [draw.randbytes(draw.choice((0, 1, 7, 8, size // 2, size - 1, size))) for _ in range(k)]
    for row in range(m):
        expected = bytearray(size)
        Code(k, m).encode(row, data, expected)
        sources = [tensor(one, where) if one else None for one in data]
        for encode in (batches.encode, batches.encode_words):
            out = torch.full((size,), 0xEE, dtype=torch.uint8, device=where)
            encode(row, k, m, sources, out)
            assert bytes(out.tolist()) == expected, encode


@pytest.mark.parametrize("where", WHERE)
def test_sources_that_do_not_begin_on_a_word(where: str) -> None:
    data = random.Random(0).randbytes(4000)
    whole, expected = tensor(data, where), bytearray(1000)
    Code(3, 2).encode(1, [data[1:1001], data[1016:2015], data[2500:3500]], expected)
    out = torch.zeros(1003, dtype=torch.uint8, device=where)[3:]
    batches.encode_words(1, 3, 2, [whole[1:1001], whole[1016:2015], whole[2500:3500]], out)
    assert bytes(out.tolist()) == expected


@pytest.mark.parametrize("where", WHERE)
def test_blocks_of_a_long_row_meet(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CPU_BLOCK_BYTES", 1024)
    monkeypatch.setattr(batches, "CUDA_BLOCK_BYTES", 1024)
    data, expected = [random.Random(i).randbytes(5000) for i in range(3)], bytearray(5000)
    Code(3, 3).encode(2, data, expected)
    out = torch.empty(5000, dtype=torch.uint8, device=where)
    batches.encode_words(2, 3, 3, [tensor(one, where) for one in data], out)
    assert bytes(out.tolist()) == expected


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [0, 1, 1_000_001, CHUNK_BYTES, 2 * CHUNK_BYTES + 12345])
def test_fingerprints_are_the_native_ones(where: str, size: int) -> None:
    data = bytearray(random.Random(size).randbytes(size + 1))
    whole = torch.frombuffer(data, dtype=torch.uint8).to(where)
    expected = [fingerprint(data[at : min(at + CHUNK_BYTES, size)]) for at in range(0, size, CHUNK_BYTES)]
    for compute in (batches.fingerprints, batches.fingerprint_words):
        found = compute(whole[:size])
        assert found.device == whole.device
        assert found.shape == (len(expected), 16)
        assert [bytes(row) for row in found.tolist()] == expected, compute


def test_fingerprints_of_bytes_that_do_not_begin_on_a_word() -> None:
    data = bytearray(random.Random(9).randbytes(CHUNK_BYTES + 3))
    found = batches.fingerprint_words(torch.frombuffer(data, dtype=torch.uint8)[3:])
    assert bytes(found[0].tolist()) == fingerprint(data[3:])


def test_nonsense_is_refused() -> None:
    row = torch.zeros(8, dtype=torch.uint8)
    for call, reason in [
        (lambda: batches.encode(1, 2, 1, [row, row], row.clone()), "row 1 of 1"),
        (lambda: batches.encode(0, 2, 1, [row], row.clone()), "1 sources"),
        (lambda: batches.encode(0, 1, 1, [row.float()], row.clone()), "not a row of bytes"),
        (lambda: batches.encode(0, 1, 1, [row[::2]], row.clone()), "not a row of bytes"),
        (lambda: batches.encode(0, 1, 1, [torch.zeros(9, dtype=torch.uint8)], row.clone()), "9 bytes"),
        (lambda: batches.fingerprints(row.view(2, 4)), "not a row of bytes"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
