"""Protect a version: fetch the other members' chunks, encode this node's parity, place it. One version at a time.

    manifests of all members ──▶ how much parity ──▶ a buffer ──▶ reads: fetch k chunks, check, encode, write ──▶ PLACED

Runs on a thread of its own and decides nothing: the core starts an exchange and stops it, progress and end are events.
A peer that cannot be reached is asked again until the exchange is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.errors import Error
from keepstep.keeper.node.effects import StartExchange
from keepstep.keeper.node.events import ExchangeAdvanced, ParityPlaced
from keepstep.keeper.transfer.chunk_store import CHECK, DATA, MANIFEST, ChunkRequest
from keepstep.keeper.transfer.stripe_reads import (
    EXCHANGING,
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
from keepstep.keeper.workers import memory_limits
from keepstep.keeper.workers.manifest import MAX_MANIFEST_BYTES, NodeManifest
from keepstep.keeper.workers.results import Result, Results, TransferThread
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.parity_buffer import ParityBuffer, ParityGroup, size_needed
from keepstep.parity.placement import Placement
from keepstep.recovery.inventory import ParitySet
from keepstep.transport.interface import FetchRequest

PROGRESS_S = 0.2  # between two progress events
NICE = 5  # training has the cores first
REUSE_SHARE = 0.5  # a spare buffer is used again when the new parity fills at least this part of it

log = logging.getLogger("keepstep.keeper")


class ParityBufferPool:
    """Parity buffers that hold nothing any more: the next parity is written into memory that is allocated already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[ParityBuffer] = []
        self._closed = False

    def give(self, buffer: ParityBuffer) -> None:
        """Return a buffer; its parity is void. After `close` it is freed at once."""
        buffer.void()
        with self._lock:
            if self._closed:
                buffer.close()
            else:
                self._spare.append(buffer)

    def take(self, size_bytes: int) -> ParityBuffer:
        """A spare buffer that fits, else a new one; spares that do not fit are freed."""
        with self._lock:
            spare, self._spare = self._spare, []
        fitting = [s for s in spare if REUSE_SHARE * s.segment.size_bytes <= size_bytes <= s.segment.size_bytes]
        chosen = min(fitting, key=lambda s: s.segment.size_bytes, default=None)
        for buffer in spare:
            if buffer is not chosen:
                buffer.close()
        if chosen is not None:
            return chosen
        memory_limits.check(size_bytes, "the parity of this node", room=memory_limits.measure(), memory_limit_bytes=0)
        return ParityBuffer.create(size_bytes)

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(buffer.segment.size_bytes for buffer in self._spare)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for buffer in self._spare:
                buffer.close()
            self._spare = []


@dataclass(frozen=True)
class ParityBuilt(Result):
    """Parity that is encoded and placed in a buffer."""

    event: ParityPlaced
    buffer: ParityBuffer

    def close(self) -> None:
        self.buffer.close()


