"""The arena: who may write what, what a reader may believe, and that damage anywhere is found or harmless."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from seals import make_sealer, seal, verify

from keepstep import faults
from keepstep.arena import memfd as segments
from keepstep.arena import records as h
from keepstep.arena import slots
from keepstep.arena.checksum import committed_chunks, read_digests, write_seal
from keepstep.arena.memfd import MAX_BYTES, SEALS, Mapping, Memfd
from keepstep.arena.records import ArenaHeader, Grant, KeeperHeader, Ledger, Progress, TrainerHeader
from keepstep.arena.slots import CHUNK_BYTES, PAGE, Arena, SlotSpan, plan_header, total_bytes, trainer_digest
from keepstep.errors import IntegrityError, KeeperError
from keepstep.layout import SnapshotSize, digest
from keepstep.types import Incarnation, Version

RUN, NODE = "run-7", "node-a"
LIFE = Incarnation(3, 0xFEED)
TINY = SnapshotSize(layout_bytes=40, values_bytes=50, payload_bytes=300)


def version(step: int) -> Version:
    return Version(LIFE, step)


def planned(need: SnapshotSize = TINY, *, num_slots: int = 2, local_index: int = 1) -> ArenaHeader:
    return plan_header(
        need, slots=num_slots, local_index=local_index, run_id=RUN, node_id=NODE, instance=b"keeper-instance!"
    )


@contextlib.contextmanager
def new_arena(need: SnapshotSize = TINY, *, num_slots: int = 2) -> Iterator[Arena]:
    made = Arena.create(planned(need, num_slots=num_slots))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with new_arena() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_fault_plan_survives_a_test() -> Iterator[None]:
    yield
    faults.install(None)


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    before = num_fds()
    yield
    assert num_fds() == before


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def content(step: int, need: SnapshotSize = TINY) -> tuple[bytes, bytes, bytes]:
    """What a trainer would store at `step`: layout, values, payload. Every byte depends on the step."""
    return tuple(
        bytes((step + region + i * 7) % 251 for i in range(min(size, 4096))).ljust(size, b"\5")
        for region, size in enumerate((need.layout_bytes, need.values_bytes, need.payload_bytes))
    )  # type: ignore[return-value]


def trainer_header(step: int, state: int, need: SnapshotSize = TINY) -> TrainerHeader:
    return TrainerHeader(
        state=state, rank=5, world_size=8, local_index=1, local_world_size=2, flags=0, version=version(step),
        layout_bytes=need.layout_bytes, values_bytes=need.values_bytes, payload_bytes=need.payload_bytes,
        layout_digest=digest(content(step, need)[0]), written_at=1000.0 + step,
    )  # fmt: skip


def write_regions(arena: Arena, slot: int, step: int, need: SnapshotSize = TINY) -> None:
    spans = (arena.layout_span(slot), arena.values_span(slot), arena.payload_span(slot))
    for span, data in zip(spans, content(step, need), strict=True):
        arena.segment.write(span.offset, data)


def take(arena: Arena, slot: int, step: int, need: SnapshotSize = TINY) -> None:
    """All that a trainer does for one snapshot."""
    arena.write_trainer_header(slot, trainer_header(step, h.WRITING, need))
    write_regions(arena, slot, step, need)
    arena.write_trainer_header(slot, trainer_header(step, h.COMMITTED, need))


def take_and_seal(arena: Arena, slot: int, step: int, need: SnapshotSize = TINY) -> None:
    take(arena, slot, step, need)
    seal(arena, slot, version(step))


def whole(arena: Arena) -> bytes:
    return arena.segment.read(0, arena.segment.size_bytes)


def restored(arena: Arena, slot: int) -> int | None:
    """The step that a careful reader gets out of `slot`, after looking at every byte; None when refused."""
    try:
        found = verify(arena, slot)
    except IntegrityError:
        return None
    step = found.version.step
    read = tuple(arena.segment.read(s.offset, s.size_bytes) for s in arena.used_spans(slot, found.trainer))
    assert read == content(step), "verified bytes are not what the trainer wrote"
    return step


def flip(arena: Arena, offset: int, bit: int = 0) -> None:
    (value,) = arena.segment.read(offset, 1)
    arena.segment.write(offset, bytes([value ^ (1 << bit)]))


# 1. A reader sees a sealed snapshot or nothing


def test_sealed_snapshot_is_read_back_byte_for_byte(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    found = arena.sealed(0)
    assert found is not None
    assert found.version == version(10)
    assert restored(arena, 0) == 10


def test_reader_sees_nothing_in_a_fresh_arena(arena: Arena) -> None:
    for slot in range(arena.num_slots):
        assert arena.committed(slot) is None
        assert arena.sealed(slot) is None
    assert (arena.grant(), arena.ledger(), arena.progress()) == (None, None, None)


def test_reader_sees_nothing_while_the_slot_is_written(arena: Arena) -> None:
    arena.write_trainer_header(0, trainer_header(10, h.WRITING))
    write_regions(arena, 0, 10)
    assert arena.committed(0) is None
    assert arena.sealed(0) is None


def test_committed_slot_is_not_a_snapshot_until_it_is_sealed(arena: Arena) -> None:
    take(arena, 0, 10)
    assert arena.committed(0) is not None
    assert arena.sealed(0) is None
    with pytest.raises(IntegrityError, match="not sealed"):
        verify(arena, 0)


def test_sealed_slot_is_no_snapshot_once_its_next_write_began(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    arena.write_trainer_header(0, trainer_header(12, h.WRITING))
    assert arena.sealed(0) is None


def test_seal_of_the_last_snapshot_does_not_cover_the_next_one(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    take(arena, 0, 12)
    assert arena.committed(0) is not None
    assert arena.sealed(0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"trainer_sequence": 1},
        {"trainer_sequence": 3},
        {"trainer_digest": bytes(16)},
        {"version": version(11)},
        {"version": Version(Incarnation(3, 0xFEEE), 10)},
        {"state": 0},
        {"state": 2},
    ],
    ids=str,
)
def test_keeper_header_that_names_another_commit_seals_nothing(arena: Arena, change: dict[str, object]) -> None:
    take_and_seal(arena, 0, 10)
    keeper = arena.keeper_header(0)
    assert keeper is not None
    arena.write_keeper_header(0, dataclasses.replace(keeper, **change))  # type: ignore[arg-type]
    assert arena.sealed(0) is None


def test_reader_sees_previous_snapshot_or_the_new_one_when_any_effect_of_take_and_seal_fails() -> None:
    failures = 0
    for nth in range(1, 1000):
        with new_arena() as arena:
            take_and_seal(arena, 0, 10)
            take_and_seal(arena, 1, 11)
            survived = _fail_nth_effect(nth, lambda: take_and_seal(arena, 0, 12))
            assert restored(arena, 1) == 11
            assert restored(arena, 0) in ((12,) if survived else (None, 10))
            take_and_seal(arena, 0, 13)
            assert restored(arena, 0) == 13
        if survived:
            break
        failures += 1
    assert failures > 10


def _fail_nth_effect(nth: int, action: Callable[[], None]) -> bool:
    """Whether `action` met fewer effects than `nth` and so went through."""
    count = 0
    failure = OSError(errno.ENOSPC, "the plan of this test")

    def plan(name: str) -> None:
        nonlocal count
        count += 1
        if count == nth:
            raise failure

    faults.install(plan)
    try:
        action()
    except OSError as error:
        if error is not failure:
            raise
        return False
    finally:
        faults.install(None)
    return True


def test_writing_header_that_is_lost_exposes_the_old_commit_only_to_readers_who_do_not_verify(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    arena.write_trainer_header(0, trainer_header(12, h.WRITING))
    flip(arena, arena.slot_offset(0) + 40)
    assert restored(arena, 0) == 10, "nothing of step 12 was written yet"
    arena.segment.write(arena.payload_span(0).offset, b"x")
    assert restored(arena, 0) is None


# 2. Each record has one writer


def _changed(before: bytes, after: bytes) -> set[int]:
    """Pages whose bytes differ."""
    pages = range(0, len(before), PAGE)
    return {at for at in pages if before[at : at + PAGE] != after[at : at + PAGE]}


def test_each_record_is_written_into_its_own_page_and_nowhere_else(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    take_and_seal(arena, 1, 11)
    keeper = arena.keeper_header(1)
    assert keeper is not None
    writes: list[tuple[Callable[[], None], int]] = [
        (lambda: arena.write_grant(Grant(LIFE, 1, 1, 0)), PAGE),
        (lambda: arena.write_ledger(Ledger(incarnation=LIFE, base=None, complete=None, serial=1)), 2 * PAGE),
        (lambda: arena.write_progress(Progress(LIFE, 1)), 3 * PAGE),
        (lambda: arena.write_trainer_header(1, trainer_header(12, h.WRITING)), arena.slot_offset(1)),
        (lambda: arena.write_keeper_header(1, keeper), arena.slot_offset(1) + PAGE),
    ]
    for write, page in writes:
        before = whole(arena)
        write()
        assert _changed(before, whole(arena)) == {page}


def test_seal_writes_the_keeper_header_and_the_table_only(arena: Arena) -> None:
    take(arena, 1, 10)
    before = whole(arena)
    seal(arena, 1, version(10))
    assert _changed(before, whole(arena)) == {arena.slot_offset(1) + PAGE, arena.table_span(1).offset}


def test_verify_writes_nothing(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    before = whole(arena)
    verify(arena, 0)
    assert whole(arena) == before


def test_regions_and_slots_do_not_overlap_and_fill_the_segment() -> None:
    with new_arena(SnapshotSize(PAGE + 1, 3 * PAGE, 9 << 20), num_slots=4) as arena:
        spans = [SlotSpan(0, 4 * PAGE)]
        for slot in range(4):
            spans.append(SlotSpan(arena.slot_offset(slot), 2 * PAGE))
            spans += [
                arena.layout_span(slot), arena.values_span(slot), arena.table_span(slot), arena.payload_span(slot)
            ]  # fmt: skip
        end = 0
        for span in spans:
            assert span.offset == end
            assert span.offset % PAGE == 0
            end = span.offset + span.size_bytes
        assert end == arena.segment.size_bytes == total_bytes(arena.header)


def test_arena_fits_what_it_was_planned_for_and_not_more() -> None:
    with new_arena(SnapshotSize(PAGE, PAGE, PAGE)) as arena:
        assert arena.fits(SnapshotSize(PAGE, PAGE, PAGE))
        for need in (SnapshotSize(PAGE + 1, 1, 1), SnapshotSize(1, PAGE + 1, 1), SnapshotSize(1, 1, PAGE + 1)):
            assert not arena.fits(need)


def test_arena_for_an_empty_snapshot_can_hold_and_seal_it() -> None:
    need = SnapshotSize(0, 0, 0)
    with new_arena(need) as arena:
        take_and_seal(arena, 0, 1, need)
        assert verify(arena, 0).keeper.num_chunks == 0


# 3. Sequence numbers only grow; a torn record reads as the one before

RECORDS: list[tuple[h.Record, h.Record, h.Record]] = [
    (trainer_header(1, h.WRITING), trainer_header(1, h.COMMITTED), trainer_header(2, h.WRITING)),
    tuple(
        KeeperHeader(
            state=h.SEALED,
            num_chunks=i,
            version=version(i),
            trainer_sequence=i,
            trainer_digest=bytes([i]) * 16,
            table_digest=bytes(16),
            sealed_at=float(i),
        )
        for i in (1, 2, 3)
    ),
    tuple(Grant(LIFE, i, i, 0, Grant(LIFE, i - 1, i - 1, 1) if i > 1 else None) for i in (1, 2, 3)),
    tuple(Ledger(incarnation=LIFE, base=version(i), complete=None, serial=i) for i in (1, 2, 3)),
    tuple(Progress(LIFE, i) for i in (1, 2, 3)),
]  # type: ignore[assignment]
each_kind = pytest.mark.parametrize("records", RECORDS, ids=lambda records: type(records[0]).__name__)


def write_to(pair: bytearray, record: h.Record) -> int:
    def write(offset: int, data: bytes) -> None:
        pair[offset : offset + len(data)] = data

    return h.write_pair(record, bytes(pair), write)


@each_kind
def test_sequence_grows_by_one_and_copies_alternate(records: tuple[h.Record, ...]) -> None:
    pair = bytearray(2 * h.RECORD_BYTES)
    for expected in range(1, 20):
        before = bytes(pair)
        record = records[expected % 3]
        assert write_to(pair, record) == expected
        assert h.newest(type(record), bytes(pair)) == (expected, record)
        untouched = slice(256, 512) if expected % 2 else slice(0, 256)
        assert pair[untouched] == before[untouched]


@each_kind
def test_each_prefix_of_a_write_reads_as_the_record_before(records: tuple[h.Record, ...]) -> None:
    pair = bytearray(2 * h.RECORD_BYTES)
    kind = type(records[0])
    expected = None
    for record in records:
        after = bytearray(pair)
        sequence = write_to(after, record)
        start = 0 if after[:256] != pair[:256] else 256
        for length in range(h.RECORD_BYTES + 1):
            torn = bytearray(pair)
            torn[start : start + length] = after[start : start + length]
            whole_write = torn == after
            assert whole_write or length < h.RECORD_BYTES
            assert h.newest(kind, bytes(torn)) == ((sequence, record) if whole_write else expected)
        pair, expected = after, (sequence, record)


@each_kind
def test_each_suffix_and_each_cache_line_of_a_write_reads_as_the_record_before(records: tuple[h.Record, ...]) -> None:
    pair = bytearray(2 * h.RECORD_BYTES)
    for record in records[:2]:
        write_to(pair, record)
    after = bytearray(pair)
    write_to(after, records[2])
    pieces = [(start, 256) for start in range(1, 256)] + [(line, line + 64) for line in range(0, 256, 64)]
    for start, end in pieces:
        torn = bytearray(pair)
        torn[start:end] = after[start:end]
        if torn not in (pair, after):
            assert h.newest(type(records[0]), bytes(torn)) == (2, records[1])


@each_kind
def test_each_flipped_bit_of_a_copy_reads_as_the_other_copy(records: tuple[h.Record, ...]) -> None:
    pair = bytearray(2 * h.RECORD_BYTES)
    for record in records:
        write_to(pair, record)
    kind = type(records[0])
    for at in range(len(pair)):
        for bit in range(8):
            damaged = bytearray(pair)
            damaged[at] ^= 1 << bit
            expected = (2, records[1]) if at < h.RECORD_BYTES else (3, records[2])
            assert h.newest(kind, bytes(damaged)) == expected


@each_kind
def test_record_with_both_copies_damaged_reads_as_nothing(records: tuple[h.Record, ...]) -> None:
    pair = bytearray(2 * h.RECORD_BYTES)
    for record in records:
        write_to(pair, record)
    for at in range(h.RECORD_BYTES):
        damaged = bytearray(pair)
        damaged[at] ^= 0x10
        damaged[511 - at] ^= 0x10
        assert h.newest(type(records[0]), bytes(damaged)) is None


@each_kind
@pytest.mark.parametrize("copy", [0, 1])
def test_write_goes_over_the_damaged_copy_and_never_over_the_only_sound_one(
    records: tuple[h.Record, ...], copy: int
) -> None:
    pair = bytearray(2 * h.RECORD_BYTES)
    write_to(pair, records[0])
    write_to(pair, records[1])
    pair[copy * 256 + 20] ^= 1
    sound = slice(256, 512) if copy == 0 else slice(0, 256)
    before = bytes(pair[sound])
    write_to(pair, records[2])
    assert pair[sound] == before
    newest = h.newest(type(records[0]), bytes(pair))
    assert newest is not None
    assert newest[1] == records[2]


def test_record_of_another_kind_is_not_read() -> None:
    for records in RECORDS:
        for others in RECORDS:
            copy = h.encode_copy(records[0], 1)
            assert (h.decode_copy(type(others[0]), copy) is not None) == (records is others)


def test_copy_of_another_length_is_not_read() -> None:
    copy = h.encode_copy(RECORDS[0][0], 1)
    for data in (b"", copy[:-1], copy + b"\0"):
        assert h.decode_copy(TrainerHeader, data) is None


@each_kind
def test_every_record_survives_its_own_encoding(records: tuple[h.Record, ...]) -> None:
    for record in records:
        assert h.decode_copy(type(record), h.encode_copy(record, 9)) == (9, record)


def test_ledger_tells_no_version_from_a_version_of_zeros() -> None:
    zero = Version(Incarnation(0, 0), 0)
    for base in (None, zero):
        for complete in (None, zero):
            ledger = Ledger(incarnation=LIFE, base=base, complete=complete, serial=4)
            assert h.decode_copy(Ledger, h.encode_copy(ledger, 1)) == (1, ledger)


def test_a_trainer_uses_the_grants_of_its_page_in_order() -> None:
    older = Grant(LIFE, 10, 4, 1)
    newest = Grant(LIFE, 11, 5, 2, older)
    assert [newest.after(serial) for serial in (3, 4, 5)] == [older, newest, None]
    assert [older.after(serial) for serial in (3, 4)] == [older, None]


# 4. A slot of another run, node, rank or layout is never accepted


def test_arena_of_the_same_run_and_node_is_adopted_with_everything_in_it(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    arena.write_ledger(Ledger(incarnation=LIFE, base=None, complete=version(10), serial=3))
    other = Arena.adopt(os.dup(arena.segment.fd), run_id=RUN, node_id=NODE)
    try:
        assert other.header == arena.header
        assert other.arena_id == arena.arena_id
        assert other.ledger() == Ledger(incarnation=LIFE, base=None, complete=version(10), serial=3)
        assert restored(other, 0) == 10
    finally:
        other.close()


@pytest.mark.parametrize(("run_id", "node_id"), [("run-8", NODE), (RUN, "node-b"), (NODE, RUN), ("", ""), (RUN, "")])
def test_arena_of_another_run_or_node_is_refused(arena: Arena, run_id: str, node_id: str) -> None:
    with pytest.raises(IntegrityError, match="belongs to run 'run-7' on node 'node-a'"):
        Arena.adopt(arena.segment.fd, run_id=run_id, node_id=node_id)


def test_slot_of_another_local_index_is_not_accepted(arena: Arena) -> None:
    write_regions(arena, 0, 10)
    arena.write_trainer_header(0, dataclasses.replace(trainer_header(10, h.COMMITTED), local_index=0))
    assert arena.committed(0) is None
    with pytest.raises(IntegrityError, match="does not hold"):
        seal(arena, 0, version(10))


@pytest.mark.parametrize("wanted", [version(11), Version(Incarnation(3, 1), 10), Version(Incarnation(4, 0xFEED), 10)])
def test_slot_of_another_version_is_not_sealed(arena: Arena, wanted: Version) -> None:
    take(arena, 0, 10)
    with pytest.raises(IntegrityError, match="does not hold"):
        seal(arena, 0, wanted)
    assert arena.keeper_header(0) is None


def test_slot_whose_layout_is_not_the_committed_one_is_not_sealed(arena: Arena) -> None:
    take(arena, 0, 10)
    arena.segment.write(arena.layout_span(0).offset, content(11)[0])
    with pytest.raises(IntegrityError, match="layout does not match its digest"):
        seal(arena, 0, version(10))
    assert arena.sealed(0) is None


@pytest.mark.parametrize("field", ["layout_bytes", "values_bytes", "payload_bytes"])
@pytest.mark.parametrize("size", [PAGE + 1, 1 << 63, (1 << 64) - 1])
def test_slot_that_claims_more_than_fits_is_not_sealed(arena: Arena, field: str, size: int) -> None:
    claim = dataclasses.replace(trainer_header(10, h.COMMITTED), **{field: size})
    arena.write_trainer_header(0, claim)
    with pytest.raises(IntegrityError, match="bytes where 4096 fit"):
        seal(arena, 0, version(10))


def test_sealed_slot_that_claims_another_number_of_chunks_is_refused(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    keeper = arena.keeper_header(0)
    assert keeper is not None
    arena.write_keeper_header(0, dataclasses.replace(keeper, num_chunks=keeper.num_chunks + 1))
    with pytest.raises(IntegrityError, match="4 checksums for 3 chunks"):
        verify(arena, 0)


# 5. Nothing locks: a dead owner blocks nobody


def test_trainer_that_dies_in_mid_write_blocks_nobody(arena: Arena) -> None:
    take_and_seal(arena, 1, 11)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        arena.write_trainer_header(0, trainer_header(12, h.WRITING))
        arena.segment.write(arena.payload_span(0).offset, b"half of it")
        os.write(write_end, b"x")
        signal.pause()
    os.read(read_end, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
    assert restored(arena, 0) is None
    assert restored(arena, 1) == 11
    take_and_seal(arena, 0, 13)
    assert restored(arena, 0) == 13


def test_writers_of_different_records_do_not_disturb_each_other(arena: Arena) -> None:
    """A keeper and a trainer thread write all they own, as fast as they can, into one arena."""
    rounds = 200

    def trainer() -> None:
        for step in range(rounds):
            arena.write_progress(Progress(LIFE, step))
            take(arena, step % 2, step)

    thread = threading.Thread(target=trainer)
    thread.start()
    for serial in range(rounds):
        arena.write_grant(Grant(LIFE, serial, serial, 0))
        arena.write_ledger(Ledger(incarnation=LIFE, base=None, complete=None, serial=serial))
        for slot in range(2):
            if committed := arena.committed(slot):
                with contextlib.suppress(IntegrityError):
                    seal(arena, slot, committed[1].version)
            assert arena.progress() is None or arena.progress().step < rounds  # type: ignore[union-attr]
    thread.join()
    grant, ledger, progress = arena.grant(), arena.ledger(), arena.progress()
    assert grant is not None
    assert ledger is not None
    assert progress is not None
    assert (grant.serial, ledger.serial, progress.step) == (rounds - 1,) * 3
    for slot in range(2):
        committed = arena.committed(slot)
        assert committed is not None
        seal(arena, slot, committed[1].version)
        assert restored(arena, slot) == rounds - 2 + slot


# Seal and verify


def test_seal_checksums_every_region_in_chunks_of_its_own() -> None:
    need = SnapshotSize(100, 200, 2 * CHUNK_BYTES + 1)
    with new_arena(need, num_slots=1) as arena:
        take_and_seal(arena, 0, 3, need)
        layout, values, payload = content(3, need)
        chunks = [layout, values, payload[:CHUNK_BYTES], payload[CHUNK_BYTES : 2 * CHUNK_BYTES], payload[-1:]]
        table = b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks)
        assert arena.segment.read(arena.table_span(0).offset, len(table)) == table
        keeper = arena.keeper_header(0)
        assert keeper is not None
        assert keeper.num_chunks == 5
        assert keeper.table_digest == xxhash.xxh3_128_digest(table)
        flip(arena, arena.payload_span(0).offset + CHUNK_BYTES)
        with pytest.raises(IntegrityError, match="chunk 1 of the payload"):
            verify(arena, 0)


def test_seal_of_a_sealed_slot_does_not_bless_a_flipped_bit(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    again = seal(arena, 0, version(10))
    assert again == arena.sealed(0)
    flip(arena, arena.payload_span(0).offset)
    with pytest.raises(IntegrityError, match="payload"):
        seal(arena, 0, version(10))
    assert restored(arena, 0) is None


def test_committed_slot_found_by_another_keeper_is_sealed_by_it(arena: Arena) -> None:
    take(arena, 0, 10)
    other = Arena.adopt(os.dup(arena.segment.fd), run_id=RUN, node_id=NODE)
    try:
        seal(other, 0, version(10))
    finally:
        other.close()
    assert restored(arena, 0) == 10


def test_slot_written_again_while_it_is_sealed_is_refused(arena: Arena) -> None:
    take(arena, 0, 10)
    committed = committed_chunks(arena, 0, version(10))
    table = read_digests(arena, committed.chunks)
    arena.write_trainer_header(0, trainer_header(12, h.WRITING))
    with pytest.raises(IntegrityError, match="written again while it was sealed"):
        write_seal(arena, committed, table)
    assert arena.sealed(0) is None


def test_slot_committed_again_while_it_is_sealed_is_refused(arena: Arena) -> None:
    take(arena, 0, 10)
    committed = committed_chunks(arena, 0, version(10))
    table = read_digests(arena, committed.chunks)
    take(arena, 0, 10)
    with pytest.raises(IntegrityError, match="written again while it was sealed"):
        write_seal(arena, committed, table)
    assert arena.sealed(0) is None


def test_slot_written_again_just_before_the_keeper_header_is_written_is_not_sealed(arena: Arena) -> None:
    take(arena, 0, 10)
    writes = 0

    def plan(name: str) -> None:
        nonlocal writes
        writes += name == "segment.write"
        if writes == 2:
            faults.install(None)
            arena.write_trainer_header(0, trainer_header(12, h.WRITING))

    faults.install(plan)
    seal(arena, 0, version(10))
    assert arena.keeper_header(0) is not None
    assert arena.sealed(0) is None
    assert restored(arena, 0) is None


def test_stopped_seal_or_verification_says_nothing_against_the_bytes(arena: Arena) -> None:
    stopped = make_sealer()
    stopped.stop()
    take(arena, 0, 10)
    with pytest.raises(KeeperError, match="stopped"):
        stopped.seal(arena, 0, version(10))
    assert arena.sealed(0) is None
    seal(arena, 0, version(10))
    with pytest.raises(KeeperError, match="stopped"):
        stopped.verify(arena, 0)


def test_keeper_never_maps_the_arena(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    verify(arena, 0)
    inode = f" {os.fstat(arena.segment.fd).st_ino} "
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if segments.NAME in line]
    assert not [line for line in mapped if inode in line]


@pytest.mark.parametrize("number", [errno.EIO, segments.EHWPOISON])
def test_page_that_the_machine_found_bad_is_an_integrity_error(arena: Arena, number: int) -> None:
    take_and_seal(arena, 0, 10)
    # Two headers, the table, a chunk of each of three regions, and the layout once more.
    for nth in range(1, 8):
        faults.install(_failing_read(nth, OSError(number, os.strerror(number))))
        with pytest.raises(IntegrityError, match="memory of the arena is bad"):
            verify(arena, 0)


def test_other_errors_of_reading_are_not_blamed_on_the_bytes(arena: Arena) -> None:
    take_and_seal(arena, 0, 10)
    faults.install(_failing_read(4, OSError(errno.EBADF, "closed")))
    with pytest.raises(OSError, match="closed"):
        verify(arena, 0)


def _failing_read(nth: int, error: OSError) -> Callable[[str], None]:
    count = 0

    def plan(name: str) -> None:
        nonlocal count
        count += name == "segment.read"
        if count == nth:
            raise error

    return plan


# A flipped bit anywhere is found, or is harmless because the other copy covers it


@pytest.fixture
def used() -> Iterator[Arena]:
    """Both slots written and sealed more than once, so that both copies of every header are in use."""
    with new_arena() as arena:
        for step in range(10, 16):
            take_and_seal(arena, step % 2, step)
        arena.write_grant(Grant(LIFE, 15, 1, 0))
        arena.write_grant(Grant(LIFE, 16, 2, 1))
        yield arena


def _flipped(arena: Arena, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Flip each bit of a stretch in turn; the arena is whole again after each."""
    for at in range(offset, offset + size_bytes):
        for bit in range(8):
            flip(arena, at, bit)
            yield at, bit
            flip(arena, at, bit)


