"""An arena over a memfd: its pages, its slots, and who may write what.

Invariants, each with a test in tests/unit/test_arena.py:

1. A reader gets a sealed snapshot or nothing: `sealed()` requires a COMMITTED trainer header, and a SEALED
   keeper header that names the sequence and digest of the first.
2. Each record has one writer: trainer headers and progress the trainer, all others the keeper.
3. Sequence numbers only grow; a torn record reads as the one before.
4. A slot of another run, node, rank or layout is never accepted.
5. Nothing here locks: ownership is the state in the headers and the grant, a dead owner blocks nobody.

    page 0      arena header            page 2   ledger A/B     (keeper)
    page 1      grant A/B  (keeper)     page 3   progress A/B   (trainer)
    then per slot: trainer header page, keeper header page, layout, values, checksum table, payload

The content of a payload, and the bytes that each checksum covers, are described in chunks.py.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from keepstep.arena import records as h
from keepstep.arena.memfd import Memfd
from keepstep.arena.records import PAGE, ArenaHeader, Grant, KeeperHeader, Ledger, Progress, TrainerHeader
from keepstep.config import ArenaConfig
from keepstep.errors import IntegrityError, KeeperError
from keepstep.layout import ALIGN, SnapshotSize, align, num_chunks
from keepstep.layout import CHUNK_BYTES as CHUNK_BYTES
from keepstep.types import Version

DIGEST_BYTES = 16
GRANT_PAGE, LEDGER_PAGE, PROGRESS_PAGE, FIRST_SLOT = PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE
AUTO = 0  # requested number of slots: the keeper chooses
FEW_SLOTS, MAX_SLOTS = 2, 4  # one complete version and one that is written, at least

R = TypeVar("R", bound=h.Record)


@dataclass(frozen=True)
class SlotSpan:
    """A range of bytes in the arena, by absolute offset."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class SealedSlot:
    """A slot with matching headers; a reader may trust its bytes once they are verified."""

    slot: int
    trainer: TrainerHeader
    keeper: KeeperHeader

    @property
    def version(self) -> Version:
        return self.trainer.version


def requested_slots(config: ArenaConfig) -> int:
    """Slots that a rank asks for: `arena.slots`, or AUTO."""
    return AUTO if config.slots == "auto" else config.slots


def may_request(slots: int) -> bool:
    return slots == AUTO or FEW_SLOTS <= slots <= MAX_SLOTS


def _most_chunks(layout_bytes: int, values_bytes: int, payload_bytes: int) -> int:
    """Chunks of full regions; the payload has two parts that are cut separately, which is one chunk more."""
    return num_chunks(layout_bytes) + num_chunks(values_bytes) + num_chunks(payload_bytes) + 1


def plan_header(
    need: SnapshotSize, *, slots: int, local_index: int, run_id: str, node_id: str, instance: bytes, generation: int = 1
) -> ArenaHeader:
    """Geometry of an arena with room for `need` in each of `slots`."""
    layout, values = align(max(need.layout_bytes, 1), PAGE), align(max(need.values_bytes, 1), PAGE)
    payload = align(max(need.payload_bytes, 1), PAGE)
    table = align(_most_chunks(layout, values, payload) * DIGEST_BYTES, PAGE)
    stride = 2 * PAGE + layout + values + table + payload
    return ArenaHeader(
        num_slots=slots, local_index=local_index, generation=generation, layout_capacity=layout, values_capacity=values,
        table_capacity=table, payload_capacity=payload, slot_stride=stride, first_slot=FIRST_SLOT,
        arena_id=uuid.uuid4().bytes, instance=instance, run_id=run_id, node_id=node_id,
    )  # fmt: skip


def total_bytes(header: ArenaHeader) -> int:
    return header.first_slot + header.num_slots * header.slot_stride


