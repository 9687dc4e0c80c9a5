"""Sealing a slot and verifying it: xxh3_128 per 4 MiB chunk, in a table that is itself digested.

Runs in the keeper, off the training path. Bytes are read through the descriptor into a small buffer
that stays in the cache, never mapped. Readers do not lock: they verify what they read and give up on
a mismatch, so a slow or dead reader holds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import xxhash

from keepstep.arena import header as h
from keepstep.arena.header import KeeperHeader
from keepstep.arena.slots import CHUNK_BYTES, DIGEST_BYTES, Arena, SealedSlot, Span, trainer_digest
from keepstep.errors import IntegrityError, KeeperError
from keepstep.layout import digest
from keepstep.types import Version

# Read in pieces that stay in the second-level cache between the copy and the hash.
WINDOW_BYTES = 256 << 10
REGIONS = ("layout", "values", "payload")


def seal(arena: Arena, slot: int, version: Version, *, cancelled: Callable[[], bool] = lambda: False) -> SealedSlot:
    """Checksum what the trainer committed and write the keeper header. Raises when it is not what was said.

    A slot that is sealed already is verified instead: new checksums would bless a bit that flipped since.
    """
    found = arena.committed(slot)
    if found is None or found[1].version != version:
        raise IntegrityError(f"slot {slot} does not hold {version}")
    if arena.sealed(slot) is not None:
        return verify(arena, slot, cancelled=cancelled)
    sequence, trainer = found
    spans = arena.used_spans(slot, trainer)
    if digest(arena.segment.read(spans[0].offset, spans[0].size_bytes)) != trainer.layout_digest:
        raise IntegrityError(f"slot {slot}: the layout does not match its digest")
    table = _table(arena, spans, cancelled)
    arena.segment.write(arena.table_span(slot).offset, table)
    after = arena.committed(slot)
    if after is None or after[0] != sequence:
        raise IntegrityError(f"slot {slot} was written again while it was sealed")
    keeper = KeeperHeader(
        state=h.SEALED, num_chunks=len(table) // DIGEST_BYTES, version=version, trainer_sequence=sequence,
        trainer_digest=trainer_digest(trainer), table_digest=xxhash.xxh3_128_digest(table), sealed_at=time.time(),
    )  # fmt: skip
    arena.write_keeper_header(slot, keeper)
    return SealedSlot(slot, trainer, keeper)


def verify(arena: Arena, slot: int, *, cancelled: Callable[[], bool] = lambda: False) -> SealedSlot:
    """Check a sealed slot byte for byte. Raises IntegrityError that names the region that is wrong."""
    sealed = arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed, or its headers are damaged")
    spans = arena.used_spans(slot, sealed.trainer)
    counts = [_chunks(span) for span in spans]
    if sum(counts) != sealed.keeper.num_chunks:
        raise IntegrityError(f"slot {slot}: {sealed.keeper.num_chunks} checksums for {sum(counts)} chunks")
    table = arena.segment.read(arena.table_span(slot).offset, sum(counts) * DIGEST_BYTES)
    if xxhash.xxh3_128_digest(table) != sealed.keeper.table_digest:
        raise IntegrityError(f"slot {slot}: the checksum table is damaged")
    actual = _table(arena, spans, cancelled)
    if actual != table:
        raise IntegrityError(f"slot {slot}: {_first_difference(actual, table, counts)}")
    if digest(arena.segment.read(spans[0].offset, spans[0].size_bytes)) != sealed.trainer.layout_digest:
        raise IntegrityError(f"slot {slot}: the layout does not match its digest")
    return sealed


def _chunks(span: Span) -> int:
    return -(-span.size_bytes // CHUNK_BYTES)


def _table(arena: Arena, spans: list[Span], cancelled: Callable[[], bool]) -> bytes:
    buffer = memoryview(bytearray(WINDOW_BYTES))
    table = bytearray()
    for span in spans:
        for start in range(span.offset, span.offset + span.size_bytes, CHUNK_BYTES):
            if cancelled():
                # Not an IntegrityError: only bytes that fail their check may count against a version.
                raise KeeperError("given up: the keeper is ending")
            table += _chunk_digest(arena, start, min(CHUNK_BYTES, span.offset + span.size_bytes - start), buffer)
    return bytes(table)


def _chunk_digest(arena: Arena, offset: int, size_bytes: int, buffer: memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for at in range(0, size_bytes, WINDOW_BYTES):
        window = buffer[: min(WINDOW_BYTES, size_bytes - at)]
        arena.segment.read_into(offset + at, window)
        state.update(window)
    return state.digest()


def _first_difference(actual: bytes, expected: bytes, counts: list[int]) -> str:
    chunk = next(
        i
        for i in range(len(expected) // DIGEST_BYTES)
        if actual[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] != expected[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
    )
    for name, count in zip(REGIONS, counts, strict=True):
        if chunk < count:
            return f"chunk {chunk} of the {name} does not match its checksum"
        chunk -= count
    raise AssertionError("a difference beyond the table")
