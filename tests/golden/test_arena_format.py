"""The arena's bytes, pinned. A change here is a change of format: new FORMAT, new page docs/arena-format.md.

The reader at the end was written from docs/arena-format.md alone and imports nothing of keepstep.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from seals import seal

from keepstep.arena import records as h
from keepstep.arena.records import ArenaHeader, Grant, KeeperHeader, Ledger, Progress, TrainerHeader
from keepstep.arena.slots import Arena, total_bytes
from keepstep.layout import Entry, Layout, ReplicaSet, TensorView, class_id, digest
from keepstep.types import Incarnation, TakeCounts, Version

LIFE = Incarnation(0x0102030405060708, 0x1112131415161718)
OLDER = Incarnation(7, 0xA1A2A3A4A5A6A7A8)
LIFE_HEX = "0807060504030201" + "1817161514131211"
SEQUENCE = 0x0908
SEQUENCE_HEX = "0809000000000000"

TRAINER = TrainerHeader(
    state=h.COMMITTED, rank=0x21222324, world_size=0x31323334, local_index=3, local_world_size=8, flags=h.INEXACT,
    version=Version(LIFE, 1000), layout_bytes=0x41, values_bytes=0x4243, payload_bytes=0x444546,
    layout_digest=bytes(range(0x50, 0x60)), written_at=1700000000.5, shared_offset=0x444540,
)  # fmt: skip
TRAINER_HEX = (
    "4b53545241494e52"  # KSTRAINR
    + SEQUENCE_HEX
    + "02000000" "24232221" "34333231" "03000000" "08000000" "01000000"
    + LIFE_HEX + "e803000000000000"
    + "4100000000000000" "4342000000000000" "4645440000000000" "4045440000000000"
    + "505152535455565758595a5b5c5d5e5f"
    + "00002040fc54d941"
    + "00" * 128
    + "fba9ca8821839d88"
)  # fmt: skip

KEEPER = KeeperHeader(
    state=h.SEALED, num_chunks=4, version=Version(LIFE, 1000), trainer_sequence=6,
    trainer_digest=bytes(range(0x60, 0x70)), table_digest=bytes(range(0x70, 0x80)), sealed_at=1700000001.25,
)  # fmt: skip
KEEPER_HEX = (
    "4b534b4545504552"  # KSKEEPER
    + SEQUENCE_HEX
    + "01000000" "04000000"
    + LIFE_HEX + "e803000000000000"
    + "0600000000000000"
    + "606162636465666768696a6b6c6d6e6f"
    + "707172737475767778797a7b7c7d7e7f"
    + "00005040fc54d941"
    + "00" * 152
    + "dc0d42c54cff9046"
)  # fmt: skip

GRANT = Grant(LIFE, step=1001, serial=42, slot=2, before=Grant(LIFE, step=1000, serial=41, slot=1))
GRANT_HEX = (
    "4b534752414e5432"  # KSGRANT2
    + SEQUENCE_HEX
    + LIFE_HEX + "e903000000000000" "2a00000000000000" "0200000000000000"
    + "e803000000000000" "2900000000000000" "0100000000000000"
    + "00" * 168
    + "3dcf4bd37d448372"
)  # fmt: skip

LEDGER = Ledger(
    incarnation=LIFE, base=Version(OLDER, -1), complete=None, serial=9, current=Version(LIFE, 5), protected=None,
    target=Version(LIFE, 6), protected_by=(1, 2, 3), epoch=0x31, seq=0x32, attempt=0x33, settled=0x34,
)  # fmt: skip
LEDGER_HEX = (
    "4b534c4544474532"  # KSLEDGE2
    + SEQUENCE_HEX
    + LIFE_HEX
    + "15"
    + "0700000000000000" "a8a7a6a5a4a3a2a1" "ffffffffffffffff"
    + "00" * 24
    + LIFE_HEX + "0500000000000000"
    + "00" * 24
    + LIFE_HEX + "0600000000000000"
    + "0100000000000000" "0200000000000000" "0300000000000000"
    + "3100000000000000" "3200000000000000"
    + "34000000" "33000000"
    + "0900000000000000"
    + "00" * 39
    + "be3782a8277ecca1"
)  # fmt: skip

PROGRESS = Progress(LIFE, 999)
PROGRESS_HEX = (
    "4b5350524f475253"  # KSPROGRS
    + SEQUENCE_HEX
    + LIFE_HEX + "e703000000000000"
    + "00" * 208
    + "47068456a9b0416e"
)  # fmt: skip

ARENA = ArenaHeader(
    num_slots=2, local_index=3, generation=5, layout_capacity=0x1000, values_capacity=0x1000,
    table_capacity=0x1000, payload_capacity=0x2000, slot_stride=0x7000, first_slot=0x4000,
    arena_id=bytes(range(0x80, 0x90)), instance=bytes(range(0x90, 0xA0)), run_id="run-é", node_id="node a",
)  # fmt: skip
ARENA_HEX = (
    "4b534152454e4131"  # KSARENA1
    + "02000000" "02000000" "03000000" "05000000"
    + "0010000000000000" "0010000000000000" "0010000000000000" "0020000000000000"
    + "0070000000000000" "0040000000000000"
    + "808182838485868788898a8b8c8d8e8f"
    + "909192939495969798999a9b9c9d9e9f"
    + "0600" "0600"
    + "72756e2dc3a9" + "00" * 194
    + "6e6f64652061" + "00" * 194
    + "00" * 508
    + "c0fefcbe00b2fdba"
)  # fmt: skip

RECORDS = {
    "trainer header": (TRAINER, TRAINER_HEX),
    "keeper header": (KEEPER, KEEPER_HEX),
    "grant": (GRANT, GRANT_HEX),
    "ledger": (LEDGER, LEDGER_HEX),
    "progress": (PROGRESS, PROGRESS_HEX),
}


@pytest.mark.parametrize(("record", "expected"), RECORDS.values(), ids=RECORDS)
def test_record_is_encoded_to_exactly_these_bytes(record: h.Record, expected: str) -> None:
    assert h.encode_copy(record, SEQUENCE).hex() == expected


@pytest.mark.parametrize(("record", "encoded"), RECORDS.values(), ids=RECORDS)
def test_these_bytes_are_read_as_exactly_this_record(record: h.Record, encoded: str) -> None:
    assert h.decode_copy(type(record), bytes.fromhex(encoded)) == (SEQUENCE, record)


def test_arena_header_is_encoded_to_exactly_these_bytes() -> None:
    assert ARENA.encode().hex() == ARENA_HEX
    assert ArenaHeader.decode(bytes.fromhex(ARENA_HEX)) == ARENA


def test_layout_is_encoded_to_exactly_these_bytes() -> None:
    assert tiny_layout().encode().hex() == LAYOUT_HEX


# A whole arena

LAYOUT_HEX = (
    "93929300189298ac6d6f64656c2e776569676874a7666c6f6174333292020392030100920403920200c398aa6d6f6465"
    "6c2e74696564a7666c6f61743332910391010c91039100c29340089198ae6f7074696d697a65722e73746570a5696e74"
    "36349090009090c294920000920100920001920200919cd9206530666232363034383737633334386633396266353464"
    "38343464313131643892010592000118919300189198aa6d6f64656c2e62696173a7666c6f6174333291069101009106"
    "9100c2a466756c6c020000cc80910090"
)
ARENA_DIGEST = "070d73e8f5ba7b9c27cc9821388e84da"


def tiny_layout() -> Layout:
    weight = TensorView("model.weight", "float32", (2, 3), (3, 1), 0, (4, 3), (2, 0), True)
    tied = TensorView("model.tied", "float32", (3,), (1,), 12, (3,), (0,), False)
    step = TensorView("optimizer.step", "int64", (), (), 0, (), (), False)
    shared = (Entry(0, 24, (TensorView("model.bias", "float32", (6,), (1,), 0, (6,), (0,), False),)),)
    stream = ReplicaSet(
        class_id((1, 5), shared), (1, 5), (0, 1), 24, shared, mode="full", n=2, m=0, turn=0, offset=128, chunks=(0,),
        parity=(),
    )  # fmt: skip
    entries = (Entry(0, 24, (weight, tied)), Entry(64, 8, (step,)))
    return Layout(entries, ((0, 0), (1, 0), (0, 1), (2, 0)), (stream,))


def write_snapshot(arena: Arena, slot: int, step: int) -> None:
    layout, values = tiny_layout().encode(), f"values of step {step}".encode()
    payload = bytes((step * 31 + i) % 256 for i in range(152))
    trainer = TrainerHeader(
        state=h.WRITING, rank=1, world_size=4, local_index=3, local_world_size=4, flags=0,
        version=Version(LIFE, step), layout_bytes=len(layout), values_bytes=len(values), payload_bytes=len(payload),
        layout_digest=digest(layout), written_at=1700000000.0 + step, shared_offset=128,
    )  # fmt: skip
    arena.write_trainer_header(slot, trainer)
    for span, data in ((arena.layout_span, layout), (arena.values_span, values), (arena.payload_span, payload)):
        arena.segment.write(span(slot).offset, data)
    arena.write_trainer_header(slot, TrainerHeader(**{**vars(trainer), "state": h.COMMITTED}))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Slot 0: step 12 over step 10, sealed. Slot 1: step 11, committed and not sealed."""
    monkeypatch.setattr("time.time", lambda: 1700000100.0)
    arena = Arena.create(ARENA)
    try:
        arena.write_grant(Grant(LIFE, 10, 1, 0))
        arena.write_ledger(Ledger(incarnation=LIFE, base=None, complete=None, serial=1))
        write_snapshot(arena, 0, 10)
        seal(arena, 0, Version(LIFE, 10))
        arena.write_progress(Progress(LIFE, 10))
        arena.write_grant(Grant(LIFE, 11, 2, 1))
        write_snapshot(arena, 1, 11)
        arena.write_grant(Grant(LIFE, 12, 3, 0))
        write_snapshot(arena, 0, 12)
        seal(arena, 0, Version(LIFE, 12))
        arena.write_ledger(Ledger(incarnation=LIFE, base=None, complete=Version(LIFE, 12), serial=2))
        arena.write_progress(Progress(LIFE, 12))
        yield arena
    finally:
        arena.close()


