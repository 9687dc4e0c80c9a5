"""Fetch a rank's snapshot to this node: from a peer's slots, or rebuilt from what its group has left.

Every chunk is checked against the checksums in the manifest before it is written; at the end the slot holds what the
lost rank had sealed, byte for byte. State that other nodes hold too is fetched from each of them in turn, so that each
sends its part once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import msgspec
import xxhash

from keepstep import layout as layouts
from keepstep.arena import checksum
from keepstep.arena import records as h
from keepstep.arena.checksum import LAYOUT, SHARED, VALUES, Chunk, chunk_spans
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import Arena
from keepstep.errors import Error, IntegrityError
from keepstep.keeper.coordinator.messages import Failure
from keepstep.keeper.node.effects import FetchSnapshot
from keepstep.keeper.node.events import SnapshotFetched
from keepstep.keeper.transfer.chunk_store import DATA, MANIFEST, META, ChunkRequest
from keepstep.keeper.transfer.fetch_replicas import ReplicaIndex
from keepstep.keeper.transfer.rebuild import GroupStripes, LostChunk
from keepstep.keeper.transfer.stripe_reads import (
    ASKING,
    RECOVERING,
    ChunkClient,
    ChunkSource,
    FetchSettings,
    SourceFailedError,
    StoppedError,
    StripeRead,
    StripeReader,
    fetch_bytes,
)
from keepstep.keeper.workers import manifest as manifests
from keepstep.keeper.workers.allocation import ArenaAllocator, describe
from keepstep.keeper.workers.manifest import MAX_MANIFEST_BYTES, NodeManifest, RankManifest, TableChunk
from keepstep.keeper.workers.results import Result, Results, TransferThread
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.parity_buffer import ParityGroup
from keepstep.recovery.plan import RankSource
from keepstep.transport.interface import FetchError
from keepstep.types import SnapshotInfo

log = logging.getLogger("keepstep.keeper")

JOIN_S = 60.0  # for a stopped fetch that may still write into the same slot
RESERVE_S = 600.0


@dataclasses.dataclass(frozen=True)
class FetchEnded(Result):
    """The end of a SnapshotFetch, with the arena if a new one was created."""

    fetch: SnapshotFetch
    event: SnapshotFetched
    arena: Arena | None

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()


class SnapshotFetch(TransferThread):
    """Fetches one rank's snapshot and hands a FetchEnded to the loop."""

    def __init__(
        self,
        effect: FetchSnapshot,
        client: ChunkClient,
        *,
        target: Arena | None,
        allocator: ArenaAllocator,
        after: Sequence[SnapshotFetch],
        settings: FetchSettings,
        results: Results,
    ) -> None:
        """`target`: written to if the snapshot fits. `after`: stopped, and may still write there for a moment."""
        super().__init__(f"fetch-{effect.piece.rank}")
        self._effect, self._client = effect, client
        self._arena, self._allocator, self._after = target, allocator, after
        self._settings, self._results = settings, results
        self.start()

    def run(self) -> None:
        effect, piece = self._effect, self._effect.piece
        created: Arena | None = None
        reserved: Future[None] | None = None
        try:
            for fetch in self._after:
                fetch.join(JOIN_S)
            group, manifest = self._manifest(piece)
            arena, slot = self._arena, effect.slot
            if arena is None or not arena.fits(manifest.need):
                created, reserved = self._allocator.create_for_fetch(effect, manifest)
                arena, slot = created, 0
            info = self._fill(arena, slot, group, manifest)
            if reserved is not None:
                reserved.result(RESERVE_S)
            added = msgspec.structs.replace(describe(arena), ledger=None) if created is not None else None
            event = SnapshotFetched(effect.plan, piece.rank, arena.arena_id, slot, info, added=added)
            self._results.put(FetchEnded(self, event, created))
            return
        except Exception as error:
            failures = self._failures(error)
        if created is not None:
            if reserved is not None:
                reserved.cancel()
            created.close()
        self._results.put(FetchEnded(self, SnapshotFetched(effect.plan, piece.rank, "", 0, None, failures), None))

    def _failures(self, error: Exception) -> tuple[Failure, ...]:
        """What the next plan must do without."""
        plan, piece = self._effect.plan, self._effect.piece
        if isinstance(error, StoppedError):
            return ()
        if isinstance(error, SourceFailedError):
            # Only bytes that do not match count against a source; one that cannot be reached is left out for now.
            rank, failed = error.source.rank, error.error
            text = f"rank {rank} from {failed.node_id}: {failed.reason}"
            return (Failure(plan, failed.node_id, rank, piece.version, not failed.lost, text),)
        if not isinstance(error, (Error, OSError, MemoryError)):
            log.error("fetching a snapshot failed", exc_info=error)
        text = str(error) or repr(error)
        return (Failure(plan, self._client.node_id, piece.rank, piece.version, False, text),)

    # Its manifest

    def _manifest(self, piece: RankSource) -> tuple[list[NodeManifest], RankManifest]:
        """The manifests of its group (of its node alone, when it is simply fetched), and its own."""
        if piece.rebuild is None:
            source = ChunkSource(
                piece.node_id, ChunkRequest(MANIFEST, piece.version).encode(), MAX_MANIFEST_BYTES, None, 0, piece.rank
            )
            with _blame(source):
                node = manifests.decode(self._bytes(source), piece.version)
                return [node], _of_rank(node, piece.rank)
        rebuild = piece.rebuild
        last: SourceFailedError | None = None
        for node_id in rebuild.parity:
            if node_id:
                source = ChunkSource(node_id, ChunkRequest(META, key=rebuild.key).encode(), MAX_MANIFEST_BYTES, None)
                try:
                    with _blame(source):
                        meta = msgspec.msgpack.decode(self._bytes(source), type=ParityGroup)
                        group = [manifests.decode(encoded, piece.version) for encoded in meta.manifests]
                        return group, _of_rank(group[rebuild.position], piece.rank)
                except SourceFailedError as failed:
                    last = failed
        assert last is not None, "a plan names at least one node with parity"
        raise last

    def _bytes(self, source: ChunkSource) -> bytes:
        timeout_s = self._settings.timeout_s
        return fetch_bytes(self._client, RECOVERING, source, timeout_s=timeout_s, stopped=self.stopped)

    # Its bytes

    def _fill(self, arena: Arena, slot: int, group: list[NodeManifest], manifest: RankManifest) -> SnapshotInfo:
        effect, piece = self._effect, self._effect.piece
        trainer = dataclasses.replace(
            manifest.trainer, local_index=effect.local_index, local_world_size=effect.local_world_size
        )
        chunks = chunk_spans(arena, slot, trainer)
        # No reader may accept what the slot held before while it is overwritten.
        arena.write_trainer_header(slot, dataclasses.replace(trainer, state=h.WRITING))
        for region, data in ((LAYOUT, manifest.layout), (VALUES, manifest.values)):
            for chunk in chunks:
                if data and chunk.region == region:
                    arena.segment.write(chunk.span.offset, data[chunk.index * CHUNK_BYTES :][: chunk.span.size_bytes])
        reader = StripeReader(self._client, RECOVERING, self._settings, self.stopped)
        writer = _ChunkWriter(arena, slot, chunks)
        if piece.rebuild is None:
            with contextlib.closing(reader.run(_reads(piece, manifest.coded))) as finished:
                for read in finished:
                    writer.write_fetched(read)
        else:
            self._rebuild(reader, GroupStripes(piece.rebuild, group), manifest, writer)
        self._fetch_shared(reader, manifest, writer)
        if self.stopped.is_set():
            raise StoppedError
        return _seal(arena, slot, trainer, manifest)

    def _rebuild(
        self, reader: StripeReader, stripes: GroupStripes, manifest: RankManifest, writer: _ChunkWriter
    ) -> None:
        """Let the group decode; what this node would help with, or a helper cannot do, is decoded here."""
        numbers = [stripes.number_of(manifest.rank, chunk) for chunk in manifest.coded]
        done: set[int] = set()

        try:
            reader.policy = ASKING
            of_others = (number for number in numbers if stripes.helper(number) != self._client.node_id)
            with contextlib.closing(reader.run(stripes.ask_helper(number) for number in of_others)) as finished:
                for read in finished:
                    writer.write_fetched(read)
                    done.add(read.purpose.at)
        except SourceFailedError as failed:
            log.info("a helper failed, rebuilding here", extra={"reason": str(failed)})
        finally:
            reader.policy = RECOVERING
        left = (n for n, chunk in zip(numbers, manifest.coded, strict=True) if chunk.at not in done)
        self._decode(reader, stripes, (stripes.lost(number) for number in left), writer)

    def _decode(
        self, reader: StripeReader, stripes: GroupStripes, lost_chunks: Iterator[LostChunk], writer: _ChunkWriter
    ) -> None:
        out = memoryview(bytearray(CHUNK_BYTES))
        again: list[LostChunk] = []
        # The second turn begins when the first has ended, and reads what that has put into `again`.
        for chunks in (lost_chunks, again):
            with contextlib.closing(reader.run(StripeRead(list(lost.sources), lost) for lost in chunks)) as finished:
                for read in finished:
                    lost: LostChunk = read.purpose
                    try:
                        stripes.decode(lost, read.buffers, out[: lost.chunk.size_bytes])
                        writer.write(lost.chunk, out[: lost.chunk.size_bytes])
                    except IntegrityError as error:
                        # Data was checked against the manifest, parity only against the table of its own node.
                        if lost in again:
                            bad = next(source for source in read.sources if source.rank < 0)
                            raise SourceFailedError(bad, FetchError(bad.node_id, str(error), lost=False)) from error
                        again.append(lost)

    def _fetch_shared(self, reader: StripeReader, manifest: RankManifest, writer: _ChunkWriter) -> None:
        """State that other nodes hold too: data chunks, and parity that is encoded again. The checksums are its own."""
        shared = [chunk for chunk in manifest.chunks if chunk.region == SHARED]
        if not shared:
            return
        piece, trainer = self._effect.piece, manifest.trainer
        layout = layouts.decode(writer.read_layout(trainer), payload_bytes=trainer.payload_bytes)
        stored = {part.offset: (one, part) for one in layout.replica_sets for part in one.stored()}
        timeout_s = self._settings.timeout_s
        index = ReplicaIndex(
            self._client, piece.version, self._effect.holders, timeout_s=timeout_s, stopped=self.stopped
        )
        out = memoryview(bytearray(CHUNK_BYTES))

        def reads() -> Iterator[StripeRead]:
            for chunk in shared:
                replica_set, part = stored[trainer.shared_offset + chunk.index * CHUNK_BYTES]
                if part.chunk >= 0:
                    recipe = index.chunk(replica_set, part.chunk, rank=piece.rank)
                else:
                    recipe = index.parity(replica_set, part.row, part.code_row, rank=piece.rank)
                yield StripeRead(recipe.sources, (chunk, recipe))

        with contextlib.closing(reader.run(reads())) as finished:
            for read in finished:
                chunk, recipe = read.purpose
                recipe.make(read.buffers, out[: chunk.size_bytes])
                if xxhash.xxh3_128_digest(out[: chunk.size_bytes]) != chunk.digest:
                    raise IntegrityError(
                        f"chunk {chunk.index} of the replicated state is not what rank {piece.rank} had"
                    )
                writer.write(chunk, out[: chunk.size_bytes])