REGION_SPANS: dict[str, Callable[[Arena, int], SlotSpan]] = {
    "layout": Arena.layout_span,
    "values": Arena.values_span,
    "payload": Arena.payload_span,
}


@pytest.mark.parametrize("region", REGION_SPANS)
def test_each_flipped_bit_of_a_region_is_found_and_the_region_named(used: Arena, region: str) -> None:
    size = getattr(TINY, f"{region}_bytes")
    for _ in _flipped(used, REGION_SPANS[region](used, 0).offset, size):
        with pytest.raises(IntegrityError, match=f"chunk 0 of the {region}"):
            verify(used, 0)
    assert (restored(used, 0), restored(used, 1)) == (14, 15)


def test_each_flipped_bit_of_the_checksum_table_is_found(used: Arena) -> None:
    for _ in _flipped(used, used.table_span(0).offset, 3 * slots.DIGEST_BYTES):
        with pytest.raises(IntegrityError, match="checksum table is damaged"):
            verify(used, 0)
    assert restored(used, 0) == 14


@pytest.mark.parametrize("page", [0, PAGE], ids=["trainer header", "keeper header"])
def test_each_flipped_bit_of_a_header_is_found_or_covered_by_the_other_copy(used: Arena, page: int) -> None:
    start = used.slot_offset(0) + page
    kind: type[TrainerHeader] | type[KeeperHeader] = KeeperHeader if page else TrainerHeader
    sequences = [h.decode_copy(kind, used.segment.read(start + at, 256)) for at in (0, 256)]
    assert all(sequences)
    newest = start + (256 if sequences[1][0] > sequences[0][0] else 0)  # type: ignore[index]
    for at, _ in _flipped(used, start, 512):
        if newest <= at < newest + 256:
            assert used.sealed(0) is None
            assert restored(used, 0) is None
        else:
            assert restored(used, 0) == 14
    assert restored(used, 1) == 15


