"""Bringing a rank's snapshot to this node: from a peer's slots, or rebuilt from what its group has left.

Every chunk is checked against the checksums in the manifest before it is written; what lies in the slot
when this ends is what the lost rank had sealed, byte for byte. State that other nodes hold too comes from
any of them, in turn, so that each sends its part once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from keepstep import layout as layouts
from keepstep.arena import header as h
from keepstep.arena.chunks import LAYOUT, SHARED, VALUES, Chunk, chunk_spans
from keepstep.arena.header import KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, trainer_digest
from keepstep.errors import Error, IntegrityError, KeeperError
from keepstep.keeper import events as e
from keepstep.keeper import manifest as manifests
from keepstep.keeper.manifest import MAX_MANIFEST_BYTES, NodeManifest, RankManifest, TableChunk
from keepstep.keeper.reach import Reach
from keepstep.keeper.rebuilding import Lost, Stripes, ask
from keepstep.keeper.rows import Row, Rows, Source, SourceFailedError, StoppedError, fetch_bytes
from keepstep.keeper.shelf import DATA, MANIFEST, META, STREAM, Wanted
from keepstep.keeper.words import Failure
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.held import Meta
from keepstep.recovery.plan import Piece

log = logging.getLogger("keepstep.keeper")

MakeArena = Callable[[RankManifest], Arena]


class Bringing:
    """One rank's snapshot on its way. `done` is called from its thread, with the arena if a new one was made."""

    def __init__(
        self,
        effect: e.BringIn,
        *,
        node_id: str,
        peers: Reach,
        arena: Arena | None,
        make: MakeArena,
        window_bytes: int,
        timeout_s: float,
        done: Callable[[e.BroughtIn, Arena | None], None],
    ) -> None:
        """`arena`: where it goes if it fits."""
        self._effect, self._node_id, self._peers = effect, node_id, peers
        self._arena, self._make, self._done = arena, make, done
        self._window, self._timeout_s = window_bytes, timeout_s
        self._stopped = threading.Event()
        self.plan = effect.plan
        self._thread = threading.Thread(target=self._run, name=f"keepstep-bring-{effect.piece.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        piece, made = self._effect.piece, None
        try:
            found, manifest = self._manifest(piece)
            arena, slot = self._arena, self._effect.slot
            if arena is None or not arena.fits(manifest.need):
                arena = made = self._make(manifest)
                slot = 0
            sealed = self._fill(arena, slot, piece, found, manifest)
            self._done(e.BroughtIn(self.plan, piece.rank, arena.arena_id, slot, sealed), made)
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
            made.close()
        self._done(e.BroughtIn(self.plan, piece.rank, "", 0, None, failures), None)

    # What is known of the snapshot

    def _manifest(self, piece: Piece) -> tuple[list[NodeManifest], RankManifest]:
        """The manifests of its group (of its node alone, when it is simply fetched), and its own."""
        if piece.rebuild is None:
            data = self._bytes(piece.node_id, Wanted(MANIFEST, piece.version), piece.rank)
            found = [manifests.decode(data)]
            return found, _of_rank(found[0], piece.rank)
        rebuild = piece.rebuild
        last: SourceFailedError | None = None
        for node_id in rebuild.parity:
            if node_id:
                try:
                    data = self._bytes(node_id, Wanted(META, key=rebuild.key), -1)
                    meta = msgspec.msgpack.decode(data, type=Meta)
                    found = [manifests.decode(one) for one in meta.manifests]
                    return found, _of_rank(found[rebuild.position], piece.rank)
                except SourceFailedError as failed:
                    last = failed
        assert last is not None, "a plan names at least one node with parity"
        raise last

    def _bytes(self, node_id: str, wanted: Wanted, rank: int) -> bytes:
        try:
            return fetch_bytes(
                self._peers, node_id, wanted.encode(), most_bytes=MAX_MANIFEST_BYTES, timeout_s=self._timeout_s,
                stopped=self._stopped,
            )  # fmt: skip
        except SourceFailedError as failed:
            raise SourceFailedError(dataclasses.replace(failed.source, rank=rank), failed.error) from failed

    # Its bytes

    def _fill(
        self, arena: Arena, slot: int, piece: Piece, found: list[NodeManifest], manifest: RankManifest
    ) -> e.SlotSealed:
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
        rows = Rows(
            self._peers, window_bytes=self._window, timeout_s=self._timeout_s, stopped=self._stopped, patient=False
        )
        write = _Writer(arena, chunks, manifest)
        if piece.rebuild is None:
            rows.run(self._fetched(piece, manifest.coded), write.as_fetched)
        else:
            self._rebuild(rows, Stripes(piece.rebuild, found), manifest, write)
        rows.run(self._shared(piece, manifest, trainer), write.as_fetched)
        if self._stopped.is_set():
            raise StoppedError
        return _seal(arena, slot, trainer, manifest)

    def _fetched(self, piece: Piece, wanted: tuple[TableChunk, ...]) -> Iterator[Row]:
        for chunk in wanted:
            request = Wanted(DATA, piece.version, piece.rank, chunk.at).encode()
            source = Source(piece.node_id, request, chunk.size_bytes, chunk.digest, 0, piece.rank)
            yield Row([source], chunk)

    def _rebuild(self, rows: Rows, stripes: Stripes, manifest: RankManifest, write: _Writer) -> None:
        """Let the group decode; what a helper cannot do is decoded here."""
        numbers = [stripes.number_of(manifest.rank, chunk) for chunk in manifest.coded]
        done: set[int] = set()

        def finish(row: Row) -> None:
            write.as_fetched(row)
            done.add(row.purpose.at)

        try:
            rows.run((ask(stripes, number) for number in numbers), finish)
            return
        except SourceFailedError as failed:
            log.info("a helper failed, rebuilding here", extra={"reason": str(failed)})
        out = memoryview(bytearray(CHUNK_BYTES))

        def decode(row: Row) -> None:
            lost: Lost = row.purpose
            stripes.decode(lost, row.buffers, out[: lost.chunk.size_bytes])
            write.put(lost.chunk, out[: lost.chunk.size_bytes])

        left = (stripes.lost(n) for n, c in zip(numbers, manifest.coded, strict=True) if c.at not in done)
        rows.run((Row(lost.sources, lost) for lost in left), decode)

    def _shared(self, piece: Piece, manifest: RankManifest, trainer: TrainerHeader) -> Iterator[Row]:
        shared = [chunk for chunk in manifest.chunks if chunk.region == SHARED]
        if not shared:
            return
        layout = layouts.decode(manifest.layout, payload_bytes=trainer.payload_bytes)
        stored = {s.offset: (stream, s) for stream in layout.streams for s in stream.stored()}
        holders = [node_id for node_id in piece.holders if node_id != self._node_id] or list(piece.holders)
        for chunk in shared:
            stream, place = stored[trainer.shared_offset + chunk.index * CHUNK_BYTES]
            if place.chunk < 0:
                raise KeeperError("parity of replicated state is made again, not fetched")
            request = Wanted(STREAM, piece.version, chunk=place.chunk, class_id=stream.class_id).encode()
            node_id = piece.node_id if piece.rebuild is None else holders[place.chunk % len(holders)]
            yield Row([Source(node_id, request, chunk.size_bytes, chunk.digest, 0, piece.rank)], chunk)


class _Writer:
    """Puts checked chunks where they belong."""

    def __init__(self, arena: Arena, chunks: list[Chunk], manifest: RankManifest) -> None:
        self._arena, self._chunks, self._manifest = arena, chunks, manifest

    def as_fetched(self, row: Row) -> None:
        self.put(row.purpose, row.buffers[0])

    def put(self, chunk: TableChunk, data: memoryview) -> None:
        self._arena.segment.write_from(self._chunks[chunk.at].span.offset, data)


def _of_rank(manifest: NodeManifest, rank: int) -> RankManifest:
    found = next((one for one in manifest.ranks if one.rank == rank), None)
    if found is None:
        raise IntegrityError(f"the manifest of {manifest.node_id} does not name rank {rank}")
    return found


def _seal(arena: Arena, slot: int, trainer: TrainerHeader, manifest: RankManifest) -> e.SlotSealed:
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
    size = written.layout_bytes + written.values_bytes + written.payload_bytes
    return e.SlotSealed(
        arena.arena_id, slot, written.version, written.rank, written.world_size, written.local_world_size, size
    )
