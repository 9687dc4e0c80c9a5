"""The records of an arena, byte for byte.

A record has one writer. It is kept twice, A and B; a write goes to the older copy, with the next
sequence number and its own checksum, so a torn or damaged copy reads as the other one.

    bytes 0-7      kind       eight ASCII letters
    bytes 8-15     sequence   little-endian, only grows
    bytes 16-247   body       one of the structs below, zero padded
    bytes 248-255  checksum   xxh3_64 of bytes 0-247

`docs/arena-format.md` is the table of offsets; `tests/golden` pins it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import ClassVar, Protocol, Self, TypeVar

import xxhash

from keepstep.errors import IntegrityError
from keepstep.layout import SnapshotSize
from keepstep.types import SKIP_KINDS, Incarnation, SnapshotInfo, TakeCounts, Version

PAGE = 4096
FORMAT = 2
RECORD_BYTES = 256
_PREFIX = struct.Struct("<8sQ")
_CHECK = struct.Struct("<Q")
BODY_BYTES = RECORD_BYTES - _PREFIX.size - _CHECK.size

WRITING, COMMITTED = 1, 2  # trainer header states
SEALED = 1  # keeper header state
INEXACT = 1  # trainer header flags
PRINTS = 2  # fingerprints of the tensors follow the values


class Record(Protocol):
    """A kind, and a body of at most `BODY_BYTES`."""

    KIND: ClassVar[bytes]

    def body(self) -> bytes: ...

    @classmethod
    def parse(cls, body: bytes) -> Self: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class TrainerHeader:
    """Owner, sizes and state of the snapshot in a slot. Written by the trainer only."""

    KIND: ClassVar[bytes] = b"KSTRAINR"
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<IIIIIIQQqQQQQ16sd")

    state: int
    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    flags: int
    version: Version
    layout_bytes: int
    values_bytes: int
    payload_bytes: int
    layout_digest: bytes
    written_at: float
    shared_offset: int = -1  # start of the replicated part in the payload; not given: it is empty, at payload_bytes

    def __post_init__(self) -> None:
        if self.shared_offset < 0:
            object.__setattr__(self, "shared_offset", self.payload_bytes)

    @property
    def info(self) -> SnapshotInfo:
        size_bytes = self.layout_bytes + self.values_bytes + self.payload_bytes
        return SnapshotInfo(self.version, self.rank, self.world_size, self.local_world_size, size_bytes)

    def body(self) -> bytes:
        incarnation = self.version.incarnation
        return self._STRUCT.pack(
            self.state, self.rank, self.world_size, self.local_index, self.local_world_size, self.flags,
            incarnation.number, incarnation.nonce, self.version.step,
            self.layout_bytes, self.values_bytes, self.payload_bytes, self.shared_offset, self.layout_digest,
            self.written_at,
        )  # fmt: skip

    @classmethod
    def parse(cls, body: bytes) -> Self:
        *owner, number, nonce, step, layout, values, payload, shared, digest, at = cls._STRUCT.unpack_from(body)
        version = Version(Incarnation(number, nonce), step)
        return cls(*[*owner, version, layout, values, payload, digest, at, shared])


@dataclass(frozen=True)
class KeeperHeader:
    """Seal of a slot: the digest of its checksum table and of the trainer header. Written by the keeper only."""

    KIND: ClassVar[bytes] = b"KSKEEPER"
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<IIQQqQ16s16sd")

    state: int
    num_chunks: int
    version: Version
    trainer_sequence: int
    trainer_digest: bytes
    table_digest: bytes
    sealed_at: float

    def body(self) -> bytes:
        incarnation = self.version.incarnation
        return self._STRUCT.pack(
            self.state, self.num_chunks, incarnation.number, incarnation.nonce, self.version.step,
            self.trainer_sequence, self.trainer_digest, self.table_digest, self.sealed_at,
        )  # fmt: skip

    @classmethod
    def parse(cls, body: bytes) -> Self:
        state, num_chunks, number, nonce, step, *seal = cls._STRUCT.unpack_from(body)
        return cls(state, num_chunks, Version(Incarnation(number, nonce), step), *seal)


@dataclass(frozen=True)
class Grant:
    """Permission to write the first `take` at or after `step` into a slot. Written by the keeper only."""

    KIND: ClassVar[bytes] = b"KSGRANT2"
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<QQqqqqqq")

    incarnation: Incarnation
    step: int
    serial: int  # counts grants from 1 on, so that a trainer uses each one once
    slot: int
    before: Grant | None = None  # the previous grant, while it may still be used or written under

    @property
    def both(self) -> tuple[Grant, ...]:
        """Both grants, oldest first."""
        return (self,) if self.before is None else (self.before, self)

    def after(self, serial: int) -> Grant | None:
        """The grant that a trainer that has used `serial` may use next: grants are used in order."""
        return next((grant for grant in self.both if grant.serial > serial), None)

    def body(self) -> bytes:
        before = self.before
        earlier = (0, 0, 0) if before is None else (before.step, before.serial, before.slot)
        number, nonce = self.incarnation.number, self.incarnation.nonce
        return self._STRUCT.pack(number, nonce, self.step, self.serial, self.slot, *earlier)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        number, nonce, step, serial, slot, *earlier = cls._STRUCT.unpack_from(body)
        incarnation = Incarnation(number, nonce)
        before = Grant(incarnation, *earlier) if earlier[1] else None
        return cls(incarnation, step, serial, slot, before)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What the next keeper must know when this one dies. Written by the keeper into every memfd of its node."""

    KIND: ClassVar[bytes] = b"KSLEDGE2"
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<QQB24s24s24s24s24sQQQQQQQ")

    incarnation: Incarnation
    base: Version | None  # the version this incarnation was restored from
    complete: Version | None  # the newest version ever sealed on all ranks
    serial: int
    current: Version | None = None  # the newest complete version that is kept
    protected: Version | None = None
    target: Version | None = None
    protected_by: tuple[int, int, int] = (0, 0, 0)  # incarnation number, nonce and attempt of the parity
    epoch: int = 0  # the coordinator whose orders were followed last,
    seq: int = 0  # the number of these orders,
    attempt: int = 0  # and the attempt of the target
    settled: int = 0  # serial of the last grant that is resolved

    def body(self) -> bytes:
        versions = (self.base, self.complete, self.current, self.protected, self.target)
        present = sum((version is not None) << bit for bit, version in enumerate(versions))
        return self._STRUCT.pack(
            self.incarnation.number, self.incarnation.nonce, present, *(_pack_version(v) for v in versions),
            *self.protected_by, self.epoch, self.seq, (self.attempt << 32) | (self.settled & 0xFFFFFFFF), self.serial,
        )  # fmt: skip

    @classmethod
    def parse(cls, body: bytes) -> Self:
        number, nonce, present, *packed, by_number, by_nonce, by_attempt, epoch, seq, both, serial = (
            cls._STRUCT.unpack_from(body)
        )
        base, complete, current, protected, target = (
            _unpack_version(data) if present >> bit & 1 else None for bit, data in enumerate(packed)
        )
        return cls(
            incarnation=Incarnation(number, nonce), base=base, complete=complete, serial=serial, current=current,
            protected=protected, target=target, protected_by=(by_number, by_nonce, by_attempt), epoch=epoch, seq=seq,
            attempt=both >> 32, settled=both & 0xFFFFFFFF,
        )  # fmt: skip