def test_each_flipped_bit_of_the_arena_header_makes_adoption_refuse_it(used: Arena) -> None:
    for _ in _flipped(used, 0, ArenaHeader.SIZE):
        with pytest.raises(IntegrityError, match=r"first bytes|checksum"):
            Arena.adopt(used.segment.fd, run_id=RUN, node_id=NODE)


def test_flipped_bits_outside_the_used_bytes_are_harmless(used: Arena) -> None:
    last = [spans(used, 0).offset + getattr(TINY, f"{name}_bytes") for name, spans in REGION_SPANS.items()]
    last += [ArenaHeader.SIZE, PAGE + 512, used.slot_offset(0) + 512, used.slot_offset(0) + PAGE + 512]
    last += [used.table_span(0).offset + 3 * slots.DIGEST_BYTES]
    for at in last:
        for offset in (at, at + 64):
            flip(used, offset)
    Arena.adopt(used.segment.fd, run_id=RUN, node_id=NODE)
    assert (restored(used, 0), restored(used, 1)) == (14, 15)


def test_no_single_damaged_page_makes_a_reader_believe_something_that_was_not_written(used: Arena) -> None:
    """Zero, invert or swap in another page, for each page of the arena: right or refused, never wrong."""
    pages = [used.segment.read(at, PAGE) for at in range(0, used.segment.size_bytes, PAGE)]
    for index, page in enumerate(pages):
        replacements = {bytes(PAGE), bytes(b ^ 0xFF for b in page), *pages} - {page}
        for replacement in replacements:
            used.segment.write(index * PAGE, replacement)
            assert restored(used, 0) in (None, 14)
            assert restored(used, 1) in (None, 15)
            used.segment.write(index * PAGE, page)
    assert (restored(used, 0), restored(used, 1)) == (14, 15)


