"""A sealed slot opened for reading: its chunks, their checksums, and where chunks of replica sets are.

A layout is the same for thousands of snapshots, and with many tensors it takes longer to decode than the bytes take to
hash (40,000 tensors: 0.3 s). So each layout is decoded once, and only what the keeper needs of it is cached: the
positions of chunks, not the tensors inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from keepstep import layout as layouts
from keepstep.arena.checksum import LAYOUT, UNIQUE, VALUES, Chunk, chunk_spans, read_table, region_spans
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, Layout, ReplicaSet, num_chunks

MAX_LAYOUTS = 256  # eight ranks, each with one for every turn of its shares
MAX_CHUNKS = 400_000  # of all cached layouts together: some 60 MB


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


# Layouts


@dataclass(frozen=True)
class LayoutIndex:
    """Positions of chunks. Numbers count the chunks of the slot's shared part."""

    replica_sets: tuple[ReplicaSet, ...]  # without their tensors and holders
    data: dict[tuple[str, int], int]  # (class_id, chunk of the set) -> number
    parity: dict[tuple[str, int, int], int]  # (class_id, stripe row, row of the code) -> number

    @property
    def num_chunks(self) -> int:
        return len(self.data) + len(self.parity)


def index_of(layout: Layout) -> LayoutIndex:
    data: dict[tuple[str, int], int] = {}
    parity: dict[tuple[str, int, int], int] = {}
    for replica_set in layout.replica_sets:
        for stored in replica_set.stored():
            number = (stored.offset - layout.shared_offset) // CHUNK_BYTES
            if stored.chunk >= 0:
                data[replica_set.class_id, stored.chunk] = number
            else:
                parity[replica_set.class_id, stored.row, stored.code_row] = number
    bare = [msgspec.structs.replace(one, entries=(), ranks=(), nodes=()) for one in layout.replica_sets]
    return LayoutIndex(tuple(bare), data, parity)


def decode_layout(trainer: TrainerHeader, encoded: bytes) -> Layout:
    """The layout of a slot. Raises IntegrityError when it does not belong to the header."""
    if layouts.digest(encoded) != trainer.layout_digest:
        raise IntegrityError("the layout does not match its digest")
    layout = layouts.decode(encoded, payload_bytes=trainer.payload_bytes)
    if layout.replica_sets and layout.shared_offset != trainer.shared_offset:
        raise IntegrityError("the layout and its header differ in where the shared part begins")
    return layout


class LayoutIndexCache:
    """Indexes of the layouts that were used last. For any thread."""

    def __init__(self, max_layouts: int = MAX_LAYOUTS, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_layouts, self._max_chunks = max_layouts, max_chunks
        self._lock = threading.Lock()
        self._indexes: dict[tuple[bytes, int, int], LayoutIndex] = {}  # the most recently used comes last
        self.num_chunks = 0

    def __len__(self) -> int:
        return len(self._indexes)

    def of(self, trainer: TrainerHeader, read: Callable[[], bytes]) -> LayoutIndex:
        """The index of a slot; `read` is called if its layout is not cached. Raises as `decode_layout` does."""
        key = (trainer.layout_digest, trainer.payload_bytes, trainer.shared_offset)
        with self._lock:
            cached = self._indexes.pop(key, None)
            if cached is not None:
                self._indexes[key] = cached
                return cached
        index = index_of(decode_layout(trainer, read()))
        with self._lock:
            if key not in self._indexes:  # another thread may have been faster
                self._indexes[key] = index
                self.num_chunks += index.num_chunks
            while len(self._indexes) > 1 and self._is_full():
                self.num_chunks -= self._indexes.pop(next(iter(self._indexes))).num_chunks
        return index

    def _is_full(self) -> bool:
        return len(self._indexes) > self._max_layouts or self.num_chunks > self._max_chunks


_layouts = LayoutIndexCache()