def whole(arena: Arena) -> bytes:
    return arena.segment.read(0, total_bytes(arena.header))


def test_whole_arena_is_made_of_exactly_these_bytes(tiny: Arena) -> None:
    assert os.fstat(tiny.segment.fd).st_size == 73728
    assert xxhash.xxh3_128_hexdigest(whole(tiny)) == ARENA_DIGEST


# A reader by a stranger


def stranger_reads_record(page: bytes, kind: bytes) -> tuple[int, bytes] | None:
    found = None
    for copy in (page[0:256], page[256:512]):
        sequence, checksum = struct.unpack_from("<Q", copy, 8)[0], struct.unpack_from("<Q", copy, 248)[0]
        sound = copy[0:8] == kind and checksum == xxhash.xxh3_64_intdigest(copy[0:248])
        if sound and (found is None or sequence > found[0]):
            found = (sequence, copy)
    return found


def stranger_reads_snapshots(data: bytes) -> dict[int, tuple[bytes, bytes, bytes]]:
    """Step -> (layout, values, payload) of every slot that section 8 of the page calls a snapshot."""
    magic, form, num_slots, local_index = struct.unpack_from("<8sIII", data, 0)
    assert (magic, form) == (b"KSARENA1", 2)
    assert struct.unpack_from("<Q", data, 1016)[0] == xxhash.xxh3_64_intdigest(data[0:1016])
    layout_room, values_room, table_room, payload_room, stride, first = struct.unpack_from("<6Q", data, 24)
    assert stride == 8192 + layout_room + values_room + table_room + payload_room
    assert len(data) == first + num_slots * stride
    snapshots = {}
    for slot in range(num_slots):
        at = first + slot * stride
        trainer = stranger_reads_record(data[at : at + 4096], b"KSTRAINR")
        keeper = stranger_reads_record(data[at + 4096 : at + 8192], b"KSKEEPER")
        if trainer is None or keeper is None:
            continue
        sequence, t = trainer
        k = keeper[1]
        state, index = struct.unpack_from("<I", t, 16)[0], struct.unpack_from("<I", t, 28)[0]
        sealed, num_chunks = struct.unpack_from("<II", k, 16)
        if (state, index, sealed) != (2, local_index, 1) or k[24:48] != t[40:64]:
            continue
        if struct.unpack_from("<Q", k, 48)[0] != sequence or k[56:72] != xxhash.xxh3_128_digest(t[16:120]):
            continue
        layout_bytes, values_bytes, payload_bytes, shared = struct.unpack_from("<4Q", t, 64)
        payload_at = at + 8192 + layout_room + values_room + table_room
        sizes = (layout_bytes, values_bytes, shared, payload_bytes - shared)
        starts = (at + 8192, at + 8192 + layout_room, payload_at, payload_at + shared)
        regions = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        chunks = [region[i : i + (4 << 20)] for region in regions for i in range(0, len(region), 4 << 20)]
        table_at = at + 8192 + layout_room + values_room
        table = data[table_at : table_at + 16 * num_chunks]
        whole_table = len(chunks) == num_chunks and k[72:88] == xxhash.xxh3_128_digest(table)
        if not whole_table or table != b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks):
            continue
        if t[96:112] == xxhash.xxh3_128_digest(regions[0]):
            snapshots[struct.unpack_from("<q", t, 56)[0]] = (regions[0], regions[1], regions[2] + regions[3])
    return snapshots


