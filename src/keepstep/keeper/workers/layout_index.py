"""What a slot holds of replica classes, by its layout.

A layout is the same for thousands of snapshots, and with many tensors it takes longer to decode than the bytes take to
checksum (40,000: 0.3 s). So it is decoded once, and what the keeper looks up in it is kept by its digest: where chunks
lie, not which tensors are in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from keepstep import layout as layouts
from keepstep.arena.records import TrainerHeader
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, ReplicaSet

MOST_LAYOUTS = 256
"""of eight ranks, and each of them has one for every turn of its shares"""
MOST_CHUNKS = 400_000
"""of all of them together: some 60 MB"""


@dataclass(frozen=True)
class LayoutIndex:
    """Numbers count the chunks of the slot's shared part."""

    streams: tuple[ReplicaSet, ...]
    """without their tensors and holders"""
    data: dict[tuple[str, int], int]
    """(class, chunk of the stream) -> number"""
    parity: dict[tuple[str, int, int], int]
    """(class, stripe row, row of the code) -> number"""

    @property
    def num_chunks(self) -> int:
        return len(self.data) + len(self.parity)


def holdings_of(layout: layouts.Layout) -> LayoutIndex:
    data: dict[tuple[str, int], int] = {}
    parity: dict[tuple[str, int, int], int] = {}
    for stream in layout.streams:
        for stored in stream.stored():
            number = (stored.offset - layout.shared_offset) // CHUNK_BYTES
            if stored.chunk >= 0:
                data[stream.class_id, stored.chunk] = number
            else:
                parity[stream.class_id, stored.row, stored.code_row] = number
    bare = [msgspec.structs.replace(stream, entries=(), ranks=(), nodes=()) for stream in layout.streams]
    return LayoutIndex(tuple(bare), data, parity)


def decode_layout(trainer: TrainerHeader, encoded: bytes) -> layouts.Layout:
    """Raises IntegrityError when this is not the layout that belongs to the header."""
    if layouts.digest(encoded) != trainer.layout_digest:
        raise IntegrityError("the layout does not match its digest")
    layout = layouts.decode(encoded, payload_bytes=trainer.payload_bytes)
    if layout.streams and layout.shared_offset != trainer.shared_offset:
        raise IntegrityError("the layout and its header differ in where the shared part begins")
    return layout


class LayoutIndexCache:
    """Those of the layouts that were seen last. For any thread."""

    def __init__(self, most_layouts: int = MOST_LAYOUTS, most_chunks: int = MOST_CHUNKS) -> None:
        self._most_layouts, self._most_chunks = most_layouts, most_chunks
        self._lock = threading.Lock()
        self._known: dict[tuple[bytes, int, int], LayoutIndex] = {}
        """the one that was used last comes last"""
        self.num_chunks = 0

    def __len__(self) -> int:
        return len(self._known)

    def of(self, trainer: TrainerHeader, read: Callable[[], bytes]) -> LayoutIndex:
        """Raises IntegrityError when what is read is not the layout that belongs to this header."""
        key = (trainer.layout_digest, trainer.payload_bytes, trainer.shared_offset)
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._known[key] = known
                return known
        made = holdings_of(decode_layout(trainer, read()))
        with self._lock:
            if key not in self._known:  # another thread may have been faster
                self._known[key] = made
                self.num_chunks += made.num_chunks
            while len(self._known) > 1 and self._is_too_much():
                self.num_chunks -= self._known.pop(next(iter(self._known))).num_chunks
        return made

    def _is_too_much(self) -> bool:
        return len(self._known) > self._most_layouts or self.num_chunks > self._most_chunks
