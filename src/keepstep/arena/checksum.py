"""Sealing a slot and verifying it: xxh3_128 per 4 MiB chunk, in a table that is itself digested.

Runs in the keeper, off the training path, or in its reader for slots that are large (`digests`). Bytes are
read through the descriptor into a small buffer that stays in the second-level cache, never mapped here.
Readers do not lock: they verify what they read and give up on a mismatch, so a slow or dead reader holds
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import xxhash

from keepstep.arena import records as h
from keepstep.arena.chunks import Chunk, chunk_spans, read_table
from keepstep.arena.records import KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, trainer_digest
from keepstep.errors import IntegrityError, KeeperError
from keepstep.layout import digest
from keepstep.types import Version

# Read in pieces that stay in the second-level cache between the copy and the hash: with less the threads queue for the
# interpreter, with more they wait for memory (17 GB with 12 threads: 0.54 s with 512 KiB, 0.38 with 1 MiB, 0.44 with 4)
WINDOW_BYTES = 1 << 20
# Chunks that one thread reads in one go.
RUN = 16
T = TypeVar("T")


class MapFunction(Protocol):
    """`map`, or `map` of a thread pool."""

    def __call__(self, work: Callable[[T], bytes], items: Sequence[T], /) -> Iterable[bytes]: ...


Digests = Callable[[Arena, int, list[Chunk]], bytes]
"""16 bytes for each of these chunks of a slot"""


def read_digests(
    arena: Arena,
    slot: int,
    chunks: list[Chunk],
    *,
    cancelled: Callable[[], bool] = lambda: False,
    over: MapFunction = map,
) -> bytes:
    """Through the descriptor."""
    buffers: list[memoryview] = []
    """as many as threads work at once, until all is done"""

    def digests(run: list[Chunk]) -> bytes:
        buffer = buffers.pop() if buffers else memoryview(bytearray(WINDOW_BYTES))
        found = []
        for chunk in run:
            if cancelled():
                # Not an IntegrityError: only bytes that fail their check may count against a version.
                raise KeeperError("given up: the keeper is ending")
            found.append(_digest(arena, chunk, buffer))
        buffers.append(buffer)
        return b"".join(found)

    return b"".join(over(digests, [chunks[at : at + RUN] for at in range(0, len(chunks), RUN)]))


def _digest(arena: Arena, chunk: Chunk, buffer: memoryview) -> bytes:
    state, size_bytes = xxhash.xxh3_128(), chunk.span.size_bytes
    for at in range(0, size_bytes, len(buffer)):
        window = buffer[: min(len(buffer), size_bytes - at)]
        arena.segment.read_into(chunk.span.offset + at, window)
        state.update(window)
    return state.digest()


def seal(arena: Arena, slot: int, version: Version, digests: Digests = read_digests) -> SealedSlot:
    """Checksum what the trainer committed and write the keeper header. Raises when it is not what was said.

    A slot that is sealed already is verified instead: new checksums would bless a bit that flipped since.
    """
    found = arena.committed(slot)
    if found is None or found[1].version != version:
        raise IntegrityError(f"slot {slot} does not hold {version}")
    if arena.sealed(slot) is not None:
        return verify(arena, slot, digests)
    sequence, trainer = found
    chunks = chunk_spans(arena, slot, trainer)
    _check_layout(arena, slot, trainer)
    table = digests(arena, slot, chunks)
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


def verify(arena: Arena, slot: int, digests: Digests = read_digests) -> SealedSlot:
    """Check a sealed slot byte for byte. Raises IntegrityError that names the region that is wrong."""
    sealed = arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed, or its headers are damaged")
    table = read_table(arena, slot)
    chunks = chunk_spans(arena, slot, sealed.trainer)
    actual = digests(arena, slot, chunks)
    if actual != table:
        raise IntegrityError(f"slot {slot}: {_first_difference(actual, table, chunks)}")
    _check_layout(arena, slot, sealed.trainer)
    return sealed


def _check_layout(arena: Arena, slot: int, trainer: TrainerHeader) -> None:
    span = arena.layout_span(slot)
    if digest(arena.segment.read(span.offset, trainer.layout_bytes)) != trainer.layout_digest:
        raise IntegrityError(f"slot {slot}: the layout does not match its digest")


def _first_difference(actual: bytes, expected: bytes, chunks: list[Chunk]) -> str:
    for index, chunk in enumerate(chunks):
        own = slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES)
        if actual[own] != expected[own]:
            return f"chunk {chunk.index} of the {chunk.region_text} does not match its checksum"
    raise AssertionError("a difference beyond the table")
