"""What the keeper does for each snapshot and each chunk, with a state as large as real ones.

The arenas are real and as long as they would be, but nothing was ever written to their payloads: they take no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec
import pytest

from counting import counted_lines
from keepstep.arena import records as h
from keepstep.arena.checksum import committed_chunks, write_seal
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, plan_header
from keepstep.control.messages import RestoreFrom
from keepstep.errors import IntegrityError
from keepstep.keeper.transfer import chunk_store
from keepstep.keeper.transfer.chunk_store import STREAM, ChunkRequest, ChunkStore
from keepstep.keeper.transfer.fetch_replicas import find_replicas
from keepstep.keeper.workers import sealed_snapshot
from keepstep.keeper.workers.replica_digests import set_digests
from keepstep.keeper.workers.sealed_snapshot import LayoutIndex, LayoutIndexCache, SealedSnapshot, open_sealed
from keepstep.layout import CHUNK_BYTES, FULL, Entry, Layout, ReplicaSet, SnapshotSize, TensorView, class_id, digest
from keepstep.transport.interface import Refusal
from keepstep.types import Incarnation, Version

VERSION = Version(Incarnation(1, 2), 3)
LOCAL, CHUNKS = 8, 4096
"""16 GiB of replicated state on a node of eight ranks"""
TENSORS = 20_000


def piece(path: str, size_bytes: int) -> TensorView:
    return TensorView(path, "uint8", (size_bytes,), (1,), 0, (size_bytes,), (0,), False)


@dataclass
class Node:
    """Eight ranks of one node; what they hold together is all of one class."""

    arenas: list[Arena]
    class_id: str


def make(
    rank: int, layout: Layout, step: int = VERSION.step, arena: Arena | None = None, written_at: float = 0.0
) -> Arena:
    """An arena of which one slot holds a snapshot with this layout, sealed."""
    encoded, version = layout.encode(), Version(VERSION.incarnation, step)
    if arena is None:
        need = SnapshotSize(len(encoded), 1, layout.payload_bytes)
        header = plan_header(need, slots=2, local_index=rank, run_id="r", node_id="n", instance=bytes(16))
        arena = Arena.create(header, reserve=False)
    slot = step % 2
    arena.segment.write(arena.layout_span(slot).offset, encoded)
    trainer = TrainerHeader(
        state=h.COMMITTED, rank=rank, world_size=2 * LOCAL, local_index=rank, local_world_size=LOCAL, flags=0,
        version=version, layout_bytes=len(encoded), values_bytes=1, payload_bytes=layout.payload_bytes,
        layout_digest=digest(encoded), written_at=written_at, shared_offset=layout.shared_offset,
    )  # fmt: skip
    arena.write_trainer_header(slot, trainer)
    committed = committed_chunks(arena, slot, version)
    write_seal(arena, committed, bytes([step % 256]) * DIGEST_BYTES * len(committed.chunks))
    return arena


def served(store: ChunkStore, asked: ChunkRequest) -> int:
    """How many bytes a peer would get. The descriptor that they are read from is given back."""
    body = store.read(asked)
    body.release()
    return body.size_bytes


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    size = CHUNKS * CHUNK_BYTES
    entries = (Entry(0, size, (piece("model.weight", size),)),)
    ranks = tuple(range(2 * LOCAL))
    name = class_id(ranks, entries)
    with ExitStack() as stack:
        arenas = []
        for rank in range(LOCAL):
            stream = ReplicaSet(
                name, ranks, tuple(r // LOCAL for r in ranks), size, entries, FULL, 2, 0, 0, 0,
                tuple(range(rank, CHUNKS, LOCAL)), (),
            )  # fmt: skip
            arena = make(rank, Layout((), (), (stream,)))
            stack.callback(arena.close)
            arenas.append(arena)
        yield Node(arenas, name)


def test_chunks_of_a_large_class_are_found_in_one_look_each(node: Node) -> None:
    own = node.arenas[3]
    arenas = {arena.arena_id: arena for arena in node.arenas}
    with counted_lines() as count:
        found = find_replicas(arenas, RestoreFrom(VERSION, own.arena_id, VERSION.step % 2, 0, []))
    (source,) = found.sources
    assert not found.missing
    for chunk in (0, 1, 3, 8, CHUNKS - 1):
        holder = node.arenas[chunk % LOCAL]
        assert found.fds[source.fd_index[chunk]] == holder.segment.fd
        at = holder.payload_span(VERSION.step % 2).offset + chunk // LOCAL * CHUNK_BYTES
        assert source.offsets[chunk] == at
    assert count.lines < 100 * CHUNKS, "a look at each arena for each chunk, and not at all of its chunks"


def test_chunk_of_a_large_class_is_served_without_going_through_all_of_it(node: Node) -> None:
    store = ChunkStore("n")
    for arena in node.arenas:
        store.add(arena)
    asked = [ChunkRequest(STREAM, VERSION, chunk=chunk, class_id=node.class_id) for chunk in range(0, CHUNKS, 7)]
    assert served(store, asked[0]) == CHUNK_BYTES
    with counted_lines() as count:
        for one in asked:
            assert served(store, one) == CHUNK_BYTES
    # 730, most of them to see whether the books of eight ranks are current. One rank alone has 512 chunks.
    assert count.lines / len(asked) < 1000


@dataclass
class OneRank:
    """A rank that holds all of a class of two chunks, and a store that it lies on."""

    layout: Layout
    arena: Arena
    store: ChunkStore
    asked: ChunkRequest

    def write_again(self, steps: int) -> None:
        make(0, self.layout, VERSION.step + steps, self.arena)


@pytest.fixture
def rank() -> Iterator[OneRank]:
    size = 2 * CHUNK_BYTES
    entries = (Entry(0, size, (piece("model.weight", size),)),)
    name = class_id((0, 1), entries)
    layout = Layout((), (), (ReplicaSet(name, (0, 1), (0, 1), size, entries, FULL, 2, 0, 0, 0, (0, 1), ()),))
    arena, store = make(0, layout), ChunkStore("n")
    store.add(arena)
    yield OneRank(layout, arena, store, ChunkRequest(STREAM, VERSION, chunk=1, class_id=name))
    arena.close()


def test_chunk_of_a_slot_that_was_written_again_is_not_served(rank: OneRank) -> None:
    assert served(rank.store, rank.asked) == CHUNK_BYTES
    rank.write_again(2)
    with pytest.raises(Refusal, match="does not hold that chunk"):
        rank.store.read(rank.asked)


def test_slot_that_is_written_again_while_it_is_opened_does_not_stand_for_the_old_version(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(arena: Arena, slot: int, sealed: SealedSlot | None = None) -> SealedSnapshot:
        rank.write_again(2)
        return open_sealed(arena, slot, sealed)

    monkeypatch.setattr(chunk_store, "open_sealed", too_late)
    with pytest.raises(Refusal):
        rank.store.read(rank.asked)
    monkeypatch.undo()
    with pytest.raises(Refusal, match="does not hold that chunk"):
        rank.store.read(rank.asked)


def test_book_that_is_out_of_date_does_not_hide_what_others_hold(rank: OneRank) -> None:
    other = make(1, rank.layout)
    try:
        rank.store.add(other)
        for number in (0, 1):
            rank.store.snapshot(VERSION, number)  # open, but its layout was not needed yet
        sealed_snapshot._layouts._indexes.clear()
        rank.write_again(2)
        rank.arena.segment.write(rank.arena.layout_span(VERSION.step % 2).offset, b"\xff")
        assert served(rank.store, rank.asked) == CHUNK_BYTES
    finally:
        other.close()


def test_time_that_is_no_number_in_a_header_does_not_make_a_book_old(rank: OneRank) -> None:
    arena = make(0, rank.layout, VERSION.step + 1, rank.arena, written_at=math.nan)
    assert open_sealed(arena, (VERSION.step + 1) % 2).is_current()


@pytest.mark.parametrize("replicated", [False, True])
def test_layouts_of_many_tensors_are_decoded_once_for_all_snapshots_of_all_ranks(replicated: bool) -> None:
    entries = tuple(Entry(at * 64, 64, (piece(f"model.{at}", 64),)) for at in range(TENSORS))
    ranks = tuple(range(LOCAL))
    stream = ReplicaSet(class_id(ranks, entries), ranks, ranks, TENSORS * 64, entries, FULL, LOCAL, 0, 0, 0, (0,), ())
    layout = Layout((), (), (stream,)) if replicated else Layout(entries, tuple((at, 0) for at in range(TENSORS)))
    layouts = [layout] if not replicated else [layout, *(replace_turn(layout, turn) for turn in range(1, LOCAL))]
    arenas = [make(rank, one) for rank, one in enumerate(layouts)]
    try:
        for arena in arenas:
            set_digests(open_sealed(arena, VERSION.step % 2))
        for rank, arena in enumerate(arenas):
            make(rank, layouts[rank], VERSION.step + 1, arena)
        with counted_lines() as count:
            for arena in arenas * 3:
                assert len(set_digests(open_sealed(arena, (VERSION.step + 1) % 2))) == replicated
        assert count.lines / 3 / len(arenas) < TENSORS // 20
    finally:
        for arena in arenas:
            arena.close()


def replace_turn(layout: Layout, turn: int) -> Layout:
    """Another layout of the same tensors, as every rank of a node has one."""
    (stream,) = layout.replica_sets
    return Layout((), (), (msgspec.structs.replace(stream, turn=turn),))


# What is kept of layouts


def small(tensors: int) -> tuple[TrainerHeader, bytes]:
    """A layout with one stream of this many tensors, and a header that belongs to it."""
    entries = tuple(Entry(at * 64, 64, (piece(f"model.{at}", 64),)) for at in range(tensors))
    name = class_id((0, 1), entries)
    stream = ReplicaSet(name, (0, 1), (0, 1), tensors * 64, entries, FULL, 2, 0, 0, 0, (0,), ())
    layout = Layout((), (), (stream,))
    encoded = layout.encode()
    header = TrainerHeader(
        state=h.COMMITTED, rank=0, world_size=2, local_index=0, local_world_size=1, flags=0, version=VERSION,
        layout_bytes=len(encoded), values_bytes=1, payload_bytes=layout.payload_bytes, layout_digest=digest(encoded),
        written_at=0.0, shared_offset=0,
    )  # fmt: skip
    return header, encoded


def test_layouts_that_are_kept_have_a_bound_and_the_one_used_last_stays() -> None:
    known = LayoutIndexCache(max_layouts=3)
    wanted = [small(tensors) for tensors in (30, 31, 32, 33)]
    reads = []

    def look(index: int) -> LayoutIndex:
        header, encoded = wanted[index]
        return known.of(header, lambda: reads.append(index) or encoded)  # type: ignore[func-returns-value]

    for index in (0, 1, 2, 0, 3, 0):
        assert look(index).replica_sets[0].size_bytes == (30 + index) * 64
        assert len(known) <= 3
    assert reads == [0, 1, 2, 3], "0 was used in between, so 1 went"
    look(2)
    look(1)
    assert reads == [0, 1, 2, 3, 1]
    assert known.num_chunks == 3


def test_what_is_kept_of_layouts_is_counted_in_chunks() -> None:
    known = LayoutIndexCache(max_chunks=2)
    for tensors in (1, 2, 3):
        header, encoded = small(tensors)
        known.of(header, lambda encoded=encoded: encoded)  # type: ignore[misc]
        assert known.num_chunks == min(tensors, 2)
    header, encoded = small(4 * CHUNK_BYTES // 64)
    assert known.of(header, lambda: encoded).num_chunks == 1
    assert not known.of(header, lambda: encoded).replica_sets[0].entries, "nobody looks them up"


def test_layout_that_is_not_the_one_of_its_header_is_refused() -> None:
    known = LayoutIndexCache()
    header, encoded = small(2)
    with pytest.raises(IntegrityError, match="does not match its digest"):
        known.of(header, lambda: encoded[:-1] + b"!")
    with pytest.raises(IntegrityError, match="where the shared part begins"):
        known.of(replace(header, shared_offset=64), lambda: encoded)
    assert known.of(header, lambda: encoded).num_chunks == 1
