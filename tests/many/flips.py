"""Where a bit may flip in the memory of a node, and flipping it."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from clones import Memory, memfd_of

from keepstep.arena import records as h
from keepstep.arena.checksum import read_table, region_spans
from keepstep.arena.records import PAGE
from keepstep.arena.slots import GRANT_PAGE, LEDGER_PAGE, Arena
from keepstep.parity.parity_buffer import DIGEST_BYTES, META, ParityBuffer, is_parity
from keepstep.types import Version

IN_SLOTS = (
    "payload",
    "values",
    "layout",
    "table",
    "trainer header",
    "keeper header",
    "arena header",
    "grant",
    "ledger",
)
IN_PARITY = ("parity", "parity table", "parity manifests", "parity header")


@dataclass(frozen=True)
class Flip:
    """One bit of one memfd."""

    name: str
    offset: int
    bit: int

    def of(self, memory: Memory) -> Memory:
        data = bytearray(memory[self.name])
        data[self.offset] ^= 1 << self.bit
        return {**memory, self.name: bytes(data)}

    def now(self, fd: int) -> None:
        """In memory that a keeper has already."""
        byte = os.pread(fd, 1, self.offset)[0] ^ 1 << self.bit
        os.pwrite(fd, bytes([byte]), self.offset)


def flip_in(
    what: str, memory: Memory, version: Version, draw: random.Random, *, run_id: str, node_id: str
) -> Flip | None:
    """A random bit of that part of what a node holds of a version."""
    places: list[tuple[str, int, int]] = []
    for name, data in sorted(memory.items()):
        fd = memfd_of(data)
        try:
            if is_parity(fd) == (what in IN_PARITY):
                found = _parity_places(fd, run_id, node_id) if is_parity(fd) else _slot_places(fd, version)
                places += [(name, offset, size) for part, offset, size in found if part == what]
        finally:
            os.close(fd)
    if not places:
        return None
    name, offset, size = draw.choice(places)
    return Flip(name, offset + draw.randrange(size), draw.randrange(8))


def _slot_places(fd: int, version: Version) -> list[tuple[str, int, int]]:
    own = os.dup(fd)
    header = h.ArenaHeader.decode(os.pread(own, h.ArenaHeader.SIZE, 0))
    arena = Arena.adopt(own, run_id=header.run_id, node_id=header.node_id)
    found = [
        ("arena header", 0, h.ArenaHeader.SIZE),
        ("grant", GRANT_PAGE, 2 * h.RECORD_BYTES),
        ("ledger", LEDGER_PAGE, 2 * h.RECORD_BYTES),
    ]
    for slot in range(arena.num_slots):
        sealed = arena.sealed(slot)
        if sealed is None or sealed.version != version:
            continue
        spans = region_spans(arena, slot, sealed.trainer)
        start = header.first_slot + slot * header.slot_stride
        found += [
            ("payload", spans["unique"].offset, spans["unique"].size_bytes),
            ("values", spans["values"].offset, spans["values"].size_bytes),
            ("layout", spans["layout"].offset, spans["layout"].size_bytes),
            ("table", arena.table_span(slot).offset, len(read_table(arena, slot))),
            ("trainer header", start, 2 * h.RECORD_BYTES),
            ("keeper header", start + PAGE, 2 * h.RECORD_BYTES),
        ]
    arena.close()
    return found


def _parity_places(fd: int, run_id: str, node_id: str) -> list[tuple[str, int, int]]:
    held = ParityBuffer.adopt(os.dup(fd), run_id=run_id, node_id=node_id)
    assert held.header is not None
    found = [("parity header", 0, 2 * h.RECORD_BYTES), ("parity manifests", META, held.header.meta_bytes)]
    for number, offset, size in held._places.values():
        found.append(("parity", offset, size))
        found.append(("parity table", held._table_at + number * DIGEST_BYTES, DIGEST_BYTES))
    held.close()
    return found
