"""Sealing a slot and verifying it: xxh3_128 per 4 MiB chunk, in a table that is itself digested.

Runs in the keeper, off the training path. Bytes are read through the descriptor, a chunk at a time into a
buffer that stays in the cache, never mapped: with one call to read and one to hash per chunk a dozen
threads do not stand in each other's way at the interpreter. Readers do not lock: they verify what they
read and give up on a mismatch, so a slow or dead reader holds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import xxhash

from keepstep.arena import header as h
from keepstep.arena.chunks import Chunk, chunk_spans, read_table
from keepstep.arena.header import KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, trainer_digest
from keepstep.errors import IntegrityError, KeeperError
from keepstep.layout import CHUNK_BYTES, digest
from keepstep.types import Version

# Chunks that one thread reads in one go.
RUN = 16


class Over(Protocol):
    """`map`, or that of a pool of threads."""

    def __call__(self, work: Callable[[list[Chunk]], bytes], runs: list[list[Chunk]], /) -> Iterable[bytes]: ...


def seal(
    arena: Arena, slot: int, version: Version, *, cancelled: Callable[[], bool] = lambda: False, over: Over = map
) -> SealedSlot:
    """Checksum what the trainer committed and write the keeper header. Raises when it is not what was said.

    A slot that is sealed already is verified instead: new checksums would bless a bit that flipped since.
    """
    found = arena.committed(slot)
    if found is None or found[1].version != version:
        raise IntegrityError(f"slot {slot} does not hold {version}")
    if arena.sealed(slot) is not None:
        return verify(arena, slot, cancelled=cancelled, over=over)
    sequence, trainer = found
    chunks = chunk_spans(arena, slot, trainer)
    _check_layout(arena, slot, trainer)
    table = _table(arena, chunks, cancelled, over)
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


def verify(arena: Arena, slot: int, *, cancelled: Callable[[], bool] = lambda: False, over: Over = map) -> SealedSlot:
    """Check a sealed slot byte for byte. Raises IntegrityError that names the region that is wrong."""
    sealed = arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed, or its headers are damaged")
    table = read_table(arena, slot)
    chunks = chunk_spans(arena, slot, sealed.trainer)
    actual = _table(arena, chunks, cancelled, over)
    if actual != table:
        raise IntegrityError(f"slot {slot}: {_first_difference(actual, table, chunks)}")
    _check_layout(arena, slot, sealed.trainer)
    return sealed


def _check_layout(arena: Arena, slot: int, trainer: TrainerHeader) -> None:
    span = arena.layout_span(slot)
    if digest(arena.segment.read(span.offset, trainer.layout_bytes)) != trainer.layout_digest:
        raise IntegrityError(f"slot {slot}: the layout does not match its digest")


def _table(arena: Arena, chunks: list[Chunk], cancelled: Callable[[], bool], over: Over) -> bytes:
    buffers: list[memoryview] = []
    """as many as threads work at once, until all is done"""

    def digests(run: list[Chunk]) -> bytes:
        buffer = buffers.pop() if buffers else memoryview(bytearray(CHUNK_BYTES))
        found = []
        for chunk in run:
            if cancelled():
                # Not an IntegrityError: only bytes that fail their check may count against a version.
                raise KeeperError("given up: the keeper is ending")
            window = buffer[: chunk.span.size_bytes]
            arena.segment.read_into(chunk.span.offset, window)
            found.append(xxhash.xxh3_128_digest(window))
        buffers.append(buffer)
        return b"".join(found)

    return b"".join(over(digests, [chunks[at : at + RUN] for at in range(0, len(chunks), RUN)]))


def _first_difference(actual: bytes, expected: bytes, chunks: list[Chunk]) -> str:
    for index, chunk in enumerate(chunks):
        own = slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES)
        if actual[own] != expected[own]:
            return f"chunk {chunk.index} of the {chunk.region_text} does not match its checksum"
    raise AssertionError("a difference beyond the table")
