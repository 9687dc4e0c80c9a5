"""Parity in memory: one sealed memfd per protected version, held by trainers and launcher like an arena.

    page 0      header (two copies, the older is overwritten)
    page 1      meta: the group, its manifests          msgpack, with its digest in the header
    then        table: xxh3_128 per parity chunk        payload: parity chunks, each on a multiple of 64

States: ENCODING while it is written, PLACED when every chunk is written and verified. A buffer that is
not PLACED is empty. Written by the keeper only; readers verify chunks against the table.
"""

from __future__ import annotations

import dataclasses
import struct
import uuid
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec
import xxhash

from keepstep.arena import records as h
from keepstep.arena.memfd import Memfd
from keepstep.arena.records import PAGE
from keepstep.errors import IntegrityError
from keepstep.layout import align
from keepstep.types import Incarnation, Version

MAGIC = b"KSPARITY"
ENCODING, PLACED = 1, 2
DIGEST_BYTES = 16
META = PAGE


@dataclass(frozen=True, kw_only=True)
class ParityHeader:
    """State and geometry of a parity buffer. Written by the keeper only."""

    KIND: ClassVar[bytes] = MAGIC
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("<IIIIQQqQQQQQQ16s16s16s")

    state: int
    n: int
    m: int
    position: int
    version: Version
    incarnation: Incarnation
    attempt: int
    meta_bytes: int
    table_bytes: int
    payload_bytes: int
    meta_digest: bytes
    table_digest: bytes
    buffer_id: bytes

    def body(self) -> bytes:
        version, own = self.version, self.incarnation
        return self._STRUCT.pack(
            self.state, self.n, self.m, self.position, version.incarnation.number, version.incarnation.nonce,
            version.step, own.number, own.nonce, self.attempt, self.meta_bytes, self.table_bytes, self.payload_bytes,
            self.meta_digest, self.table_digest, self.buffer_id,
        )  # fmt: skip

    @classmethod
    def parse(cls, body: bytes) -> Self:
        (state, n, m, position, vn, vx, step, number, nonce, attempt, b0, b1, b2, meta, table, name) = (
            cls._STRUCT.unpack_from(body)
        )
        return cls(
            state=state, n=n, m=m, position=position, version=Version(Incarnation(vn, vx), step),
            incarnation=Incarnation(number, nonce), attempt=attempt, meta_bytes=b0, table_bytes=b1, payload_bytes=b2,
            meta_digest=meta, table_digest=table, buffer_id=name,
        )  # fmt: skip


class ParityGroup(msgspec.Struct, frozen=True):
    """The members of a group, and their manifests, which a rebuild needs."""

    run_id: str
    node_id: str
    members: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    world_size: int
    manifests: tuple[bytes, ...]  # by position, encoded
    # (stripe, row of the code, sizes of its chunks) of the parity in the payload, in its order.
    rows: tuple[tuple[int, int, tuple[int, ...]], ...]


