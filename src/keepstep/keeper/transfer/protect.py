"""Protecting a version: fetch the other members' chunks, encode this node's parity, place it. One at a time.

    manifests of all members ──▶ how much parity ──▶ a buffer ──▶ rows: fetch k chunks, check, encode, write ──▶ PLACED

Runs on a thread of its own. Nothing here decides: the core starts an exchange and stops it, progress and
the end are events. A peer that cannot be reached is asked again until somebody stops the exchange.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from keepstep.arena import manifest as manifests
from keepstep.arena import memory_limits
from keepstep.arena.manifest import MAX_MANIFEST_BYTES, NodeManifest
from keepstep.errors import Error
from keepstep.keeper.node.effects import StartExchange
from keepstep.keeper.node.events import ExchangeAdvanced, ParityPlaced
from keepstep.keeper.transfer.chunk_store import CHECK, DATA, MANIFEST, ChunkRequest, ChunkStore
from keepstep.keeper.transfer.reach import ChunkClient
from keepstep.keeper.transfer.stripe_reads import (
    EXCHANGING,
    ChunkSource,
    SourceFailedError,
    StoppedError,
    StripeRead,
    StripeReader,
    fetch_bytes,
)
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.parity_buffer import ParityBuffer, ParityGroup, size_needed
from keepstep.parity.placement import Placement
from keepstep.recovery.inventory import ParitySet
from keepstep.transport.interface import FetchRequest

SAY_S = 0.2
NICE = 5
# A spare buffer is used again when the new parity fills at least this part of it.
WORTH_KEEPING = 0.5

log = logging.getLogger("keepstep.keeper")


class ParityBufferPool:
    """Parity buffers that hold nothing any more: the next parity is written into memory that is there already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[ParityBuffer] = []
        self._closed = False

    def give(self, held: ParityBuffer) -> None:
        held.void()
        with self._lock:
            if self._closed:
                held.close()
            else:
                self._spare.append(held)

    def take(self, size_bytes: int) -> ParityBuffer:
        """A spare one that fits, else a new one; spares that do not fit go."""
        with self._lock:
            spare, self._spare = self._spare, []
        fitting = [s for s in spare if WORTH_KEEPING * s.segment.size_bytes <= size_bytes <= s.segment.size_bytes]
        chosen = min(fitting, key=lambda s: s.segment.size_bytes, default=None)
        for held in spare:
            if held is not chosen:
                held.close()
        if chosen is not None:
            return chosen
        memory_limits.check(size_bytes, "the parity of this node", room=memory_limits.measure(), memory_limit_bytes=0)
        return ParityBuffer.create(size_bytes)

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(held.segment.size_bytes for held in self._spare)

    def close(self) -> None:
        """What is given back later goes at once."""
        with self._lock:
            self._closed = True
            for held in self._spare:
                held.close()
            self._spare = []