class ParityBuilder(TransferThread):
    """One exchange. Hands ParityBuilt to the loop at the end, ExchangeAdvanced for progress and failure."""

    def __init__(
        self,
        effect: StartExchange,
        client: ChunkClient,
        pool: ParityBufferPool,
        *,
        run_id: str,
        settings: FetchSettings,
        results: Results,
    ) -> None:
        super().__init__("exchange")
        self._effect, self._client, self._pool = effect, client, pool
        self._run_id, self._settings, self._results = run_id, settings, results
        self._progress_at = 0.0
        self.key = effect.key
        self.start()

    def run(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        buffer: ParityBuffer | None = None
        reader = StripeReader(self._client, EXCHANGING, self._settings, self.stopped)
        try:
            group = self._manifests()
            meta = self._meta(group)
            buffer = self._pool.take(size_needed(meta))
            parity_set = self._encode(reader, group, meta, buffer)
            if self.stopped.is_set():
                raise StoppedError
            self._results.put(ParityBuilt(ParityPlaced(parity_set, reader.moved_bytes), buffer))
            buffer = None
        except StoppedError:
            pass
        except SourceFailedError as failed:
            self._request_check(failed)
            self._results.put(ExchangeAdvanced(self.key, reader.moved_bytes, str(failed)))
        except (Error, OSError, MemoryError, ValueError) as error:
            self._results.put(ExchangeAdvanced(self.key, reader.moved_bytes, str(error) or repr(error)))
        except Exception as error:
            log.exception("an exchange failed")
            self._results.put(ExchangeAdvanced(self.key, reader.moved_bytes, repr(error)))
        finally:
            if buffer is not None:
                self._pool.give(buffer)

    def _manifests(self) -> list[NodeManifest]:
        """The manifests of all members, by position."""
        version, timeout_s = self.key.version, self._settings.timeout_s
        group = []
        for member in self._effect.members:
            if member == self._client.node_id:
                group.append(self._client.store.manifest(version))
                continue
            source = ChunkSource(member, ChunkRequest(MANIFEST, version).encode(), MAX_MANIFEST_BYTES, None)
            data = fetch_bytes(self._client, EXCHANGING, source, timeout_s=timeout_s, stopped=self.stopped)
            group.append(manifests.decode(data, version))
        return group

    def _meta(self, group: list[NodeManifest]) -> ParityGroup:
        placement = self._placement
        rows = tuple(
            (stripe, code_row, tuple(stripe_sizes(placement, group, stripe)))
            for stripe, code_row in placement.parity_stripes(self._position)
        )
        return ParityGroup(
            self._run_id, self._client.node_id, self._effect.members,
            tuple(tuple(rank.rank for rank in manifest.ranks) for manifest in group),
            group[0].ranks[0].trainer.world_size, tuple(manifests.encode(manifest) for manifest in group), rows,
        )  # fmt: skip

    def _encode(
        self, reader: StripeReader, group: list[NodeManifest], meta: ParityGroup, buffer: ParityBuffer
    ) -> ParitySet:
        placement, key = self._placement, self.key
        buffer.begin(
            meta, key=(key.version, key.incarnation, key.attempt), n=placement.n, m=placement.m, position=self._position
        )
        code = Code(placement.k, placement.m)
        out = memoryview(bytearray(CHUNK_BYTES))

        with contextlib.closing(reader.run(self._reads(group, meta))) as finished:
            for read in finished:
                stripe, code_row, number, size = read.purpose
                sources: list[memoryview | None] = [None] * placement.k
                for source, chunk in zip(read.sources, read.buffers, strict=True):
                    sources[source.index] = chunk
                code.encode(code_row, sources, out[:size])
                buffer.write_chunk(stripe, number, out[:size])
                self._report_progress(reader.moved_bytes)
        buffer.place()
        return ParitySet(key, placement.m, self._position, meta.members, meta.ranks, meta.world_size, buffer.buffer_id)

    def _reads(self, group: list[NodeManifest], meta: ParityGroup) -> Iterator[StripeRead]:
        placement, version = self._placement, self.key.version
        for stripe, code_row, sizes in meta.rows:
            members = placement.sources(stripe)
            for number, size in enumerate(sizes):
                sources = []
                for index, position in enumerate(members):
                    chunk = placement.chunk_of(position, stripe, number)
                    if chunk >= len(group[position].coded):
                        continue  # beyond its end: zeros
                    rank, piece = group[position].coded[chunk]
                    request = ChunkRequest(DATA, version, rank, piece.at).encode()
                    node_id = self._effect.members[position]
                    sources.append(ChunkSource(node_id, request, piece.size_bytes, piece.digest, index, rank))
                yield StripeRead(sources, (stripe, code_row, number, size))

    @property
    def _placement(self) -> Placement:
        return Placement(len(self._effect.members), self._effect.losses)

    @property
    def _position(self) -> int:
        return self._effect.members.index(self._client.node_id)

    def _report_progress(self, moved_bytes: int) -> None:
        if time.monotonic() - self._progress_at >= PROGRESS_S:
            self._progress_at = time.monotonic()
            self._results.put(ExchangeAdvanced(self.key, moved_bytes))

    def _request_check(self, failed: SourceFailedError) -> None:
        """Ask the peer to verify what it sent: if its memory is damaged, its version is not complete any more."""
        if failed.error.lost or failed.source.rank < 0:
            return
        query = ChunkRequest(CHECK, self.key.version, failed.source.rank).encode()
        self._client.fetch(FetchRequest(failed.error.node_id, query, 1, self._settings.timeout_s))


def stripe_sizes(placement: Placement, group: list[NodeManifest], stripe: int) -> Iterator[int]:
    """The sizes of the parity chunks of a stripe: in each row as long as its longest source."""
    number = 0
    while True:
        size = 0
        for position in placement.sources(stripe):
            chunk = placement.chunk_of(position, stripe, number)
            coded = group[position].coded
            if chunk < len(coded):
                size = max(size, coded[chunk][1].size_bytes)
        if size == 0:
            return
        yield size
        number += 1
