"""Manifest of a sealed snapshot: its header, its small regions and its checksum table.

Every member of a group keeps the manifests of all others with the parity it encodes, because the
checksums of a lost node are lost with it, and rebuilt bytes that cannot be verified are worth nothing.
Regions up to 1 MiB (layout, values) are part of the manifest; all other bytes that only this rank has
are coded, chunk by chunk in the order of the checksum table. Bytes of replica sets are not coded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import msgspec
import xxhash

from keepstep import layout as layouts
from keepstep.arena.checksum import LAYOUT, SHARED, UNIQUE, VALUES, read_table
from keepstep.arena.records import BODY_BYTES, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena
from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, SnapshotSize, num_chunks
from keepstep.types import Version

INLINE_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 256 << 20


class RankManifest(msgspec.Struct, frozen=True, dict=True):
    """One rank's snapshot without its bulk."""

    header: bytes  # the body of the trainer header
    layout: bytes  # empty: it is coded
    values: bytes
    table: bytes

    @cached_property
    def trainer(self) -> TrainerHeader:
        return TrainerHeader.parse(self.header.ljust(BODY_BYTES, b"\0"))

    @property
    def rank(self) -> int:
        return self.trainer.rank

    @property
    def need(self) -> SnapshotSize:
        trainer = self.trainer
        return SnapshotSize(trainer.layout_bytes, trainer.values_bytes, trainer.payload_bytes)

    @cached_property
    def chunks(self) -> tuple[TableChunk, ...]:
        """All entries of the checksum table."""
        trainer = self.trainer
        sizes = {
            LAYOUT: trainer.layout_bytes, VALUES: trainer.values_bytes,
            UNIQUE: trainer.shared_offset, SHARED: trainer.payload_bytes - trainer.shared_offset,
        }  # fmt: skip
        # Before anything is allocated: received sizes may be anything.
        if min(sizes.values()) < 0 or sum(map(num_chunks, sizes.values())) * DIGEST_BYTES != len(self.table):
            raise IntegrityError(f"the manifest of rank {trainer.rank} has {len(self.table)} bytes of checksums")
        chunks: list[TableChunk] = []
        for region, size in sizes.items():
            for index, start in enumerate(range(0, size, CHUNK_BYTES)):
                at = len(chunks)
                digest = self.table[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                chunks.append(TableChunk(at, region, index, min(CHUNK_BYTES, size - start), digest))
        return tuple(chunks)

    @cached_property
    def coded(self) -> tuple[TableChunk, ...]:
        """The chunks that a group protects, in their order."""
        inline = {region for region, data in ((LAYOUT, self.layout), (VALUES, self.values)) if data}
        return tuple(c for c in self.chunks if c.region != SHARED and c.region not in inline)

    def check(self) -> None:
        """Raise IntegrityError when the parts contradict each other."""
        trainer = self.trainer
        if self.layout and (
            len(self.layout) != trainer.layout_bytes or layouts.digest(self.layout) != trainer.layout_digest
        ):
            raise IntegrityError(f"the layout in the manifest of rank {trainer.rank} does not match its digest")
        if self.values and len(self.values) != trainer.values_bytes:
            raise IntegrityError(f"the values in the manifest of rank {trainer.rank} are cut off")
        for region, data in ((LAYOUT, self.layout), (VALUES, self.values)):
            for chunk in self.chunks:
                if data and chunk.region == region:
                    part = data[chunk.index * CHUNK_BYTES :][: chunk.size_bytes]
                    if xxhash.xxh3_128_digest(part) != chunk.digest:
                        raise IntegrityError(f"the {region} in the manifest of rank {trainer.rank} are damaged")


@dataclass(frozen=True)
class TableChunk:
    """One entry of a checksum table."""

    at: int  # its number in the table
    region: str
    index: int
    size_bytes: int
    digest: bytes


class NodeManifest(msgspec.Struct, frozen=True, dict=True):
    """All snapshots of one version on one node."""

    node_id: str
    version: Version
    ranks: tuple[RankManifest, ...]

    @cached_property
    def coded(self) -> tuple[tuple[int, TableChunk], ...]:
        """(rank, chunk): the chunks of this node that the group protects, in the order of the placement."""
        return tuple((rank.rank, chunk) for rank in self.ranks for chunk in rank.coded)


def of_slot(arena: Arena, slot: int) -> RankManifest:
    """The manifest of a sealed slot. Raises IntegrityError when it is not sealed, or damaged."""
    sealed = arena.sealed(slot)
    if sealed is None:
        raise IntegrityError(f"slot {slot} is not sealed any more")
    layout, values, _ = arena.used_spans(slot, sealed.trainer)
    parts = [
        arena.segment.read(span.offset, span.size_bytes) if span.size_bytes <= INLINE_BYTES else b""
        for span in (layout, values)
    ]
    manifest = RankManifest(sealed.trainer.body(), parts[0], parts[1], read_table(arena, slot))
    manifest.check()
    return manifest


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[NodeManifest] = msgspec.msgpack.Decoder(NodeManifest)


def encode(manifest: NodeManifest) -> bytes:
    return _encoder.encode(manifest)


def decode(data: bytes, version: Version) -> NodeManifest:
    """Raises IntegrityError when it is not a manifest of that version, or contradicts itself."""
    try:
        manifest = _decoder.decode(data)
        for rank in manifest.ranks:
            rank.check()
    except (msgspec.DecodeError, ValueError, OSError, struct.error, RecursionError) as error:
        raise IntegrityError(f"a manifest cannot be read: {error}") from error
    if any(other != version for other in (manifest.version, *(rank.trainer.version for rank in manifest.ranks))):
        raise IntegrityError(f"a manifest is not of {version}, or mixes versions")
    if not manifest.ranks or len({rank.rank for rank in manifest.ranks}) < len(manifest.ranks):
        raise IntegrityError("a manifest names no rank, or a rank twice")
    return manifest