class ParityBuilder:
    """One exchange, on its own thread. `placed` gets the buffer; `say` gets progress and failure."""

    def __init__(
        self,
        effect: StartExchange,
        *,
        run_id: str,
        node_id: str,
        shelf: ChunkStore,
        peers: ChunkClient,
        pool: ParityBufferPool,
        window_bytes: int,
        timeout_s: float,
        placed: Callable[[ParityPlaced, ParityBuffer], None],
        say: Callable[[ExchangeAdvanced], None],
    ) -> None:
        self._effect, self._run_id, self._node_id = effect, run_id, node_id
        self._shelf, self._peers, self._pool = shelf, peers, pool
        self._window, self._timeout_s = window_bytes, timeout_s
        self._placed, self._say = placed, say
        self._stopped = threading.Event()
        self._said_at = 0.0
        self.key = effect.key
        self._thread = threading.Thread(target=self._run, name="keepstep-exchange", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if hasattr(os, "setpriority"):  # training has the cores first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        held: ParityBuffer | None = None
        rows = StripeReader(
            self._peers, EXCHANGING, window_bytes=self._window, timeout_s=self._timeout_s, stopped=self._stopped
        )
        try:
            manifest = self._manifests()
            meta = self._meta(manifest)
            held = self._pool.take(size_needed(meta))
            found = self._encode(rows, manifest, meta, held)
            if self._stopped.is_set():
                raise StoppedError
            self._placed(ParityPlaced(found, rows.moved_bytes), held)
            held = None
        except StoppedError:
            pass
        except SourceFailedError as failed:
            self._complain(failed)
            self._say(ExchangeAdvanced(self.key, rows.moved_bytes, str(failed)))
        except (Error, OSError, MemoryError, ValueError) as error:
            self._say(ExchangeAdvanced(self.key, rows.moved_bytes, str(error) or repr(error)))
        except Exception as error:
            log.exception("an exchange failed")
            self._say(ExchangeAdvanced(self.key, rows.moved_bytes, repr(error)))
        finally:
            if held is not None:
                self._pool.give(held)

    def _manifests(self) -> list[NodeManifest]:
        """Of all members, by position."""
        found = []
        for member in self._effect.members:
            if member == self._node_id:
                found.append(self._shelf.own_manifest(self.key.version))
                continue
            source = ChunkSource(member, ChunkRequest(MANIFEST, self.key.version).encode(), MAX_MANIFEST_BYTES, None)
            data = fetch_bytes(self._peers, EXCHANGING, source, timeout_s=self._timeout_s, stopped=self._stopped)
            found.append(manifests.decode(data, self.key.version))
        return found

    def _meta(self, found: list[NodeManifest]) -> ParityGroup:
        placement = self._placement
        rows = tuple(
            (stripe, code_row, tuple(stripe_sizes(placement, found, stripe)))
            for stripe, code_row in placement.parity_stripes(self._position)
        )
        return ParityGroup(
            self._run_id, self._node_id, self._effect.members,
            tuple(tuple(rank.rank for rank in manifest.ranks) for manifest in found),
            found[0].ranks[0].trainer.world_size, tuple(manifests.encode(manifest) for manifest in found), rows,
        )  # fmt: skip

    def _encode(
        self, rows: StripeReader, found: list[NodeManifest], meta: ParityGroup, held: ParityBuffer
    ) -> ParitySet:
        placement, key = self._placement, self.key
        held.begin(
            meta, key=(key.version, key.incarnation, key.attempt), n=placement.n, m=placement.m, position=self._position
        )
        code = Code(placement.k, placement.m)
        out = memoryview(bytearray(CHUNK_BYTES))

        def finish(row: StripeRead) -> None:
            stripe, code_row, number, size = row.purpose
            sources: list[memoryview | None] = [None] * placement.k
            for source, buffer in zip(row.sources, row.buffers, strict=True):
                sources[source.index] = buffer
            code.encode(code_row, sources, out[:size])
            held.write_chunk(stripe, number, out[:size])
            self._progress(rows.moved_bytes)

        rows.run(self._rows(found, meta), finish)
        held.place()
        return ParitySet(key, placement.m, self._position, meta.members, meta.ranks, meta.world_size, held.buffer_id)

    def _rows(self, found: list[NodeManifest], meta: ParityGroup) -> Iterator[StripeRead]:
        placement, version = self._placement, self.key.version
        for stripe, code_row, sizes in meta.rows:
            members = placement.sources(stripe)
            for number, size in enumerate(sizes):
                sources = []
                for index, position in enumerate(members):
                    chunk = placement.chunk_of(position, stripe, number)
                    if chunk >= len(found[position].coded):
                        continue  # beyond its end: zeros
                    rank, piece = found[position].coded[chunk]
                    request = ChunkRequest(DATA, version, rank, piece.at).encode()
                    node_id = self._effect.members[position]
                    sources.append(ChunkSource(node_id, request, piece.size_bytes, piece.digest, index, rank))
                yield StripeRead(sources, (stripe, code_row, number, size))

    @property
    def _placement(self) -> Placement:
        return Placement(len(self._effect.members), self._effect.losses)

    @property
    def _position(self) -> int:
        return self._effect.members.index(self._node_id)

    def _progress(self, moved_bytes: int) -> None:
        if time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            self._say(ExchangeAdvanced(self.key, moved_bytes))

    def _complain(self, failed: SourceFailedError) -> None:
        """The peer should look at what it sent: if its memory is damaged, its version is not complete any more."""
        if failed.error.lost or failed.source.rank < 0:
            return
        query = ChunkRequest(CHECK, self.key.version, failed.source.rank).encode()
        self._peers.fetch(FetchRequest(failed.error.node_id, query, 1, self._timeout_s))


def stripe_sizes(placement: Placement, found: list[NodeManifest], stripe: int) -> Iterator[int]:
    """The sizes of the parity chunks of a stripe: in each row as long as its longest source."""
    number = 0
    while True:
        size = 0
        for position in placement.sources(stripe):
            chunk = placement.chunk_of(position, stripe, number)
            coded = found[position].coded
            if chunk < len(coded):
                size = max(size, coded[chunk][1].size_bytes)
        if size == 0:
            return
        yield size
        number += 1
