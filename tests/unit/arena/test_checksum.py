"""The regions of a slot and the entries of its checksum table, with and without a shared part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import xxhash
from seals import seal, verify

from keepstep.arena import records as h
from keepstep.arena.checksum import REGIONS, chunk_spans, read_table
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import CHUNK_BYTES, DIGEST_BYTES, PAGE, Arena, plan_header
from keepstep.errors import IntegrityError
from keepstep.layout import SnapshotSize, digest
from keepstep.types import Incarnation, Version

VERSION = Version(Incarnation(1, 2), 3)
LAYOUT, VALUES = b"layout", b"values!"
SHARED_AT = 3 * 64
PAYLOAD = bytes(i % 251 for i in range(SHARED_AT)) + b"s" * (CHUNK_BYTES + 100)


def header(**changes: int) -> TrainerHeader:
    made = TrainerHeader(
        state=h.COMMITTED, rank=0, world_size=1, local_index=0, local_world_size=1, flags=0, version=VERSION,
        layout_bytes=len(LAYOUT), values_bytes=len(VALUES), payload_bytes=len(PAYLOAD), layout_digest=digest(LAYOUT),
        written_at=0.0, shared_offset=SHARED_AT,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def arena() -> Iterator[Arena]:
    need = SnapshotSize(len(LAYOUT), len(VALUES), len(PAYLOAD))
    made = Arena.create(plan_header(need, slots=2, local_index=0, run_id="r", node_id="n", instance=bytes(16)))
    for span, data in ((made.layout_span, LAYOUT), (made.values_span, VALUES), (made.payload_span, PAYLOAD)):
        made.segment.write(span(0).offset, data)
    made.write_trainer_header(0, header())
    yield made
    made.close()


def test_both_parts_of_the_payload_are_cut_into_chunks_of_their_own(arena: Arena) -> None:
    chunks = chunk_spans(arena, 0, header())
    at = arena.payload_span(0).offset
    assert [(c.region, c.index, c.span.size_bytes) for c in chunks] == [
        ("layout", 0, 6), ("values", 0, 7), ("unique", 0, SHARED_AT), ("shared", 0, CHUNK_BYTES), ("shared", 1, 100),
    ]  # fmt: skip
    assert [c.span.offset - at for c in chunks[2:]] == [0, SHARED_AT, SHARED_AT + CHUNK_BYTES]
    assert set(REGIONS) == {c.region for c in chunks}


def test_table_has_an_entry_for_every_chunk_and_is_read_back_only_while_it_is_whole(arena: Arena) -> None:
    with pytest.raises(IntegrityError, match="is not sealed"):
        read_table(arena, 0)
    sealed = seal(arena, 0, VERSION)
    chunks = chunk_spans(arena, 0, sealed.trainer)
    read = [arena.segment.read(c.span.offset, c.span.size_bytes) for c in chunks]
    table = read_table(arena, 0)
    assert table == b"".join(map(xxhash.xxh3_128_digest, read))
    assert len(table) == sealed.keeper.num_chunks * DIGEST_BYTES
    assert verify(arena, 0) == sealed
    arena.segment.write(arena.table_span(0).offset + 17, b"\xff")
    with pytest.raises(IntegrityError, match="table is damaged"):
        read_table(arena, 0)


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (5, "chunk 0 of the payload"),
        (SHARED_AT, "chunk 0 of the shared payload"),
        (-1, "chunk 1 of the shared payload"),
    ],
)
def test_flipped_bit_is_found_in_the_part_where_it_is(arena: Arena, offset: int, text: str) -> None:
    seal(arena, 0, VERSION)
    at = arena.payload_span(0).offset + offset % len(PAYLOAD)
    arena.segment.write(at, bytes([arena.segment.read(at, 1)[0] ^ 1]))
    with pytest.raises(IntegrityError, match=text):
        verify(arena, 0)


@pytest.mark.parametrize("shared", [1, SHARED_AT + 8, len(PAYLOAD) + 64, 2**63])
def test_shared_part_at_an_odd_place_or_beyond_the_payload_is_refused(arena: Arena, shared: int) -> None:
    arena.write_trainer_header(0, header(shared_offset=shared))
    with pytest.raises(IntegrityError, match="claims a shared part"):
        seal(arena, 0, VERSION)


def test_header_without_a_shared_part_says_that_it_begins_where_the_payload_ends(arena: Arena) -> None:
    made = header(shared_offset=-1)
    assert made.shared_offset == len(PAYLOAD)
    assert [c.region for c in chunk_spans(arena, 0, made)] == ["layout", "values", "unique", "unique"]
    everything = header(shared_offset=0)
    assert [c.region for c in chunk_spans(arena, 0, everything)] == ["layout", "values", "shared", "shared"]


def test_table_has_room_for_the_chunk_that_two_parts_are_more_than_one() -> None:
    """254 chunks of payload, cut in two: 255 of them, and one each of layout and values, are more than a page."""
    made = plan_header(
        SnapshotSize(1, 1, 254 * CHUNK_BYTES), slots=1, local_index=0, run_id="r", node_id="n", instance=bytes(16)
    )
    assert made.table_capacity == 2 * PAGE
