"""What a slot holds of replica classes, by its layout.

A layout is the same for thousands of snapshots, and with many tensors it takes longer to decode than the bytes take to
checksum (40,000: 0.3 s). So it is decoded once, and what follows from it is kept by its digest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from keepstep import layout as layouts
from keepstep.arena.header import TrainerHeader
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, Stream

MOST_THINGS = 100_000
"""tensors and chunks that are kept, at most: some 50 MB"""


@dataclass(frozen=True)
class Holdings:
    """Numbers count the chunks of the slot's shared part."""

    streams: tuple[Stream, ...]
    data: dict[tuple[str, int], int]
    """(class, chunk of the stream) -> number"""
    parity: dict[tuple[str, int, int], int]
    """(class, stripe row, row of the code) -> number"""

    @property
    def num_things(self) -> int:
        return 1 + len(self.data) + len(self.parity) + sum(len(stream.entries) for stream in self.streams)


def holdings_of(layout: layouts.Layout) -> Holdings:
    data: dict[tuple[str, int], int] = {}
    parity: dict[tuple[str, int, int], int] = {}
    for stream in layout.streams:
        for stored in stream.stored():
            number = (stored.offset - layout.shared_offset) // CHUNK_BYTES
            if stored.chunk >= 0:
                data[stream.class_id, stored.chunk] = number
            else:
                parity[stream.class_id, stored.row, stored.code_row] = number
    return Holdings(layout.streams, data, parity)


class KnownHoldings:
    """Those of the layouts that were seen last. For any thread."""

    def __init__(self, most_things: int = MOST_THINGS) -> None:
        self._most_things = most_things
        self._lock = threading.Lock()
        self._known: dict[tuple[bytes, int, int], Holdings] = {}
        """the one that was used last comes last"""

    def of(self, trainer: TrainerHeader, read: Callable[[], bytes]) -> Holdings:
        """Raises IntegrityError when what is read is not the layout that belongs to this header."""
        key = (trainer.layout_digest, trainer.payload_bytes, trainer.shared_offset)
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._known[key] = known
                return known
        encoded = read()
        if layouts.digest(encoded) != trainer.layout_digest:
            raise IntegrityError("the layout does not match its digest")
        layout = layouts.decode(encoded, payload_bytes=trainer.payload_bytes)
        if layout.streams and layout.shared_offset != trainer.shared_offset:
            raise IntegrityError("the layout and its header differ in where the shared part begins")
        made = holdings_of(layout)
        with self._lock:
            self._known[key] = made
            while len(self._known) > 1 and self.num_things > self._most_things:
                del self._known[next(iter(self._known))]
        return made

    @property
    def num_things(self) -> int:
        return sum(one.num_things for one in self._known.values())