class ParityBuffer:
    """A parity buffer over a memfd, which it owns."""

    def __init__(self, segment: Memfd, header: ParityHeader | None, meta: ParityGroup | None) -> None:
        self.segment = segment
        self.header, self.meta = header, meta
        self.buffer_id = header.buffer_id.hex() if header is not None else uuid.uuid4().hex
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        if meta is not None and header is not None:
            self._index()

    @classmethod
    def create(cls, size_bytes: int) -> ParityBuffer:
        return cls(Memfd.create(size_bytes), None, None)

    @classmethod
    def adopt(cls, fd: int, *, run_id: str, node_id: str) -> ParityBuffer:
        """A received buffer, if it is PLACED and this node's. The caller closes a refused descriptor."""
        segment = Memfd.adopt(fd)
        newest = h.newest(ParityHeader, segment.read(0, 2 * h.RECORD_BYTES))
        if newest is None:
            raise IntegrityError("the parity buffer has no sound header")
        header = newest[1]
        if header.state != PLACED:
            raise IntegrityError("the parity is not complete")
        if META + header.meta_bytes > segment.size_bytes or header.meta_bytes > 1 << 31:
            raise IntegrityError("the parity header contradicts itself")
        raw = segment.read(META, header.meta_bytes)
        if xxhash.xxh3_128_digest(raw) != header.meta_digest:
            raise IntegrityError("the manifests beside the parity are damaged")
        try:
            meta = msgspec.msgpack.decode(raw, type=ParityGroup)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise IntegrityError(f"the manifests beside the parity cannot be read: {error}") from error
        if (meta.run_id, meta.node_id) != (run_id, node_id):
            raise IntegrityError(f"the parity belongs to run {meta.run_id!r} on node {meta.node_id!r}")
        buffer = cls(segment, header, meta)
        buffer._check_table()
        return buffer

    # Writing

    def begin(self, meta: ParityGroup, *, key: tuple[Version, Incarnation, int], n: int, m: int, position: int) -> None:
        """Discard the content and prepare for this version; call `place` when all chunks are written."""
        raw = msgspec.msgpack.encode(meta)
        version, incarnation, attempt = key
        chunks = sum(len(sizes) for _, _, sizes in meta.rows)
        self.header = ParityHeader(
            state=ENCODING, n=n, m=m, position=position, version=version, incarnation=incarnation, attempt=attempt,
            meta_bytes=len(raw), table_bytes=chunks * DIGEST_BYTES,
            payload_bytes=sum(align(size) for _, _, sizes in meta.rows for size in sizes),
            meta_digest=xxhash.xxh3_128_digest(raw), table_digest=bytes(16), buffer_id=bytes.fromhex(self.buffer_id),
        )  # fmt: skip
        self.meta = meta
        self._write_header()
        self.segment.write(META, raw)
        self._index()
        self._table = bytearray(self.header.table_bytes)

    def write_chunk(self, stripe: int, row: int, data: memoryview) -> None:
        number, offset, size = self._places[stripe, row]
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes for a parity chunk of {size}")
        self.segment.write(offset, data)
        self._table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(data)

    def place(self) -> None:
        """Mark the buffer as PLACED: all chunks are written."""
        assert self.header is not None
        table = bytes(self._table)
        self.segment.write(self._table_at, table)
        self.header = _replace(self.header, state=PLACED, table_digest=xxhash.xxh3_128_digest(table))
        self._write_header()

    def void(self) -> None:
        """Mark the content as void."""
        if self.header is not None:
            self.header = _replace(self.header, state=ENCODING)
            self._write_header()

    # Reading

    @property
    def placed(self) -> bool:
        return self.header is not None and self.header.state == PLACED

    def chunk(self, stripe: int, row: int) -> tuple[int, int, bytes]:
        """(offset, size, checksum) of a parity chunk."""
        if (stripe, row) not in self._places:
            raise IntegrityError(f"no parity of row {row} in stripe {stripe} is held here")
        number, offset, size = self._places[stripe, row]
        return offset, size, self.segment.read(self._table_at + number * DIGEST_BYTES, DIGEST_BYTES)

    def close(self) -> None:
        self.segment.close()

    @property
    def _table_at(self) -> int:
        assert self.header is not None
        return align(META + self.header.meta_bytes, PAGE)

    def _index(self) -> None:
        assert self.header is not None
        assert self.meta is not None
        offset = align(self._table_at + self.header.table_bytes, PAGE)
        number = 0
        self._places = {}
        for stripe, _, sizes in self.meta.rows:
            for row, size in enumerate(sizes):
                self._places[stripe, row] = (number, offset, size)
                offset += align(size)
                number += 1
        if offset > self.segment.size_bytes:
            raise IntegrityError("the parity buffer is smaller than what it claims to hold")

    def _check_table(self) -> None:
        assert self.header is not None
        table = self.segment.read(self._table_at, self.header.table_bytes)
        if xxhash.xxh3_128_digest(table) != self.header.table_digest:
            raise IntegrityError("the checksums of the parity are damaged")

    def _write_header(self) -> None:
        assert self.header is not None
        pair = self.segment.read(0, 2 * h.RECORD_BYTES)
        h.write_pair(self.header, pair, self.segment.write)


def size_needed(meta: ParityGroup) -> int:
    """Bytes of a buffer for this group."""
    meta_bytes = len(msgspec.msgpack.encode(meta))
    chunks = sum(len(sizes) for _, _, sizes in meta.rows)
    table = align(META + meta_bytes, PAGE)
    payload = align(table + chunks * DIGEST_BYTES, PAGE)
    return align(payload + sum(align(size) for _, _, sizes in meta.rows for size in sizes), PAGE)


def is_parity(fd: int) -> bool:
    """Whether a received memfd is a parity buffer; an arena has another magic."""
    segment = Memfd.adopt(fd)
    return any(segment.read(at, 8) == MAGIC for at in (0, h.RECORD_BYTES))


def _replace(header: ParityHeader, **changes: object) -> ParityHeader:
    return dataclasses.replace(header, **changes)  # type: ignore[arg-type]