def test_slot_that_is_an_exact_copy_of_its_neighbour_says_so_in_its_version(used: Arena) -> None:
    """Headers do not name their slot: whoever asks for a version compares it, and gets right bytes or none."""
    stride = used.header.slot_stride
    used.segment.write(used.slot_offset(0), used.segment.read(used.slot_offset(1), stride))
    assert restored(used, 0) == 15


def test_deleted_checksum_table_is_not_trusted(used: Arena) -> None:
    used.segment.write(used.table_span(0).offset, bytes(used.header.table_capacity))
    with pytest.raises(IntegrityError, match="table is damaged"):
        verify(used, 0)


def test_deleted_keeper_header_is_not_trusted(used: Arena) -> None:
    used.segment.write(used.slot_offset(0) + PAGE, bytes(PAGE))
    assert used.sealed(0) is None
    with pytest.raises(IntegrityError, match="not sealed"):
        verify(used, 0)


def test_deleted_trainer_header_is_not_trusted(used: Arena) -> None:
    used.segment.write(used.slot_offset(0), bytes(PAGE))
    assert used.sealed(0) is None


def test_deleted_table_and_payload_are_not_trusted_together(used: Arena) -> None:
    used.segment.write(used.table_span(0).offset, bytes(used.header.table_capacity))
    used.segment.write(used.payload_span(0).offset, bytes(used.header.payload_capacity))
    with pytest.raises(IntegrityError):
        verify(used, 0)