_VERSION = struct.Struct("<QQq")


def _pack_version(version: Version | None) -> bytes:
    if version is None:
        return bytes(_VERSION.size)
    return _VERSION.pack(version.incarnation.number, version.incarnation.nonce, version.step)


def _unpack_version(data: bytes) -> Version:
    number, nonce, step = _VERSION.unpack(data)
    return Version(Incarnation(number, nonce), step)


@dataclass(frozen=True)
class Progress:
    """Step of the trainer's last `take`, captured or not, and the trainer's process. Written by the trainer only."""

    KIND: ClassVar[bytes] = b"KSPROGRS"
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<QQqQQ3Q8Q")

    incarnation: Incarnation
    step: int
    pid: int = 0  # the process that a new keeper must fence; 0: no process writes into this arena any more
    started: int = 0  # the kernel's start time of that process, in clock ticks: the next process with its pid differs

    takes: TakeCounts = field(default_factory=TakeCounts)

    def body(self) -> bytes:
        number, nonce, takes = self.incarnation.number, self.incarnation.nonce, self.takes
        counts = (takes.asked, takes.waited, takes.waited_us, *takes.skipped, *(0,) * (8 - len(takes.skipped)))
        return self._STRUCT.pack(number, nonce, self.step, self.pid, self.started, *counts)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        number, nonce, step, pid, started, asked, waited, waited_us, *skipped = cls._STRUCT.unpack_from(body)
        takes = TakeCounts(asked, waited, waited_us, tuple(skipped[: len(SKIP_KINDS)]))
        return cls(Incarnation(number, nonce), step, pid, started, takes)


