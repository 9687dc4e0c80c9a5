"""A sealed slot opened for reading: its chunks, their checksums, and where chunks of replica sets are."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.arena.chunks import LAYOUT, UNIQUE, VALUES, Chunk, chunk_spans, read_table, region_spans
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot
from keepstep.errors import IntegrityError
from keepstep.keeper.workers.layout_index import LayoutIndex, LayoutIndexCache, decode_layout
from keepstep.layout import Layout, num_chunks

_layouts = LayoutIndexCache()


@dataclass
class SealedSnapshot:
    """A sealed slot, opened for reading. Nothing is locked: the slot may be written again at any time."""

    arena: Arena
    slot: int
    sealed: SealedSlot
    table: bytes
    # Not `cached_property`: on Python 3.11 one lock would be held for all snapshots while one of them reads its layout.
    _chunks: list[Chunk] | None = field(default=None, init=False)
    _first_shared: int = field(default=-1, init=False)
    _index: LayoutIndex | None = field(default=None, init=False)

    def is_current(self) -> bool:
        """Whether the slot has not been written again since."""
        now = self.arena.sealed(self.slot)
        return now is not None and now.keeper == self.sealed.keeper

    def digest(self, number: int) -> bytes:
        """The checksum of a chunk, by its number in the table."""
        return self.table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    @property
    def chunks(self) -> list[Chunk]:
        """In the order of the checksum table."""
        if self._chunks is None:
            self._chunks = chunk_spans(self.arena, self.slot, self.sealed.trainer)
        return self._chunks

    @property
    def first_shared(self) -> int:
        """The number in the table of the first chunk of the shared part."""
        if self._first_shared < 0:
            regions = region_spans(self.arena, self.slot, self.sealed.trainer)
            self._first_shared = sum(num_chunks(regions[name].size_bytes) for name in (LAYOUT, VALUES, UNIQUE))
        return self._first_shared

    @property
    def index(self) -> LayoutIndex:
        """Where the chunks of replica sets are."""
        if self._index is None:
            self._index = _layouts.of(self.sealed.trainer, self._read_layout)
        return self._index

    def layout(self) -> Layout:
        """The whole layout, decoded anew: this takes long."""
        return decode_layout(self.sealed.trainer, self._read_layout())

    def find(self, class_id: str, chunk: int) -> int | None:
        """The number in the table of a chunk of a replica set, if this slot holds it."""
        number = self.index.data.get((class_id, chunk))
        return None if number is None else self.first_shared + number

    def find_parity(self, class_id: str, row: int, code_row: int) -> int | None:
        """The number in the table of a parity chunk of a replica set, if this slot holds it."""
        number = self.index.parity.get((class_id, row, code_row))
        return None if number is None else self.first_shared + number

    def _read_layout(self) -> bytes:
        return self.arena.segment.read(self.arena.layout_span(self.slot).offset, self.sealed.trainer.layout_bytes)


def open_sealed(arena: Arena, slot: int, sealed: SealedSlot | None = None) -> SealedSnapshot:
    """Open a slot as it was `sealed`, or is now. Raises when it is not sealed, or not any more."""
    sealed = sealed or arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed any more")
    return SealedSnapshot(arena, slot, sealed, read_table(arena, slot, sealed))