def test_keeper_header_restored_from_an_older_copy_of_the_arena_is_not_trusted(used: Arena) -> None:
    old_page = used.segment.read(used.slot_offset(0) + PAGE, PAGE)
    take_and_seal(used, 0, 16)
    used.segment.write(used.slot_offset(0) + PAGE, old_page)
    assert used.sealed(0) is None


# Adopting a descriptor from elsewhere


def _refuse(fd: int, match: str) -> None:
    """Adoption refuses `fd`, and leaves it open and the caller's."""
    try:
        with pytest.raises(IntegrityError, match=match):
            Arena.adopt(fd, run_id=RUN, node_id=NODE)
        os.fstat(fd)
    finally:
        os.close(fd)


def _memfd(data: bytes, seals: int = SEALS, size_bytes: int | None = None) -> int:
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    os.ftruncate(fd, len(data) if size_bytes is None else size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_descriptor_that_is_not_a_memfd_is_refused(arena: Arena, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(whole(arena))
    left, right = socket.socketpair()
    left.close()
    read_end, write_end = os.pipe()
    os.close(write_end)
    for fd in (
        os.open(copy, os.O_RDWR), os.open("/dev/null", os.O_RDWR), os.open(tmp_path, os.O_RDONLY),
        right.detach(), read_end,
    ):  # fmt: skip
        _refuse(fd, "not a memfd")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs to make a file on")
def test_file_on_tmpfs_is_refused_though_it_has_seals(arena: Arena) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(whole(arena))
        file.flush()
        _refuse(os.dup(file.fileno()), "size sealed")


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memfd_that_somebody_could_still_resize_is_refused(arena: Arena, missing: int) -> None:
    _refuse(_memfd(whole(arena), SEALS & ~missing), "size sealed")


@pytest.mark.parametrize("seal_bit", [fcntl.F_SEAL_WRITE, segments.F_SEAL_FUTURE_WRITE])
def test_memfd_that_cannot_be_written_is_refused(arena: Arena, seal_bit: int) -> None:
    _refuse(_memfd(whole(arena), SEALS | seal_bit), "cannot be written")


def test_read_only_descriptor_of_an_arena_is_refused(arena: Arena) -> None:
    _refuse(os.open(f"/proc/self/fd/{arena.segment.fd}", os.O_RDONLY), "cannot be written")


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 100, 1023])
def test_memfd_too_small_for_a_header_is_refused(arena: Arena, size_bytes: int) -> None:
    _refuse(_memfd(whole(arena)[:size_bytes]), "is not an arena|the arena ends")