def encode_copy(record: Record, sequence: int) -> bytes:
    """One copy (A or B) of a record."""
    content = _PREFIX.pack(record.KIND, sequence) + record.body().ljust(BODY_BYTES, b"\0")
    return content + _CHECK.pack(xxhash.xxh3_64_intdigest(content))


def decode_copy(kind: type[R], data: bytes) -> tuple[int, R] | None:
    """(sequence, record) of a sound copy, None of a torn, damaged or empty one."""
    if len(data) != RECORD_BYTES:
        return None
    name, sequence = _PREFIX.unpack_from(data)
    (check,) = _CHECK.unpack_from(data, RECORD_BYTES - _CHECK.size)
    if name != kind.KIND or check != xxhash.xxh3_64_intdigest(data[: -_CHECK.size]):
        return None
    return sequence, kind.parse(data[_PREFIX.size :])


def _decode_pair(kind: type[R], pair: bytes) -> list[tuple[int, R] | None]:
    return [decode_copy(kind, half) for half in (pair[:RECORD_BYTES], pair[RECORD_BYTES : 2 * RECORD_BYTES])]


def newest(kind: type[R], pair: bytes) -> tuple[int, R] | None:
    """The newer sound copy of a pair: the current record, with its sequence."""
    copies = [copy for copy in _decode_pair(kind, pair) if copy is not None]
    return max(copies, key=lambda copy: copy[0], default=None)


def next_copy(kind: type[R], pair: bytes) -> tuple[int, int]:
    """(sequence, 0 or 1) of the copy to write next: the older one is overwritten."""
    sequences = [copy[0] if copy else -1 for copy in _decode_pair(kind, pair)]
    return max(*sequences, 0) + 1, 0 if sequences[0] <= sequences[1] else 1


def write_pair(record: Record, pair: bytes, write: Callable[[int, bytes], None]) -> int:
    """Write `record` over the older copy of `pair`; `write(offset_in_pair, data)`. Returns the new sequence."""
    sequence, older = next_copy(type(record), pair)
    write(older * RECORD_BYTES, encode_copy(record, sequence))
    return sequence


@dataclass(frozen=True)
class ArenaHeader:
    """Identity and geometry of an arena, in its first 1,024 bytes. Written once, before the memfd is passed on.

    Fields as in `_STRUCT`.
    """

    MAGIC: ClassVar[bytes] = b"KSARENA1"
    SIZE: ClassVar[int] = 1024
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<8sIIIIQQQQQQ16s16sHH200s200s")

    num_slots: int
    local_index: int
    generation: int  # counts the arenas of this rank: a larger arena replaces a smaller one
    layout_capacity: int
    values_capacity: int
    table_capacity: int
    payload_capacity: int
    slot_stride: int
    first_slot: int
    arena_id: bytes
    instance: bytes
    run_id: str
    node_id: str

    def encode(self) -> bytes:
        run, node = self.run_id.encode(), self.node_id.encode()
        assert max(len(run), len(node)) <= 200, "identify() bounds both"
        *fields, _, _ = astuple(self)
        content = self._STRUCT.pack(self.MAGIC, FORMAT, *fields, len(run), len(node), run, node)
        content = content.ljust(self.SIZE - _CHECK.size, b"\0")
        return content + _CHECK.pack(xxhash.xxh3_64_intdigest(content))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        if len(data) != cls.SIZE or data[:8] != cls.MAGIC:
            raise IntegrityError("not an arena: its first bytes are wrong")
        (check,) = _CHECK.unpack_from(data, cls.SIZE - _CHECK.size)
        if check != xxhash.xxh3_64_intdigest(data[: -_CHECK.size]):
            raise IntegrityError("the arena header does not match its checksum")
        _, form, *fields, run_len, node_len, run, node = cls._STRUCT.unpack_from(data)
        if form != FORMAT:
            raise IntegrityError(f"arena format {form} is not the one this keepstep reads ({FORMAT})")
        if run_len > 200 or node_len > 200:
            raise IntegrityError("the arena header contradicts itself")
        fields += [run[:run_len].decode(errors="replace"), node[:node_len].decode(errors="replace")]
        return cls(*fields)

    @property
    def capacity(self) -> SnapshotSize:
        """Room for one snapshot, in each slot."""
        return SnapshotSize(self.layout_capacity, self.values_capacity, self.payload_capacity)
