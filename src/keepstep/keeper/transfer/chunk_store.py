"""What this node holds for its peers: chunks of sealed snapshots, parity, manifests. Read from many threads.

Readers lock no slot: it may be written again while a peer reads it. Every answer names the checksum that its bytes had
when they were sealed, and the asking side stops at a mismatch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import msgspec
import xxhash

from keepstep.arena.slots import Arena
from keepstep.errors import Error, IntegrityError
from keepstep.keeper.workers import manifest as manifests
from keepstep.keeper.workers.sealed_snapshot import SealedSnapshot, open_sealed
from keepstep.parity.parity_buffer import META as META_AT
from keepstep.parity.parity_buffer import ParityBuffer
from keepstep.recovery.inventory import SetKey
from keepstep.recovery.plan import Rebuild
from keepstep.transport.interface import Body, Refusal
from keepstep.types import Version

MAX_OPEN_SNAPSHOTS = 64
MANIFEST, DATA, PARITY, META = "manifest", "data", "parity", "meta"
STREAM, STOCK, CHECK, REBUILT = "stream", "stock", "check", "rebuilt"


class ChunkRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer asks for: `kind` says which of the other fields count."""

    kind: str
    version: Version | None = None
    rank: int = -1
    chunk: int = -1  # its number in the checksum table, or in the replica set
    key: SetKey | None = None
    stripe: int = -1
    row: int = -1
    class_id: str = ""
    rebuild: Rebuild | None = None

    def encode(self) -> bytes:
        return _encoder.encode(self)


class HeldReplicas(msgspec.Struct, frozen=True, array_like=True):
    """What a slot holds of a replica set."""

    class_id: str
    chunks: list[tuple[int, int]]  # (chunk of the set, bytes as it is stored)
    parity: list[tuple[int, int]]  # (stripe row, row of the code)


_encoder = msgspec.msgpack.Encoder()


