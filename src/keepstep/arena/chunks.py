"""The chunks of a slot, in the order of its checksum table.

Four regions are cut separately into chunks of 4 MiB: layout, values, and the two parts of the payload,
the bytes that only this rank has (`unique`) and those that other nodes hold too (`shared`). So a chunk
of a replica set, which nodes fetch from each other, is always exactly one entry of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, SlotSpan
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, num_chunks

LAYOUT, VALUES, UNIQUE, SHARED = REGIONS = ("layout", "values", "unique", "shared")
_TEXTS = {UNIQUE: "payload", SHARED: "shared payload"}


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
