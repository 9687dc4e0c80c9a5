"""What this node gives its peers: chunks of sealed snapshots, parity, manifests. Read from many threads.

Readers never pin: a slot may be written again while a peer reads it. Every answer names the checksum that
its bytes had when they were sealed, and the asking side gives up on a mismatch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from keepstep.arena import manifest as manifests
from keepstep.arena.slots import Arena
from keepstep.errors import Error, IntegrityError
from keepstep.keeper.workers.sealed_snapshot import SealedSnapshot, open_sealed
from keepstep.parity.parity_buffer import META as META_AT
from keepstep.parity.parity_buffer import ParityBuffer
from keepstep.recovery.inventory import SetKey
from keepstep.recovery.plan import Rebuild
from keepstep.transport.interface import Body, Refusal
from keepstep.types import Version

MAX_BOOKS = 64
MANIFEST, DATA, PARITY, META = "manifest", "data", "parity", "meta"
STREAM, STOCK, CHECK, REBUILT = "stream", "stock", "check", "rebuilt"


class ChunkRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer asks for."""

    kind: str
    version: Version | None = None
    rank: int = -1
    chunk: int = -1
    """its number in the checksum table, or in the stream"""
    key: SetKey | None = None
    stripe: int = -1
    row: int = -1
    class_id: str = ""
    rebuild: Rebuild | None = None

    def encode(self) -> bytes:
        return _encoder.encode(self)


class HeldReplicas(msgspec.Struct, frozen=True, array_like=True):
    """What a slot holds of a replica class."""

    class_id: str
    chunks: list[tuple[int, int]]
    """(chunk of the stream, bytes as it is stored)"""
    parity: list[tuple[int, int]]
    """(stripe row, row of the code)"""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkRequest)


