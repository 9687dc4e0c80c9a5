"""One lost chunk from k others: which ones, from where, and the decoding. Checked against the lost node's checksum.

The node that needs the chunk asks a holder of the stripe's parity for it; that one has a piece already,
fetches the others and decodes. So the work and the traffic of a rebuild are spread over the group, and the
newcomer receives each byte once instead of k times. Where the helper fails the newcomer decodes itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import xxhash

from keepstep.arena import manifest as manifests
from keepstep.arena.manifest import NodeManifest, TableChunk
from keepstep.errors import IntegrityError, KeeperError
from keepstep.keeper.transfer.chunk_store import DATA, PARITY, REBUILT, ChunkRequest
from keepstep.keeper.transfer.reach import ChunkClient
from keepstep.keeper.transfer.stripe_reads import (
    HELPING,
    ChunkSource,
    SourceFailedError,
    StoppedError,
    StripeRead,
    StripeReader,
)
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.parity_buffer import ParityGroup
from keepstep.parity.placement import Placement
from keepstep.recovery.inventory import SetKey
from keepstep.recovery.plan import Rebuild
from keepstep.transport.interface import Body, Refusal

MAX_METAS = 4


@dataclass(frozen=True)
class LostChunk:
    """A chunk that nobody holds any more, and what it is rebuilt from."""

    chunk: TableChunk
    erased: int
    """its index in the code"""
    sources: list[ChunkSource]
    zeros: list[int]
    """indexes that are zero: beyond the end of what their node had"""


class GroupStripes:
    """A group as a plan found it: what is left of each stripe."""

    def __init__(self, rebuild: Rebuild, found: list[NodeManifest]) -> None:
        self.rebuild, self.found = rebuild, found
        self.placement = Placement(len(rebuild.ranks), rebuild.losses)
        self._own: dict[tuple[int, int], int] = {}

    def number_of(self, rank: int, chunk: TableChunk) -> int:
        """Which chunk of the lost node it is."""
        if not self._own:  # not for a helper, who comes here for each chunk: there are thousands
            coded = self.found[self.rebuild.position].coded
            self._own = {(rank, c.at): number for number, (rank, c) in enumerate(coded)}
        return self._own[rank, chunk.at]

    def lost(self, number: int) -> LostChunk:
        """How chunk `number` of the lost node comes back: data that is left first, then parity."""
        rebuild, placement = self.rebuild, self.placement
        _, wanted = self.found[rebuild.position].coded[number]
        stripe, row = placement.where(rebuild.position, number)
        sources: list[ChunkSource] = []
        zeros: list[int] = []
        longest = 0
        for index, position in enumerate(placement.sources(stripe)):
            chunk = placement.chunk_of(position, stripe, row)
            if chunk >= len(self.found[position].coded):
                zeros.append(index)
                continue
            rank, piece = self.found[position].coded[chunk]
            longest = max(longest, piece.size_bytes)
            if "" in rebuild.data[position]:
                continue
            node_id = rebuild.data[position][rebuild.ranks[position].index(rank)]
            request = ChunkRequest(DATA, rebuild.key.version, rank, piece.at).encode()
            sources.append(ChunkSource(node_id, request, piece.size_bytes, piece.digest, index, rank))
        for code_row, holder in enumerate(placement.parity_holders(stripe)):
            if len(sources) + len(zeros) < placement.k and rebuild.parity[holder]:
                request = ChunkRequest(PARITY, key=rebuild.key, stripe=stripe, row=row).encode()
                sources.append(ChunkSource(rebuild.parity[holder], request, longest, None, placement.k + code_row, -1))
        if len(sources) + len(zeros) < placement.k:
            left = len(sources) + len(zeros)
            raise KeeperError(f"stripe {stripe} has {left} of the {placement.k} pieces that are needed")
        return LostChunk(wanted, placement.source_index(rebuild.position, stripe), sources, zeros)

    def helper(self, number: int) -> str:
        """Who decodes it: a holder of its parity, in turn."""
        stripe, row = self.placement.where(self.rebuild.position, number)
        holders = [self.rebuild.parity[p] for p in self.placement.parity_holders(stripe) if self.rebuild.parity[p]]
        return holders[row % len(holders)]

    def decode(self, lost: LostChunk, buffers: list[memoryview], out: memoryview) -> None:
        """Fill `out` with the lost chunk. Raises IntegrityError when what comes out is not what was lost."""
        available: dict[int, memoryview | None] = {
            source.index: buffer for source, buffer in zip(lost.sources, buffers, strict=True)
        }
        available.update(dict.fromkeys(lost.zeros))
        Code(self.placement.k, self.placement.m).rebuild(lost.erased, available, out)
        if xxhash.xxh3_128_digest(out) != lost.chunk.digest:
            chunk = lost.chunk
            raise IntegrityError(f"chunk {chunk.index} of the {chunk.region} does not match its checksum when rebuilt")


class Rebuilder:
    """Decodes for a peer, on the thread of its stream."""

    def __init__(self, reach: ChunkClient, *, timeout_s: float) -> None:
        self._reach, self._timeout_s = reach, timeout_s
        self._lock = threading.Lock()
        self._metas: OrderedDict[SetKey, list[NodeManifest]] = OrderedDict()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def serve(self, wanted: ChunkRequest) -> Body:
        rebuild = wanted.rebuild
        if rebuild is None:
            raise Refusal("rebuilt from what?")
        try:
            stripes = GroupStripes(rebuild, self._manifests(rebuild.key))
            lost = stripes.lost(wanted.chunk)
            rows = StripeReader(
                self._reach, HELPING, window_bytes=CHUNK_BYTES, timeout_s=self._timeout_s, stopped=self._closed
            )
            out = memoryview(bytearray(lost.chunk.size_bytes))
            rows.run([StripeRead(lost.sources, None)], lambda row: stripes.decode(lost, row.buffers, out))
        except (SourceFailedError, StoppedError, IndexError, KeyError, ValueError, msgspec.DecodeError) as error:
            raise Refusal(f"cannot be rebuilt here: {error}") from error
        return Body(lost.chunk.size_bytes, lost.chunk.digest, data=out)

    def _manifests(self, key: SetKey) -> list[NodeManifest]:
        """Of the whole group, as they were kept beside the parity."""
        with self._lock:
            if key not in self._metas:
                meta = msgspec.msgpack.decode(self._reach.shelf.meta(key), type=ParityGroup)
                self._metas[key] = [manifests.decode(one, key.version) for one in meta.manifests]
                while len(self._metas) > MAX_METAS:
                    self._metas.popitem(last=False)
            return self._metas[key]


def ask(stripes: GroupStripes, number: int) -> StripeRead:
    """The row that asks the helper for a lost chunk."""
    rank, chunk = stripes.found[stripes.rebuild.position].coded[number]
    request = ChunkRequest(REBUILT, chunk=number, rebuild=stripes.rebuild).encode()
    return StripeRead([ChunkSource(stripes.helper(number), request, chunk.size_bytes, chunk.digest, 0, rank)], chunk)