@pytest.mark.parametrize("change", [-PAGE, -1, 1, PAGE])
def test_truncated_or_grown_arena_is_refused(arena: Arena, change: int) -> None:
    size = arena.segment.size_bytes + change
    _refuse(_memfd(whole(arena)[:size], size_bytes=size), "bytes described")


def test_memfd_without_an_arena_header_is_refused(arena: Arena) -> None:
    _refuse(_memfd(bytes(arena.segment.size_bytes)), "first bytes are wrong")


ABSURD: dict[str, dict[str, int]] = {
    "no slots": {"num_slots": 0},
    "five slots": {"num_slots": 5},
    "all the slots": {"num_slots": (1 << 32) - 1},
    "empty layout": {"layout_capacity": 0, "slot_stride": 2 * PAGE + 3 * PAGE},
    "empty table": {"table_capacity": 0, "payload_capacity": 2 * PAGE},
    "unaligned": {"layout_capacity": PAGE - 64, "values_capacity": PAGE + 64},
    "payload larger than the memfd": {"payload_capacity": 1 << 40},
    "payload and stride larger than the memfd": {"payload_capacity": 1 << 40, "slot_stride": (1 << 40) + 5 * PAGE},
    "sums that wrap at 64 bits": {"payload_capacity": (1 << 64) - PAGE, "values_capacity": 3 * PAGE},
    "no stride": {"slot_stride": 0},
    "slots over the control pages": {"first_slot": 0},
    "slots elsewhere": {"first_slot": 5 * PAGE},
}