class ChunkStore:
    """Arenas and parity of this node by what they hold. Thread-safe."""

    def __init__(self, node_id: str, damaged: Callable[[str, int, Version, str], None]) -> None:
        """`damaged` is told of a slot that a peer found not to match its checksums."""
        self._node_id = node_id
        self._damaged = damaged
        self._lock = threading.Lock()
        self._arenas: dict[str, Arena] = {}
        self._parity: dict[str, ParityBuffer] = {}
        self._books: dict[tuple[Version, int], SealedSnapshot] = {}

    def put(self, arena: Arena) -> None:
        with self._lock:
            self._arenas[arena.arena_id] = arena

    def take_away(self, arena_id: str) -> None:
        with self._lock:
            self._arenas.pop(arena_id, None)
            self._books = {key: b for key, b in self._books.items() if b.arena.arena_id != arena_id}

    def put_parity(self, parity: ParityBuffer) -> None:
        with self._lock:
            self._parity[parity.buffer_id] = parity

    def take_parity_away(self, buffer_id: str) -> None:
        with self._lock:
            self._parity.pop(buffer_id, None)

    def serve(self, peer: str, request: bytes) -> Body:
        """Answer a peer. Raises Refusal with the reason."""
        try:
            wanted = _decoder.decode(request)
        except (msgspec.DecodeError, ValueError) as error:
            raise Refusal(f"not a request: {error}") from error
        try:
            if wanted.kind == REBUILT:
                return self.rebuilt(wanted)
            with self._lock:
                return self._serve(wanted)
        except (OSError, Error) as error:
            raise Refusal(str(error)) from error

    rebuilt: Callable[[ChunkRequest], Body] = staticmethod(lambda wanted: _cannot_rebuild())
    """set by the network: decodes a chunk that a peer has lost"""

    def meta(self, key: SetKey) -> bytes:
        """The group and its manifests, as they are kept beside the parity."""
        with self._lock:
            return self._meta(key)

    def _meta(self, key: SetKey) -> bytes:
        held = self._held(key)
        assert held.header is not None
        data = held.segment.read(META_AT, held.header.meta_bytes)
        if xxhash.xxh3_128_digest(data) != held.header.meta_digest:
            raise IntegrityError(f"the manifests beside the parity on {self._node_id} are damaged")
        return data

    def _serve(self, wanted: ChunkRequest) -> Body:
        if wanted.kind == META and wanted.key is not None:
            return Body.of_bytes(self._meta(wanted.key))
        if wanted.kind == PARITY and wanted.key is not None:
            held = self._held(wanted.key)
            offset, size, digest = held.chunk(wanted.stripe, wanted.row)
            return Body.of_file(held.segment.fd, offset, size, digest)
        if wanted.version is None:
            raise Refusal("of which version?")
        if wanted.kind == MANIFEST:
            return Body.of_bytes(manifests.encode(self.manifest(wanted.version)))
        if wanted.kind == DATA:
            return _body(self._book(wanted.version, wanted.rank), wanted.chunk)
        if wanted.kind == STREAM:
            return self._stream(wanted)
        if wanted.kind == STOCK:
            return Body.of_bytes(_encoder.encode(self._stock(wanted.version)))
        if wanted.kind == CHECK:
            book = self._book(wanted.version, wanted.rank)
            self._damaged(book.arena.arena_id, book.slot, wanted.version, "a peer received bytes that do not match")
            return Body.of_bytes(b"")
        raise Refusal(f"{wanted.kind!r} is not known here")

    def manifest(self, version: Version) -> manifests.NodeManifest:
        """Of all ranks of this node that hold the version. The caller holds the lock, or is alone."""
        found = {}
        for arena in self._arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == version and sealed.trainer.rank not in found:
                    found[sealed.trainer.rank] = manifests.of_slot(arena, slot)
        if not found:
            raise IntegrityError(f"{self._node_id} holds nothing of {version}")
        return manifests.NodeManifest(self._node_id, version, tuple(found[rank] for rank in sorted(found)))

    def own_manifest(self, version: Version) -> manifests.NodeManifest:
        with self._lock:
            return self.manifest(version)

    def book(self, version: Version, rank: int) -> SealedSnapshot:
        with self._lock:
            return self._book(version, rank)

    def _held(self, key: SetKey) -> ParityBuffer:
        for held in self._parity.values():
            header = held.header
            if header is None or not held.placed:
                continue
            if (header.version, header.incarnation, header.attempt) == (key.version, key.incarnation, key.attempt):
                return held
        raise Refusal(f"{self._node_id} holds no parity of {key.version}")

    def _book(self, version: Version, rank: int) -> SealedSnapshot:
        book = self._books.get((version, rank))
        if book is not None and book.is_current():
            return book
        for arena in self._arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == version and sealed.trainer.rank == rank:
                    book = open_sealed(arena, slot, sealed)  # of this version, whatever becomes of the slot meanwhile
                    if len(self._books) >= MAX_BOOKS:
                        self._books.pop(next(iter(self._books)))
                    self._books[version, rank] = book
                    return book
        raise Refusal(f"{self._node_id} holds no sealed snapshot of rank {rank} at {version}")

    def _stream(self, wanted: ChunkRequest) -> Body:
        assert wanted.version is not None
        # Books that are open already come first: to look at all slots takes ten times longer.
        opened = [book for (version, _), book in self._books.items() if version == wanted.version]
        current = (book for book in opened if book.is_current())
        for book in itertools.chain(current, self._books_of(wanted.version)):
            if wanted.chunk >= 0:
                number = book.find(wanted.class_id, wanted.chunk)
            else:
                number = book.find_parity(wanted.class_id, wanted.stripe, wanted.row)
            if number is not None:
                return _body(book, number)
        raise Refusal(f"{self._node_id} does not hold that of class {wanted.class_id[:8]} at {wanted.version}")

    def _stock(self, version: Version) -> list[HeldReplicas]:
        return [
            HeldReplicas(
                stream.class_id,
                [(one.chunk, one.size_bytes) for one in stream.stored() if one.chunk >= 0],
                [(one.row, one.code_row) for one in stream.stored() if one.chunk < 0],
            )
            for book in self._books_of(version)
            for stream in book.index.replica_sets
        ]

    def _books_of(self, version: Version) -> Iterator[SealedSnapshot]:
        """One for each rank, opened as they are asked for."""
        found = set[int]()
        for arena in self._arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == version and sealed.trainer.rank not in found:
                    found.add(sealed.trainer.rank)
                    yield self._book(version, sealed.trainer.rank)


def _body(snapshot: SealedSnapshot, number: int) -> Body:
    """A chunk, by its number in the table, read from the memfd when it is sent."""
    if not 0 <= number < len(snapshot.chunks):
        raise Refusal(f"chunk {number} of {len(snapshot.chunks)}")
    span = snapshot.chunks[number].span
    return Body.of_file(snapshot.arena.segment.fd, span.offset, span.size_bytes, snapshot.digest(number))


def _cannot_rebuild() -> Body:
    raise Refusal("this keeper has no network")
