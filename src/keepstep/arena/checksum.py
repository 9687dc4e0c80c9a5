"""The parts of a seal: which bytes it covers, their xxh3_128 per 4 MiB chunk, table and header.

Four regions of a slot are cut separately into chunks: layout, values, and the two parts of the payload, the bytes that
only this rank has (`unique`) and those that other nodes hold too (`shared`). So a chunk of a replica set, which nodes
fetch from each other, is always exactly one entry of the checksum table.

A seal is: `committed_chunks`, read their digests, `write_seal`. A verification is: `sealed_chunks`, read their digests,
`check_digests`. The keeper puts them together (`keeper/workers/sealing.py`), because there the digests of a large slot
come from another process. Readers do not lock: they verify what they read and stop at a mismatch, so a slow or dead
reader holds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from keepstep.arena import records as h
from keepstep.arena.records import KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, SlotSpan, trainer_digest
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, digest, num_chunks
from keepstep.types import Version

LAYOUT, VALUES, UNIQUE, SHARED = REGIONS = ("layout", "values", "unique", "shared")
_TEXTS = {UNIQUE: "payload", SHARED: "shared payload"}

# Read in windows that stay in the second-level cache between the copy and the hash: with smaller ones the threads queue
# for the interpreter, with larger ones they wait for memory (17 GB with 12 threads: 0.54 s with 512 KiB, 0.38 with
# 1 MiB, 0.44 with 4).
WINDOW_BYTES = 1 << 20


# Chunks


@dataclass(frozen=True)
class Chunk:
    """One entry of the checksum table and the bytes that it covers, by absolute offset in the arena."""

    region: str
    index: int  # within its region
    span: SlotSpan

    @property
    def region_text(self) -> str:
        return _TEXTS.get(self.region, self.region)


def region_spans(arena: Arena, slot: int, trainer: TrainerHeader) -> dict[str, SlotSpan]:
    """The used bytes of each region. Raises IntegrityError when the header claims more than fits."""
    layout, values, payload = arena.used_spans(slot, trainer)
    shared = trainer.shared_offset
    return {
        LAYOUT: layout,
        VALUES: values,
        UNIQUE: SlotSpan(payload.offset, shared),
        SHARED: SlotSpan(payload.offset + shared, payload.size_bytes - shared),
    }


def chunk_spans(arena: Arena, slot: int, trainer: TrainerHeader) -> list[Chunk]:
    """All chunks of a slot, in the order of its checksum table."""
    return [
        Chunk(region, index, SlotSpan(span.offset + start, min(CHUNK_BYTES, span.size_bytes - start)))
        for region, span in region_spans(arena, slot, trainer).items()
        for index, start in enumerate(range(0, span.size_bytes, CHUNK_BYTES))
    ]


def read_table(arena: Arena, slot: int, sealed: SealedSlot | None = None) -> bytes:
    """The checksum table of a slot as it was `sealed`, or is now: 16 bytes per chunk of `chunk_spans`.

    Verified against the keeper header: raises IntegrityError when the slot has been sealed again since.
    """
    sealed = sealed or arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed, or its headers are damaged")
    count = sum(num_chunks(span.size_bytes) for span in region_spans(arena, slot, sealed.trainer).values())
    if count != sealed.keeper.num_chunks:
        raise IntegrityError(f"slot {slot}: {sealed.keeper.num_chunks} checksums for {count} chunks")
    table = arena.segment.read(arena.table_span(slot).offset, count * DIGEST_BYTES)
    if xxhash.xxh3_128_digest(table) != sealed.keeper.table_digest:
        raise IntegrityError(f"slot {slot}: the checksum table is damaged")
    return table


# Seal and verification


@dataclass(frozen=True)
class CommittedChunks:
    """What a seal will cover: the chunks of a committed slot, and the header that they belong to."""

    slot: int
    sequence: int
    trainer: TrainerHeader
    chunks: list[Chunk]


@dataclass(frozen=True)
class SealedChunks:
    """What a verification reads, and the digests that it must find."""

    sealed: SealedSlot
    chunks: list[Chunk]
    table: bytes


def committed_chunks(arena: Arena, slot: int, version: Version) -> CommittedChunks:
    """The chunks of a slot that holds `version`, committed. Raises IntegrityError when it does not."""
    committed = arena.committed(slot)
    if committed is None or committed[1].version != version:
        raise IntegrityError(f"slot {slot} does not hold {version}")
    sequence, trainer = committed
    chunks = chunk_spans(arena, slot, trainer)
    _check_layout(arena, slot, trainer)
    return CommittedChunks(slot, sequence, trainer, chunks)


def write_seal(arena: Arena, committed: CommittedChunks, table: bytes) -> SealedSlot:
    """Write the checksum table, then the keeper header. Raises when the slot was written again since."""
    slot, trainer = committed.slot, committed.trainer
    arena.segment.write(arena.table_span(slot).offset, table)
    after = arena.committed(slot)
    if after is None or after[0] != committed.sequence:
        raise IntegrityError(f"slot {slot} was written again while it was sealed")
    keeper = KeeperHeader(
        state=h.SEALED, num_chunks=len(table) // DIGEST_BYTES, version=trainer.version,
        trainer_sequence=committed.sequence, trainer_digest=trainer_digest(trainer),
        table_digest=xxhash.xxh3_128_digest(table), sealed_at=time.time(),
    )  # fmt: skip
    arena.write_keeper_header(slot, keeper)
    return SealedSlot(slot, trainer, keeper)


def sealed_chunks(arena: Arena, slot: int) -> SealedChunks:
    """The chunks of a sealed slot and their table. Raises IntegrityError when headers or table are damaged."""
    sealed = arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed, or its headers are damaged")
    table = read_table(arena, slot)
    return SealedChunks(sealed, chunk_spans(arena, slot, sealed.trainer), table)


def check_digests(arena: Arena, expected: SealedChunks, digests: bytes) -> SealedSlot:
    """Compare what was read with the table. Raises IntegrityError that names the region that differs."""
    slot = expected.sealed.slot
    if digests != expected.table:
        raise IntegrityError(f"slot {slot}: {_first_difference(digests, expected.table, expected.chunks)}")
    _check_layout(arena, slot, expected.sealed.trainer)
    return expected.sealed


def read_digests(arena: Arena, chunks: Sequence[Chunk], buffer: memoryview | None = None) -> bytes:
    """16 bytes for each chunk, read through the descriptor into a small buffer. Nothing is mapped."""
    window = buffer if buffer is not None else memoryview(bytearray(WINDOW_BYTES))
    return b"".join([_digest(arena, chunk, window) for chunk in chunks])


def _digest(arena: Arena, chunk: Chunk, buffer: memoryview) -> bytes:
    state, size_bytes = xxhash.xxh3_128(), chunk.span.size_bytes
    for at in range(0, size_bytes, len(buffer)):
        window = buffer[: min(len(buffer), size_bytes - at)]
        arena.segment.read_into(chunk.span.offset + at, window)
        state.update(window)
    return state.digest()


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
