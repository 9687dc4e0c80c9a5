"""Bringing a rank's snapshot to this node: from a peer's slots, or rebuilt from what its group has left.

Every chunk is checked against the checksums in the manifest before it is written; what lies in the slot
when this ends is what the lost rank had sealed, byte for byte. State that other nodes hold too comes from
any of them, in turn, so that each sends its part once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import msgspec
import xxhash

from keepstep import layout as layouts
from keepstep.arena import manifest as manifests
from keepstep.arena import records as h
from keepstep.arena.chunks import LAYOUT, SHARED, VALUES, Chunk, chunk_spans
from keepstep.arena.manifest import MAX_MANIFEST_BYTES, NodeManifest, RankManifest, TableChunk
from keepstep.arena.records import KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, trainer_digest
from keepstep.errors import Error, IntegrityError
from keepstep.keeper.coordinator.messages import Failure
from keepstep.keeper.node.effects import FetchSnapshot
from keepstep.keeper.node.events import SnapshotFetched
from keepstep.keeper.transfer.chunk_store import DATA, MANIFEST, META, ChunkRequest
from keepstep.keeper.transfer.fetch_replicas import ReplicaIndex
from keepstep.keeper.transfer.reach import ChunkClient
from keepstep.keeper.transfer.rebuild import GroupStripes, LostChunk, ask
from keepstep.keeper.transfer.stripe_reads import (
    ASKING,
    RECOVERING,
    ChunkSource,
    SourceFailedError,
    StoppedError,
    StripeRead,
    StripeReader,
    fetch_bytes,
)  # fmt: skip
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.parity_buffer import ParityGroup
from keepstep.recovery.plan import RankSource
from keepstep.transport.interface import FetchError
from keepstep.types import SnapshotInfo

log = logging.getLogger("keepstep.keeper")

JOIN_S = 60.0
MakeArena = Callable[[RankManifest], tuple[Arena, Future[None]]]
RESERVE_S = 600.0


class SnapshotFetch:
    """One rank's snapshot on its way. `done` is called from its thread, with the arena if a new one was made."""

    def __init__(
        self,
        effect: FetchSnapshot,
        *,
        node_id: str,
        peers: ChunkClient,
        arena: Arena | None,
        make: MakeArena,
        window_bytes: int,
        timeout_s: float,
        done: Callable[[SnapshotFetched, Arena | None], None],
        after: Sequence[SnapshotFetch] = (),
    ) -> None:
        """`arena`: where it goes if it fits. `after`: given up, and may still write there for a moment."""
        self._effect, self._node_id, self._peers = effect, node_id, peers
        self._arena, self._make, self._done = arena, make, done
        self._window, self._timeout_s, self._after = window_bytes, timeout_s, after
        self._stopped = threading.Event()
        self.plan = effect.plan
        self._thread = threading.Thread(target=self._run, name=f"keepstep-bring-{effect.piece.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        piece, made, reserved = self._effect.piece, None, None
        try:
            for one in self._after:
                one.join(JOIN_S)
            found, manifest = self._manifest(piece)
            arena, slot = self._arena, self._effect.slot
            if arena is None or not arena.fits(manifest.need):
                arena, reserved = self._make(manifest)
                made, slot = arena, 0
            info = self._fill(arena, slot, piece, found, manifest)
            if reserved is not None:
                reserved.result(RESERVE_S)
            self._done(SnapshotFetched(self.plan, piece.rank, arena.arena_id, slot, info), made)
            return
        except StoppedError:
            failures: tuple[Failure, ...] = ()
        except SourceFailedError as failed:
            # Only bytes that do not match count against a source; one that cannot be reached is left out for now.
            rank = failed.source.rank
            bad = not failed.error.lost
            text = f"rank {rank} from {failed.error.node_id}: {failed.error.reason}"
            failures = (Failure(self.plan, failed.error.node_id, rank, piece.version, bad, text),)
        except Exception as error:
            if not isinstance(error, (Error, OSError, MemoryError)):
                log.exception("bringing a snapshot in failed")
            failures = (Failure(self.plan, self._node_id, piece.rank, piece.version, False, str(error) or repr(error)),)
        if made is not None:
            if reserved is not None:
                reserved.cancel()
            made.close()
        self._done(SnapshotFetched(self.plan, piece.rank, "", 0, None, failures), None)

    # What is known of the snapshot

    def _manifest(self, piece: RankSource) -> tuple[list[NodeManifest], RankManifest]:
        """The manifests of its group (of its node alone, when it is simply fetched), and its own."""
        if piece.rebuild is None:
            source = ChunkSource(
                piece.node_id, ChunkRequest(MANIFEST, piece.version).encode(), MAX_MANIFEST_BYTES, None, 0, piece.rank
            )
            with _blamed(source):
                found = [manifests.decode(self._bytes(source), piece.version)]
                return found, _of_rank(found[0], piece.rank)
        rebuild = piece.rebuild
        last: SourceFailedError | None = None
        for node_id in rebuild.parity:
            if node_id:
                source = ChunkSource(node_id, ChunkRequest(META, key=rebuild.key).encode(), MAX_MANIFEST_BYTES, None)
                try:
                    with _blamed(source):
                        meta = msgspec.msgpack.decode(self._bytes(source), type=ParityGroup)
                        found = [manifests.decode(one, piece.version) for one in meta.manifests]
                        return found, _of_rank(found[rebuild.position], piece.rank)
                except SourceFailedError as failed:
                    last = failed
        assert last is not None, "a plan names at least one node with parity"
        raise last

    def _bytes(self, source: ChunkSource) -> bytes:
        return fetch_bytes(self._peers, RECOVERING, source, timeout_s=self._timeout_s, stopped=self._stopped)

    # Its bytes

    def _fill(
        self, arena: Arena, slot: int, piece: RankSource, found: list[NodeManifest], manifest: RankManifest
    ) -> SnapshotInfo:
        effect = self._effect
        trainer = dataclasses.replace(
            manifest.trainer, local_index=effect.local_index, local_world_size=effect.local_world_size
        )
        chunks = chunk_spans(arena, slot, trainer)
        # Nothing that was there may be believed while it is overwritten.
        arena.write_trainer_header(slot, dataclasses.replace(trainer, state=h.WRITING))
        for region, data in ((LAYOUT, manifest.layout), (VALUES, manifest.values)):
            for chunk in chunks:
                if data and chunk.region == region:
                    arena.segment.write(chunk.span.offset, data[chunk.index * CHUNK_BYTES :][: chunk.span.size_bytes])
        rows = StripeReader(
            self._peers, RECOVERING, window_bytes=self._window, timeout_s=self._timeout_s, stopped=self._stopped
        )
        write = _Writer(arena, chunks, manifest)
        if piece.rebuild is None:
            rows.run(self._fetched(piece, manifest.coded), write.as_fetched)
        else:
            self._rebuild(rows, GroupStripes(piece.rebuild, found), manifest, write)
        self._shared(rows, piece, manifest, arena, slot, write)
        if self._stopped.is_set():
            raise StoppedError
        return _seal(arena, slot, trainer, manifest)

    def _fetched(self, piece: RankSource, wanted: tuple[TableChunk, ...]) -> Iterator[StripeRead]:
        for chunk in wanted:
            request = ChunkRequest(DATA, piece.version, piece.rank, chunk.at).encode()
            source = ChunkSource(piece.node_id, request, chunk.size_bytes, chunk.digest, 0, piece.rank)
            yield StripeRead([source], chunk)

    def _rebuild(self, rows: StripeReader, stripes: GroupStripes, manifest: RankManifest, write: _Writer) -> None:
        """Let the group decode; what a helper cannot do is decoded here."""
        numbers = [stripes.number_of(manifest.rank, chunk) for chunk in manifest.coded]
        done: set[int] = set()

        def finish(row: StripeRead) -> None:
            write.as_fetched(row)
            done.add(row.purpose.at)

        try:
            rows.patience = ASKING
            rows.run((ask(stripes, number) for number in numbers), finish)
            return
        except SourceFailedError as failed:
            log.info("a helper failed, rebuilding here", extra={"reason": str(failed)})
        finally:
            rows.patience = RECOVERING
        out = memoryview(bytearray(CHUNK_BYTES))
        again: list[LostChunk] = []

        def decode(row: StripeRead) -> None:
            lost: LostChunk = row.purpose
            try:
                stripes.decode(lost, row.buffers, out[: lost.chunk.size_bytes])
                write.put(lost.chunk, out[: lost.chunk.size_bytes])
            except IntegrityError as error:
                # The data was checked on its way, parity only against its own node's table: it may be another piece.
                if lost in again:
                    bad = next(source for source in row.sources if source.rank < 0)
                    raise SourceFailedError(bad, FetchError(bad.node_id, str(error), lost=False)) from error
                again.append(lost)

        left = (stripes.lost(n) for n, c in zip(numbers, manifest.coded, strict=True) if c.at not in done)
        rows.run((StripeRead(list(lost.sources), lost) for lost in left), decode)
        rows.run((StripeRead(list(lost.sources), lost) for lost in again), decode)

    def _shared(
        self, rows: StripeReader, piece: RankSource, manifest: RankManifest, arena: Arena, slot: int, write: _Writer
    ) -> None:
        """What other nodes hold too: their chunks, and parity of them that is made again. The checksums are its own."""
        shared = [chunk for chunk in manifest.chunks if chunk.region == SHARED]
        if not shared:
            return
        trainer = manifest.trainer
        encoded = arena.segment.read(arena.layout_span(slot).offset, trainer.layout_bytes)
        layout = layouts.decode(encoded, payload_bytes=trainer.payload_bytes)
        stored = {one.offset: (stream, one) for stream in layout.replica_sets for one in stream.stored()}
        holders = self._effect.holders
        stock = ReplicaIndex(self._peers, piece.version, holders, timeout_s=self._timeout_s, stopped=self._stopped)
        out = memoryview(bytearray(CHUNK_BYTES))

        def wanted() -> Iterator[StripeRead]:
            for chunk in shared:
                stream, one = stored[trainer.shared_offset + chunk.index * CHUNK_BYTES]
                if one.chunk >= 0:
                    recipe = stock.chunk(stream, one.chunk, rank=piece.rank)
                else:
                    recipe = stock.parity(stream, one.row, one.code_row, rank=piece.rank)
                yield StripeRead(recipe.sources, (chunk, recipe))

        def finish(row: StripeRead) -> None:
            chunk, recipe = row.purpose
            recipe.make(row.buffers, out[: chunk.size_bytes])
            if xxhash.xxh3_128_digest(out[: chunk.size_bytes]) != chunk.digest:
                raise IntegrityError(f"chunk {chunk.index} of the replicated state is not what rank {piece.rank} had")
            write.put(chunk, out[: chunk.size_bytes])

        rows.run(wanted(), finish)


class _Writer:
    """Puts checked chunks where they belong."""

    def __init__(self, arena: Arena, chunks: list[Chunk], manifest: RankManifest) -> None:
        self._arena, self._chunks, self._manifest = arena, chunks, manifest

    def as_fetched(self, row: StripeRead) -> None:
        self.put(row.purpose, row.buffers[0])

    def put(self, chunk: TableChunk, data: memoryview) -> None:
        self._arena.segment.write_from(self._chunks[chunk.at].span.offset, data)


@contextlib.contextmanager
def _blamed(source: ChunkSource) -> Iterator[None]:
    """What came from there cannot be right: the next plan does without it."""
    try:
        yield
    except (IntegrityError, msgspec.DecodeError, IndexError, KeyError) as error:
        raise SourceFailedError(source, FetchError(source.node_id, str(error) or repr(error), lost=False)) from error


def _of_rank(manifest: NodeManifest, rank: int) -> RankManifest:
    found = next((one for one in manifest.ranks if one.rank == rank), None)
    if found is None:
        raise IntegrityError(f"the manifest of {manifest.node_id} does not name rank {rank}")
    return found


def _seal(arena: Arena, slot: int, trainer: TrainerHeader, manifest: RankManifest) -> SnapshotInfo:
    """Every chunk was checked on its way: the checksums are the ones that the lost node had."""
    arena.write_trainer_header(slot, dataclasses.replace(trainer, state=h.COMMITTED))
    committed = arena.committed(slot)
    assert committed is not None
    sequence, written = committed
    arena.segment.write(arena.table_span(slot).offset, manifest.table)
    arena.write_keeper_header(
        slot,
        KeeperHeader(
            state=h.SEALED, num_chunks=len(manifest.table) // DIGEST_BYTES, version=written.version,
            trainer_sequence=sequence, trainer_digest=trainer_digest(written),
            table_digest=xxhash.xxh3_128_digest(manifest.table), sealed_at=time.time(),
        ),
    )  # fmt: skip
    return written.info