def test_reader_written_from_the_page_alone_finds_the_sealed_snapshot_and_no_other(tiny: Arena) -> None:
    payload = bytes((12 * 31 + i) % 256 for i in range(152))
    assert stranger_reads_snapshots(whole(tiny)) == {12: (tiny_layout().encode(), b"values of step 12", payload)}


def test_reader_written_from_the_page_alone_refuses_what_ours_refuses(tiny: Arena) -> None:
    offsets = [
        tiny.slot_offset(0) + 16, tiny.slot_offset(0) + 300, tiny.slot_offset(0) + 4096 + 300,
        tiny.layout_span(0).offset, tiny.values_span(0).offset + 3, tiny.table_span(0).offset + 40,
        tiny.payload_span(0).offset + 127, tiny.payload_span(0).offset + 151,
    ]  # fmt: skip
    accepted = []
    for offset in offsets:
        damaged = bytearray(whole(tiny))
        damaged[offset] ^= 4
        accepted.append(bool(stranger_reads_snapshots(bytes(damaged))))
    # Only the older copy of the trainer header does not matter.
    assert accepted == [True, False, False, False, False, False, False, False]


def test_take_counts_stand_behind_the_process_in_the_progress_record() -> None:
    counts = TakeCounts(asked=5, waited=2, waited_us=300, skipped=(1, 0, 0, 0, 0, 0, 2))
    body = Progress(LIFE, 999, takes=counts).body()
    assert body[40:128].hex() == (
        "0500000000000000" "0200000000000000" "2c01000000000000"
        "0100000000000000" + "00" * 40 + "0200000000000000" + "00" * 8
    )  # fmt: skip
    assert Progress.parse(body).takes == counts


def test_page_names_every_field_of_every_record() -> None:
    text = (Path(__file__).parents[2] / "docs" / "arena-format.md").read_text(encoding="utf-8")
    for record in (TRAINER, KEEPER, GRANT, LEDGER, PROGRESS):
        assert f"`{record.KIND.decode()}`" in text
        fields = set(vars(record)) - {"version", "incarnation", "base", "complete"}
        assert {name for name in fields if f"| {name} |" not in text} == set()
    ids = {"run_id", "node_id"}
    assert {name for name in set(vars(ARENA)) | ids if f"| {name} |" not in text} == set()
