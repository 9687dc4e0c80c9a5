"""Streams in a layout: where their chunks lie, and that hostile ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep import layout as layouts
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, Entry, Layout, ReplicaSet, TensorView, class_id, decode, describe

MiB = 1 << 20
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def piece(path: str, size_bytes: int) -> TensorView:
    return TensorView(path, "uint8", (size_bytes,), (1,), 0, (size_bytes,), (0,), False)


ENTRIES = (
    Entry(0, 5 * MiB, (piece("model.a", 5 * MiB),)),
    Entry(5 * MiB, 4 * MiB + 7, (piece("model.b", 4 * MiB + 7),)),
)
SIZE = 9 * MiB + 7


def replica_set(**changes: Any) -> ReplicaSet:
    """Nine and a bit MiB in three chunks, held by two ranks on each of two nodes; all of it is stored."""
    ranks = changes.get("ranks", (0, 1, 2, 3))
    made = ReplicaSet(
        class_id(ranks, changes.get("entries", ENTRIES)), ranks, (0, 0, 1, 1), SIZE, ENTRIES, mode="full", n=2, m=0,
        turn=0, offset=64, chunks=(0, 1, 2), parity=(),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def layout(*replica_sets: ReplicaSet, **changes: Any) -> Layout:
    made = Layout((Entry(0, 8, (piece("x", 8),)),), ((0, 0), (2, 0), (1, 0)), replica_sets or (replica_set(),))
    return msgspec.structs.replace(made, **changes)


def refused(changed: Layout, payload_bytes: int = 1 << 40) -> str:
    with pytest.raises(IntegrityError, match="contradicts itself") as caught:
        decode(changed.encode(), payload_bytes=payload_bytes)
    return str(caught.value)


def test_layout_with_replica_sets_is_read_back_as_it_was_written() -> None:
    made = layout()
    assert decode(made.encode(), payload_bytes=made.payload_bytes) == made
    assert (made.shared_offset, made.payload_bytes) == (64, 64 + SIZE)


def test_references_count_own_entries_first_then_those_of_each_replica_set() -> None:
    entries = layout().all_entries()
    assert [entries[entry].path for entry, _ in layout().refs] == ["x", "model.b", "model.a"]
    rows = describe(layout())
    assert [row.get("stream") for row in rows] == [None, replica_set().class_id, replica_set().class_id]
    assert "does not exist" in refused(layout(refs=((3, 0),)))


def test_stored_chunks_lie_on_a_grid_and_only_the_last_of_the_replica_set_is_short() -> None:
    places = [(s.offset, s.size_bytes, s.chunk) for s in replica_set().stored()]
    assert places == [(64, 4 * MiB, 0), (64 + 4 * MiB, 4 * MiB, 1), (64 + 8 * MiB, MiB + 7, 2)]
    assert [s.size_bytes for s in replica_set(chunks=(2,)).stored()] == [MiB + 7]
    assert [s.size_bytes for s in replica_set(chunks=(0, 1)).stored()] == [4 * MiB] * 2
    assert replica_set(chunks=()).stored() == ()
    assert replica_set(chunks=()).stored_bytes == 0


def test_parity_stands_behind_the_chunks_and_a_short_chunk_before_it_is_padded() -> None:
    shared = replica_set(mode="share", m=1, n=3, chunks=(2,), parity=((0, 0), (1, 0)))
    assert [(s.offset, s.size_bytes, s.chunk, s.row, s.code_row) for s in shared.stored()] == [
        (64, CHUNK_BYTES, 2, -1, -1),
        (64 + CHUNK_BYTES, CHUNK_BYTES, -1, 0, 0),
        (64 + 2 * CHUNK_BYTES, CHUNK_BYTES, -1, 1, 0),
    ]
    assert shared.stored_bytes == 3 * CHUNK_BYTES
    made = layout(shared)
    assert decode(made.encode(), payload_bytes=made.payload_bytes) == made


def test_rank_that_stores_nothing_of_a_replica_set_has_no_shared_part() -> None:
    made = layout(replica_set(chunks=()))
    assert made.shared_offset == made.payload_bytes == 64
    assert decode(made.encode(), payload_bytes=64) == made


def test_class_id_depends_on_its_holders_and_its_entries_only() -> None:
    name = replica_set().class_id
    assert class_id((0, 1, 2, 3), ENTRIES) == name
    assert class_id((0, 1, 2), ENTRIES) != name
    assert class_id((0, 1, 2, 3), ENTRIES[:1]) != name
    assert replica_set(chunks=(1,), turn=1, nodes=(0, 1, 2, 3)).class_id == name


HOSTILE: dict[str, dict[str, Any]] = {
    "no holders": {"ranks": (), "nodes": ()},
    "a holder without a node": {"nodes": (0, 0, 1)},
    "negative rank": {"ranks": (-1, 1, 2, 3)},
    "a rank twice": {"ranks": (0, 1, 1, 3)},
    "ranks backwards": {"ranks": (3, 2, 1, 0)},
    "negative node": {"nodes": (0, 0, 1, -1)},
    "larger than its entries": {"size_bytes": SIZE + 1},
    "smaller than its entries": {"size_bytes": SIZE - 1},
    "negative size": {"size_bytes": -1},
    "no entries": {"entries": (), "size_bytes": 0},
    "entries that overlap": {"entries": (ENTRIES[1], ENTRIES[0])},
    "unknown mode": {"mode": "some"},
    "more parity than nodes": {"m": 2},
    "no nodes": {"n": 0},
    "too many nodes": {"n": 256, "mode": "share"},
    "negative m": {"m": -1},
    "negative turn": {"turn": -1},
    "chunk beyond the replica set": {"chunks": (0, 3)},
    "negative chunk": {"chunks": (-1, 0)},
    "a chunk twice": {"chunks": (1, 1)},
    "chunks backwards": {"chunks": (1, 0)},
    "parity in full mode": {"parity": ((0, 0),)},
    "parity twice": {"mode": "share", "m": 1, "parity": ((0, 0), (0, 0))},
    "parity of a row that is not there": {"mode": "share", "m": 1, "parity": ((3, 0),)},
    "parity of a code row that is not there": {"mode": "share", "m": 1, "parity": ((0, 1),)},
    "negative offset": {"offset": -CHUNK_BYTES + 64},
    "over the own entries": {"offset": 0},
    "off the grid": {"offset": 128},
    "another's name": {"class_id": "0" * 32},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_replica_set_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    assert refused(layout(replica_set(**change)))


def test_replica_set_beyond_the_payload_or_over_another_is_refused() -> None:
    assert "beyond the payload" in refused(layout(), payload_bytes=64 + SIZE - 1)
    assert "overlaps" in refused(layout(replica_set(), replica_set(offset=64 + 2 * CHUNK_BYTES)))
    twice = layout(replica_set(), replica_set(offset=64 + 3 * CHUNK_BYTES))
    assert "is listed twice" in refused(twice, payload_bytes=twice.payload_bytes)
    behind = replica_set(offset=64 + 3 * CHUNK_BYTES, ranks=(0, 1, 4, 5))
    two = layout(replica_set(), behind)
    assert decode(two.encode(), payload_bytes=two.payload_bytes) == two


def test_more_replica_sets_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MAX_REPLICA_SETS", 0)
    assert "too many replica sets" in refused(layout())
    monkeypatch.setattr(layouts, "MAX_ENTRIES", 1)
    assert "too many entries" in refused(layout())


@fuzz
@given(st.data())
def test_damaged_layout_with_replica_sets_is_refused_or_lies_within_bounds(data: st.DataObject) -> None:
    made = layout(replica_set(mode="share", m=1, chunks=(1, 2), parity=((0, 0),)))
    encoded = bytearray(made.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        accepted = decode(encoded, payload_bytes=made.payload_bytes)
    except IntegrityError:
        return
    end = accepted.shared_offset
    for one in accepted.replica_sets:
        stored = one.stored()
        assert len(stored) == len(one.chunks) + len(one.parity)
        for place in stored:
            assert end <= place.offset < place.offset + place.size_bytes <= made.payload_bytes
            assert (place.offset - accepted.shared_offset) % CHUNK_BYTES == 0
            assert place.chunk < one.num_chunks
            end = place.offset + place.size_bytes