class Arena:
    """Typed access to a memfd. Owns the memfd."""

    def __init__(self, segment: Memfd, header: ArenaHeader) -> None:
        self.segment = segment
        self.header = header
        self.arena_id = header.arena_id.hex()
        # Sequence and half of the next copy of the trainer's records, by offset, once it has written them.
        self._next_copy: dict[int, tuple[int, int]] = {}

    @classmethod
    def create(cls, header: ArenaHeader, *, reserve: bool = True) -> Arena:
        problem = _header_problem(header, total_bytes(header))
        if problem:
            raise KeeperError(f"an arena like this cannot be made: {problem}")
        segment = Memfd.create(total_bytes(header), reserve=reserve)
        try:
            segment.write(0, header.encode())
        except BaseException:
            segment.close()
            raise
        return cls(segment, header)

    @classmethod
    def adopt(cls, fd: int, *, run_id: str, node_id: str) -> Arena:
        """An arena from a received descriptor; refuses one that is damaged or belongs to another run.

        The caller closes a refused descriptor.
        """
        segment = Memfd.adopt(fd)
        header = ArenaHeader.decode(segment.read(0, ArenaHeader.SIZE))
        problem = _header_problem(header, segment.size_bytes)
        if problem:
            raise IntegrityError(f"the arena header contradicts itself: {problem}")
        if (header.run_id, header.node_id) != (run_id, node_id):
            owner = f"run {header.run_id!r} on node {header.node_id!r}"
            raise IntegrityError(f"the arena belongs to {owner}, not to {run_id!r} on {node_id!r}")
        return cls(segment, header)

    @property
    def num_slots(self) -> int:
        return self.header.num_slots

    def fits(self, need: SnapshotSize) -> bool:
        return need.fits(self.header.capacity)

    # Geometry

    def slot_offset(self, slot: int) -> int:
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"
        return self.header.first_slot + slot * self.header.slot_stride

    def layout_span(self, slot: int) -> SlotSpan:
        return SlotSpan(self.slot_offset(slot) + 2 * PAGE, self.header.layout_capacity)

    def values_span(self, slot: int) -> SlotSpan:
        return SlotSpan(self.layout_span(slot).end, self.header.values_capacity)

    def table_span(self, slot: int) -> SlotSpan:
        return SlotSpan(self.values_span(slot).end, self.header.table_capacity)

    def payload_span(self, slot: int) -> SlotSpan:
        return SlotSpan(self.table_span(slot).end, self.header.payload_capacity)

    def used_spans(self, slot: int, trainer: TrainerHeader) -> list[SlotSpan]:
        """The used bytes of a snapshot: layout, values, payload."""
        sizes = (trainer.layout_bytes, trainer.values_bytes, trainer.payload_bytes)
        spans = (self.layout_span(slot), self.values_span(slot), self.payload_span(slot))
        for size, span in zip(sizes, spans, strict=True):
            if size > span.size_bytes:
                raise IntegrityError(f"slot {slot} claims {size} bytes where {span.size_bytes} fit")
        shared, end = trainer.shared_offset, trainer.payload_bytes
        if shared > end or (shared < end and shared % ALIGN):
            raise IntegrityError(f"slot {slot} claims a shared part from {shared} on in a payload of {end} bytes")
        return [SlotSpan(span.offset, size) for size, span in zip(sizes, spans, strict=True)]

    # Records

    def _read(self, kind: type[R], offset: int) -> tuple[int, R] | None:
        return h.newest(kind, self.segment.read(offset, 2 * h.RECORD_BYTES))

    def _record(self, kind: type[R], offset: int) -> R | None:
        return newest[1] if (newest := self._read(kind, offset)) else None

    def _write(self, record: h.Record, offset: int) -> int:
        pair = self.segment.read(offset, 2 * h.RECORD_BYTES)
        return h.write_pair(record, pair, lambda at, data: self.segment.write(offset + at, data))

    def _write_alone(self, record: h.Record, offset: int) -> int:
        """Write a record whose only writer is this process: the previous copies are read once, not in every `take`."""
        cached = self._next_copy.get(offset)
        sequence, half = cached or h.next_copy(type(record), self.segment.read(offset, 2 * h.RECORD_BYTES))
        self.segment.write(offset + half * h.RECORD_BYTES, h.encode_copy(record, sequence))
        self._next_copy[offset] = (sequence + 1, 1 - half)
        return sequence

    def grant(self) -> Grant | None:
        return self._record(Grant, GRANT_PAGE)

    def write_grant(self, grant: Grant) -> None:
        self._write(grant, GRANT_PAGE)

    def ledger(self) -> Ledger | None:
        return self._record(Ledger, LEDGER_PAGE)

    def write_ledger(self, ledger: Ledger) -> None:
        self._write(ledger, LEDGER_PAGE)

    def progress(self) -> Progress | None:
        return self._record(Progress, PROGRESS_PAGE)

    def write_progress(self, progress: Progress) -> None:
        self._write_alone(progress, PROGRESS_PAGE)

    def trainer_header(self, slot: int) -> tuple[int, TrainerHeader] | None:
        return self._read(TrainerHeader, self.slot_offset(slot))

    def write_trainer_header(self, slot: int, header: TrainerHeader) -> int:
        """Returns the sequence of this record."""
        return self._write_alone(header, self.slot_offset(slot))

    def keeper_header(self, slot: int) -> KeeperHeader | None:
        return self._record(KeeperHeader, self.slot_offset(slot) + PAGE)

    def write_keeper_header(self, slot: int, header: KeeperHeader) -> None:
        self._write(header, self.slot_offset(slot) + PAGE)

    def committed(self, slot: int) -> tuple[int, TrainerHeader] | None:
        """The trainer header of a slot whose writer finished, with its sequence."""
        header = self.trainer_header(slot)
        if header is None or header[1].state != h.COMMITTED or header[1].local_index != self.header.local_index:
            return None
        return header

    def sealed(self, slot: int) -> SealedSlot | None:
        """The slot if it is sealed for exactly what its trainer committed; its bytes are not read here."""
        committed, keeper = self.committed(slot), self.keeper_header(slot)
        if committed is None or keeper is None or keeper.state != h.SEALED:
            return None
        sequence, trainer = committed
        same_record = keeper.trainer_sequence == sequence and keeper.trainer_digest == trainer_digest(trainer)
        return SealedSlot(slot, trainer, keeper) if same_record and keeper.version == trainer.version else None

    def close(self) -> None:
        self.segment.close()


def trainer_digest(trainer: TrainerHeader) -> bytes:
    return xxhash.xxh3_128_digest(trainer.body())


def _header_problem(header: ArenaHeader, size_bytes: int) -> str:
    if not 1 <= header.num_slots <= MAX_SLOTS:
        return f"{header.num_slots} slots"
    capacities = (header.layout_capacity, header.values_capacity, header.table_capacity, header.payload_capacity)
    if header.first_slot != FIRST_SLOT or any(c % PAGE or c == 0 for c in capacities):
        return "empty or unaligned regions"
    chunks = _most_chunks(header.layout_capacity, header.values_capacity, header.payload_capacity)
    if header.table_capacity < chunks * DIGEST_BYTES:
        return "a checksum table that is too small"
    if header.slot_stride != 2 * PAGE + sum(capacities):
        return "regions do not add up to the slot"
    if total_bytes(header) != size_bytes:
        return f"{total_bytes(header)} bytes described, {size_bytes} present"
    return ""