def _reads(piece: RankSource, chunks: tuple[TableChunk, ...]) -> Iterator[StripeRead]:
    for chunk in chunks:
        request = ChunkRequest(DATA, piece.version, piece.rank, chunk.at).encode()
        source = ChunkSource(piece.node_id, request, chunk.size_bytes, chunk.digest, 0, piece.rank)
        yield StripeRead([source], chunk)


class _ChunkWriter:
    """Writes checked chunks to their place in a slot."""

    def __init__(self, arena: Arena, slot: int, chunks: list[Chunk]) -> None:
        self._arena, self._slot, self._chunks = arena, slot, chunks

    def write_fetched(self, read: StripeRead) -> None:
        self.write(read.purpose, read.buffers[0])

    def write(self, chunk: TableChunk, data: memoryview) -> None:
        self._arena.segment.write(self._chunks[chunk.at].span.offset, data)

    def read_layout(self, trainer: TrainerHeader) -> bytes:
        return self._arena.segment.read(self._arena.layout_span(self._slot).offset, trainer.layout_bytes)


@contextlib.contextmanager
def _blame(source: ChunkSource) -> Iterator[None]:
    """Turn what cannot be decoded into a failure of its source: the next plan does without it."""
    try:
        yield
    except (IntegrityError, msgspec.DecodeError, IndexError, KeyError, RecursionError) as error:
        raise SourceFailedError(source, FetchError(source.node_id, str(error) or repr(error), lost=False)) from error


def _of_rank(manifest: NodeManifest, rank: int) -> RankManifest:
    of_rank = next((one for one in manifest.ranks if one.rank == rank), None)
    if of_rank is None:
        raise IntegrityError(f"the manifest of {manifest.node_id} does not name rank {rank}")
    return of_rank


def _seal(arena: Arena, slot: int, trainer: TrainerHeader, manifest: RankManifest) -> SnapshotInfo:
    """Seal with the checksums of the lost node: every chunk was checked against them before it was written."""
    arena.write_trainer_header(slot, dataclasses.replace(trainer, state=h.COMMITTED))
    committed = checksum.committed_chunks(arena, slot, trainer.version)
    return checksum.write_seal(arena, committed, manifest.table).trainer.info