@pytest.mark.parametrize("change", ABSURD.values(), ids=ABSURD)
def test_arena_whose_header_contradicts_itself_is_refused(arena: Arena, change: dict[str, int]) -> None:
    absurd = dataclasses.replace(arena.header, **change)  # type: ignore[arg-type]
    _refuse(_memfd(absurd.encode() + whole(arena)[ArenaHeader.SIZE :]), "contradicts itself")
    with pytest.raises(KeeperError):
        Arena.create(absurd)


def test_arena_whose_table_is_too_small_for_its_payload_is_refused() -> None:
    """257 chunks of payload need more than one page of digests: the rest would be written over the payload."""
    need = SnapshotSize(1, 1, 257 * CHUNK_BYTES)
    header = planned(need, num_slots=1)
    assert header.table_capacity == 2 * PAGE
    cramped = dataclasses.replace(header, table_capacity=PAGE, slot_stride=header.slot_stride - PAGE)
    _refuse(_memfd(cramped.encode(), size_bytes=total_bytes(cramped)), "checksum table that is too small")


def _with_checksum(header: bytes) -> bytes:
    return header[:1016] + struct.pack("<Q", xxhash.xxh3_64_intdigest(header[:1016]))


def test_arena_of_another_format_is_refused(arena: Arena) -> None:
    encoded = bytearray(arena.header.encode())
    encoded[8] = 1
    _refuse(_memfd(_with_checksum(bytes(encoded)) + whole(arena)[1024:]), "arena format 1 is not the one")


@pytest.mark.parametrize("at", [104, 106])
def test_arena_with_an_id_longer_than_its_field_is_refused(arena: Arena, at: int) -> None:
    encoded = bytearray(arena.header.encode())
    encoded[at : at + 2] = struct.pack("<H", 201)
    _refuse(_memfd(_with_checksum(bytes(encoded)) + whole(arena)[1024:]), "contradicts itself")


def test_arena_header_holds_ids_of_up_to_200_bytes() -> None:
    header = dataclasses.replace(planned(), run_id="r" * 200, node_id="é" * 100)
    assert ArenaHeader.decode(header.encode()) == header
    with pytest.raises(AssertionError):
        dataclasses.replace(header, run_id="r" * 201).encode()


# The segment


