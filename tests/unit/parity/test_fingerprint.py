"""Fingerprints: linear, sensitive to every bit and place, blind to zeros at the end, equal in all implementations."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity import backend, galois, isal
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, FOLDS, combine, fingerprint, fold_row

LENGTHS = (0, 1, 29, 64, 5000, FOLDS[0].block_bytes, FOLDS[0].block_bytes + 1, 1_000_003, CHUNK_BYTES - 1, CHUNK_BYTES)
PRODUCTS = np.frombuffer(b"".join(galois.products(a) for a in range(256)), dtype=np.uint8).reshape(256, 256)


@pytest.fixture(params=["isal", "numpy"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "numpy":
        monkeypatch.setattr(isal, "load", lambda: None)
    backend.chosen.cache_clear()
    yield request.param
    backend.chosen.cache_clear()


def by_definition(data: bytes) -> bytes:
    """As the module's docstring says it, with nothing clever."""
    state = np.frombuffer(data, dtype=np.uint8)
    for level, fold in enumerate(FOLDS):
        blocks = np.zeros(fold.num_blocks * fold.block_bytes, np.uint8)
        blocks[: state.size] = state
        blocks = blocks.reshape(fold.num_blocks, fold.block_bytes)
        factors = [np.frombuffer(fold_row(level, row), dtype=np.uint8) for row in range(fold.num_rows)]
        state = np.concatenate([np.bitwise_xor.reduce(PRODUCTS[f[:, None], blocks], axis=0) for f in factors])
    return state.tobytes()


def weight(position: int) -> bytes:
    """What a single one at this place of a chunk gives: the fingerprint, in a few products."""
    column = {position: 1}
    for level, fold in enumerate(FOLDS):
        following: dict[int, int] = {}
        for at, value in column.items():
            block, offset = divmod(at, fold.block_bytes)
            for row in range(fold.num_rows):
                place = row * fold.block_bytes + offset
                following[place] = following.get(place, 0) ^ galois.mul(fold_row(level, row)[block], value)
        column = following
    return bytes(column.get(at, 0) for at in range(FINGERPRINT_BYTES))


def test_it_is_what_the_definition_says(arithmetic: str) -> None:
    data = random.Random(1).randbytes(CHUNK_BYTES)
    for length in LENGTHS:
        assert fingerprint(data[:length]) == by_definition(data[:length]), length


def test_the_bits_are_frozen() -> None:
    """Keepers of two releases compare these: a change here is a change of protocol."""
    assert fingerprint(random.Random(1).randbytes(CHUNK_BYTES)).hex() == "b47f230e3c0883b99231cea5076735b0"
    assert fingerprint(b"keepstep").hex() == weight_sum(b"keepstep").hex()


def weight_sum(data: bytes) -> bytes:
    return combine(list(data), [weight(position) for position in range(len(data))])


def test_folds_cover_a_chunk_and_end_in_sixteen_bytes() -> None:
    size = CHUNK_BYTES
    for fold, following in zip(FOLDS, (*FOLDS[1:], None), strict=True):
        assert fold.num_blocks * fold.block_bytes >= size
        # Points are powers of the generator: different up to 255.
        assert fold.num_blocks <= 255
        assert following is None or following.num_rows == 2 * fold.num_rows
        size = fold.num_rows * fold.block_bytes
    assert size == FINGERPRINT_BYTES


def test_zeros_at_the_end_change_nothing() -> None:
    data = random.Random(2).randbytes(1_000_000)
    for length in (1, 30, 64, 100_000, 999_999):
        for zeros in (1, 63, 4096, CHUNK_BYTES - length):
            assert fingerprint(data[:length] + bytes(zeros)) == fingerprint(data[:length])
    assert fingerprint(b"") == fingerprint(bytes(CHUNK_BYTES)) == bytes(16)
    assert fingerprint(b"\0" + data) != fingerprint(data)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_parity_is_audited_without_the_data(m: int) -> None:
    draw = random.Random(m)
    code = Code(5, m)
    data = [draw.randbytes(draw.choice((0, 10, 300_000, 1_000_000))) for _ in range(5)]
    marks = [fingerprint(one) for one in data]
    for row in range(m):
        parity = bytearray(1_000_000)
        code.encode(row, data, parity)
        assert fingerprint(parity) == combine(code.rows[row], marks)
        # The audit: one bit of one replica that is not the others'.
        parity[draw.randrange(len(parity))] ^= 1 << draw.randrange(8)
        assert fingerprint(parity) != combine(code.rows[row], marks)


def test_every_single_bit_of_a_short_chunk_shows() -> None:
    data = bytearray(random.Random(3).randbytes(300))
    seen = {fingerprint(data)}
    for position in range(300):
        for bit in range(8):
            data[position] ^= 1 << bit
            seen.add(fingerprint(data))
            data[position] ^= 1 << bit
    assert len(seen) == 1 + 300 * 8


def test_no_place_of_a_chunk_is_blind() -> None:
    """A bit of byte b changes the fingerprint by (the bit) x weight(b): no weight may be zero.

    The weight of a place depends on its block and offset in each fold; all of them, by way of each fold's columns.
    """
    draw = random.Random(4)
    places = [0, CHUNK_BYTES - 1, *(draw.randrange(CHUNK_BYTES) for _ in range(3000))]
    places += [block * FOLDS[0].block_bytes + end for block in range(16) for end in (0, FOLDS[0].block_bytes - 1)]
    weights = [weight(place) for place in places]
    assert bytes(16) not in weights
    # And no two are multiples of each other, so that no change of two bytes cancels.
    directions = set()
    for one in weights:
        first = next(byte for byte in one if byte)
        directions.add(galois.scale(galois.inv(first), one))
    assert len(directions) == len(set(places))
    for place, one in list(zip(places, weights, strict=True))[:40]:
        data = bytearray(CHUNK_BYTES)
        data[place] = 1
        assert fingerprint(data) == one


@pytest.mark.parametrize("size", [1, 16, 1792, 65536, FOLDS[0].block_bytes])
def test_blocks_in_each_others_place_show(size: int) -> None:
    draw = random.Random(size)
    data = draw.randbytes(CHUNK_BYTES)
    before = fingerprint(data)
    for _ in range(20):
        a, b = sorted(draw.sample(range(CHUNK_BYTES // size - 1), 2))
        x, y = data[a * size : (a + 1) * size], data[b * size : (b + 1) * size]
        swapped = data[: a * size] + y + data[(a + 1) * size : b * size] + x + data[(b + 1) * size :]
        assert (fingerprint(swapped) == before) == (x == y)


def test_threads_do_not_share_scratch() -> None:
    chunks = [random.Random(seed).randbytes(500_000 + seed) for seed in range(4)]
    expected, wrong = [fingerprint(chunk) for chunk in chunks], []

    def work(index: int) -> None:
        if any(fingerprint(chunks[index]) != expected[index] for _ in range(50)):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="is the most"):
        fingerprint(bytes(CHUNK_BYTES + 1))
    with pytest.raises(ValueError, match="16 bytes"):
        combine([1], [b"short"])
    with pytest.raises(ValueError, match="zip"):
        combine([1, 2], [bytes(16)])