class ChunkStore:
    """Arenas and parity of this node by what they hold. For any thread."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._lock = threading.Lock()
        self._arenas: dict[str, Arena] = {}
        self._parity: dict[str, ParityBuffer] = {}
        self._open: dict[tuple[Version, int], SealedSnapshot] = {}

    def add(self, arena: Arena) -> None:
        with self._lock:
            self._arenas[arena.arena_id] = arena

    def remove(self, arena_id: str) -> None:
        with self._lock:
            self._arenas.pop(arena_id, None)
            self._open = {key: one for key, one in self._open.items() if one.arena.arena_id != arena_id}

    def add_parity(self, parity: ParityBuffer) -> None:
        with self._lock:
            self._parity[parity.buffer_id] = parity

    def remove_parity(self, buffer_id: str) -> None:
        with self._lock:
            self._parity.pop(buffer_id, None)

    def read(self, request: ChunkRequest) -> Body:
        """The bytes that a request names. Raises Refusal with the reason."""
        try:
            with self._lock:
                return self._read(request)
        except (OSError, Error) as error:
            raise Refusal(str(error)) from error

    def meta(self, key: SetKey) -> bytes:
        """The group and its manifests, as they are stored beside the parity."""
        with self._lock:
            return self._meta(key)

    def manifest(self, version: Version) -> manifests.NodeManifest:
        """The manifest of all ranks of this node that hold the version."""
        with self._lock:
            return self._manifest(version)

    def snapshot(self, version: Version, rank: int) -> SealedSnapshot:
        """The sealed snapshot of a rank. Raises Refusal when this node does not hold it."""
        with self._lock:
            return self._snapshot(version, rank)

    def _read(self, request: ChunkRequest) -> Body:
        if request.kind == META and request.key is not None:
            return Body.of_bytes(self._meta(request.key))
        if request.kind == PARITY and request.key is not None:
            parity = self._find_parity(request.key)
            offset, size, digest = parity.chunk(request.stripe, request.row)
            return Body.of_file(parity.segment.fd, offset, size, digest)
        if request.version is None:
            raise Refusal("request has no version")
        if request.kind == MANIFEST:
            return Body.of_bytes(manifests.encode(self._manifest(request.version)))
        if request.kind == DATA:
            return _body(self._snapshot(request.version, request.rank), request.chunk)
        if request.kind == STREAM:
            return self._replica_chunk(request, request.version)
        if request.kind == STOCK:
            return Body.of_bytes(_encoder.encode(self._held_replicas(request.version)))
        raise Refusal(f"unknown request {request.kind!r}")

    def _meta(self, key: SetKey) -> bytes:
        parity = self._find_parity(key)
        assert parity.header is not None
        data = parity.segment.read(META_AT, parity.header.meta_bytes)
        if xxhash.xxh3_128_digest(data) != parity.header.meta_digest:
            raise IntegrityError(f"the manifests beside the parity on {self.node_id} are damaged")
        return data

    def _manifest(self, version: Version) -> manifests.NodeManifest:
        ranks = {}
        for arena, slot, rank in self._slots_of(version):
            if rank not in ranks:
                ranks[rank] = manifests.of_slot(arena, slot)
        if not ranks:
            raise IntegrityError(f"{self.node_id} holds nothing of {version}")
        return manifests.NodeManifest(self.node_id, version, tuple(ranks[rank] for rank in sorted(ranks)))

    def _find_parity(self, key: SetKey) -> ParityBuffer:
        for parity in self._parity.values():
            header = parity.header
            if header is None or not parity.placed:
                continue
            if (header.version, header.incarnation, header.attempt) == (key.version, key.incarnation, key.attempt):
                return parity
        raise Refusal(f"{self.node_id} holds no parity of {key.version}")

    def _snapshot(self, version: Version, rank: int) -> SealedSnapshot:
        snapshot = self._open.get((version, rank))
        if snapshot is not None and snapshot.is_current():
            return snapshot
        for arena in self._arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == version and sealed.trainer.rank == rank:
                    # Opened as it was sealed for this version, though the slot may be written again meanwhile.
                    snapshot = open_sealed(arena, slot, sealed)
                    if len(self._open) >= MAX_OPEN_SNAPSHOTS:
                        self._open.pop(next(iter(self._open)))
                    self._open[version, rank] = snapshot
                    return snapshot
        raise Refusal(f"{self.node_id} holds no sealed snapshot of rank {rank} at {version}")

    def _replica_chunk(self, request: ChunkRequest, version: Version) -> Body:
        # Snapshots that are open already come first: to read the headers of all slots takes ten times longer.
        opened = [snapshot for (of_version, _), snapshot in self._open.items() if of_version == version]
        current = (snapshot for snapshot in opened if snapshot.is_current())
        for snapshot in itertools.chain(current, self._snapshots_of(version)):
            if request.chunk >= 0:
                number = snapshot.find(request.class_id, request.chunk)
            else:
                number = snapshot.find_parity(request.class_id, request.stripe, request.row)
            if number is not None:
                return _body(snapshot, number)
        raise Refusal(f"{self.node_id} does not hold that chunk of replica set {request.class_id[:8]} at {version}")

    def _held_replicas(self, version: Version) -> list[HeldReplicas]:
        return [
            HeldReplicas(
                replica_set.class_id,
                [(stored.chunk, stored.size_bytes) for stored in replica_set.stored() if stored.chunk >= 0],
                [(stored.row, stored.code_row) for stored in replica_set.stored() if stored.chunk < 0],
            )
            for snapshot in self._snapshots_of(version)
            for replica_set in snapshot.index.replica_sets
        ]

    def _snapshots_of(self, version: Version) -> Iterator[SealedSnapshot]:
        """One for each rank, opened when the iterator reaches it."""
        ranks = set[int]()
        for _, _, rank in self._slots_of(version):
            if rank not in ranks:
                ranks.add(rank)
                yield self._snapshot(version, rank)

    def _slots_of(self, version: Version) -> Iterator[tuple[Arena, int, int]]:
        """Slots sealed for the version: arena, slot, rank."""
        for arena in self._arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == version:
                    yield arena, slot, sealed.trainer.rank


def _body(snapshot: SealedSnapshot, number: int) -> Body:
    """A chunk, by its number in the table, read from the memfd when it is sent."""
    if not 0 <= number < len(snapshot.chunks):
        raise Refusal(f"chunk {number} of {len(snapshot.chunks)}")
    span = snapshot.chunks[number].span
    return Body.of_file(snapshot.arena.segment.fd, span.offset, span.size_bytes, snapshot.digest(number))