def test_segment_is_reserved_and_sealed_when_it_is_made() -> None:
    segment = Memfd.create(3 << 20)
    try:
        assert segment.allocated_bytes >= 3 << 20
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        for size in (0, 4 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
        assert not os.get_inheritable(segment.fd)
    finally:
        segment.close()
        segment.close()


@pytest.mark.parametrize("size_bytes", [-1, 0, MAX_BYTES + 1, 1 << 63, 1 << 64, 1 << 80])
def test_segment_of_an_absurd_size_is_a_keeper_error(size_bytes: int) -> None:
    with pytest.raises(KeeperError, match="cannot be made"):
        Memfd.create(size_bytes)


@contextlib.contextmanager
def _limited(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def test_segment_that_is_refused_by_the_system_is_a_keeper_error_with_its_size() -> None:
    with _limited(resource.RLIMIT_FSIZE, 1 << 20), pytest.raises(KeeperError, match="2,097,152 bytes") as caught:
        Memfd.create(2 << 20)
    assert "KEEPSTEP_ARENA_SLOTS" in caught.value.hint


def test_segment_without_a_descriptor_left_is_a_keeper_error() -> None:
    with _limited(resource.RLIMIT_NOFILE, 3), pytest.raises(KeeperError, match="Too many open files"):
        Memfd.create(PAGE)


def test_arena_that_is_too_large_for_any_memfd_is_a_keeper_error() -> None:
    with pytest.raises(KeeperError, match="cannot be made"):
        Arena.create(planned(SnapshotSize(1, 1, MAX_BYTES)))


def test_failed_first_write_of_an_arena_leaves_no_descriptor() -> None:
    assert not _fail_nth_effect(2, lambda: Arena.create(planned()).close())


def test_read_beyond_the_end_is_an_integrity_error(arena: Arena) -> None:
    end = arena.segment.size_bytes
    with pytest.raises(IntegrityError, match="the arena ends"):
        arena.segment.read(end - 10, 11)
    with pytest.raises(IntegrityError, match="the arena ends"):
        arena.segment.read_into(end - 10, memoryview(bytearray(11)))


def test_write_beyond_the_end_is_refused_by_the_seal(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        arena.segment.write(arena.segment.size_bytes, b"x")


# The mapping


@contextlib.contextmanager
def mapped(size_bytes: int) -> Iterator[tuple[Memfd, Mapping]]:
    segment = Memfd.create(size_bytes)
    mapping = Mapping(segment)
    try:
        yield segment, mapping
    finally:
        mapping.close()
        segment.close()


def _resident_bytes(mapping: Mapping) -> int | None:
    """Rss of the map in this process's page tables, None when it is not mapped."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{mapping.address:08x}-"):
            return next(int(entry.split()[1]) * 1024 for entry in lines if entry.startswith("Rss:"))
    return None


def test_mapping_and_descriptor_see_the_same_bytes() -> None:
    with mapped(3 * PAGE) as (segment, mapping):
        mapping.map[PAGE : PAGE + 5] = b"hello"
        assert segment.read(PAGE, 5) == b"hello"
        segment.write(2 * PAGE, b"back")
        assert bytes(mapping.map[2 * PAGE : 2 * PAGE + 4]) == b"back"
        assert len(mapping.map) == mapping.size_bytes == 3 * PAGE


@pytest.mark.parametrize("advice", [segments.MADV_POPULATE_READ, 9999], ids=["this kernel", "kernel before 5.14"])
def test_populate_faults_every_page_in_and_changes_none(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(segments, "MADV_POPULATE_READ", advice)
    monkeypatch.setattr(segments, "POPULATE_STEP", 1 << 20)
    size = (5 << 20) + PAGE
    with mapped(size) as (segment, mapping):
        data = os.urandom(size)
        segment.write(0, data)
        assert _resident_bytes(mapping) == 0
        mapping.populate(2)
        assert _resident_bytes(mapping) == size
        faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        mapping.map[::PAGE] = mapping.map[::PAGE]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before < size // PAGE // 4
        assert segment.read(0, size) == data


def test_populate_never_writes_so_it_cannot_undo_what_a_take_writes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback of old kernels runs beside the first `take`: on a map that is read-only a write would be fatal."""
    monkeypatch.setattr(segments, "MADV_POPULATE_READ", 9999)

    def populate() -> str:
        with mapped(64 * PAGE) as (_, mapping):
            assert segments._libc.mprotect(ctypes.c_void_p(mapping.address), 64 * PAGE, mmap.PROT_READ) == 0
            mapping.populate(1)
            return str(_resident_bytes(mapping))

    assert _in_forked_child(populate) == str(64 * PAGE)


def _in_forked_child(report: Callable[[], str]) -> str:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, report().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def test_forked_child_has_no_mapping() -> None:
    with mapped(16 * PAGE) as (_, mapping):
        mapping.populate(1)
        assert _resident_bytes(mapping) == 16 * PAGE
        assert _in_forked_child(lambda: str(segments.NAME in Path("/proc/self/maps").read_text())) == "False"


def test_forked_child_that_closes_the_segment_holds_nothing_of_the_memory() -> None:
    """`mmap.mmap` would keep a descriptor of its own, which a data-loader worker cannot close."""

    def held() -> str:
        segment.close()
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return str(sum(segments.NAME in os.readlink(path) for path in paths if os.path.islink(path)))

    with mapped(PAGE) as (segment, _):
        assert _in_forked_child(held) == "0"


def test_mapping_dropped_in_a_forked_child_unmaps_nothing_of_the_child() -> None:
    with mapped(PAGE) as (_, mapping):

        def drop() -> str:
            taken = segments._libc.mmap(mapping.address, PAGE, 3, 0x22 | 0x10, -1, 0)
            assert taken == mapping.address
            mapping.close()
            return str(_resident_bytes(mapping) is not None)

        assert _in_forked_child(drop) == "True"


def test_closed_mapping_is_gone_at_once() -> None:
    with mapped(16 * PAGE) as (_, mapping):
        assert _resident_bytes(mapping) is not None
        mapping.close()
        assert _resident_bytes(mapping) is None
        mapping.close()


def test_array_over_a_closed_mapping_keeps_it_until_the_array_goes() -> None:
    np = pytest.importorskip("numpy")
    with mapped(16 * PAGE) as (segment, mapping):
        array = np.frombuffer(mapping.map, dtype=np.int64)[4:]
        segment.close()
        mapping.close()
        array[0] = 7
        assert array[0] == 7
        assert _resident_bytes(mapping) is not None
        del array
        assert _resident_bytes(mapping) is None


def test_mapping_that_the_system_refuses_is_a_keeper_error(arena: Arena) -> None:
    with _limited(resource.RLIMIT_AS, 1 << 20), pytest.raises(KeeperError, match="cannot be mapped"):
        Mapping(arena.segment)


def test_trainer_digest_depends_on_every_field_of_the_header() -> None:
    header = trainer_header(10, h.COMMITTED)
    changed = [
        dataclasses.replace(header, **{field.name: version(11)})  # type: ignore[arg-type]
        if field.name == "version"
        else dataclasses.replace(header, layout_digest=bytes(16))
        if field.name == "layout_digest"
        else dataclasses.replace(header, **{field.name: getattr(header, field.name) + 1})
        for field in dataclasses.fields(TrainerHeader)
    ]
    assert len({trainer_digest(header), *(trainer_digest(other) for other in changed)}) == len(changed) + 1


def test_populating_ends_when_the_map_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "POPULATE_STEP", mmap.PAGESIZE)
    segment = Memfd.create(200 * mmap.PAGESIZE)
    mapping, steps = Mapping(segment), 0

    def close_it(name: str) -> None:
        nonlocal steps
        steps += name == "segment.populate"
        if steps == 5:
            mapping.close()

    faults.install(close_it)
    mapping.populate(1)
    assert steps == 5
    mapping.populate(1)  # there is nothing any more
    assert steps == 5
    segment.close()
