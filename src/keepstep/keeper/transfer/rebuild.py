"""Rebuild one lost chunk from k others: which ones, where they are, and the decoding.

The node that needs the chunk asks a holder of the stripe's parity for it. That helper has one piece already, fetches
the others and decodes, so the work and the traffic of a rebuild are spread over the group, and the new node receives
each byte once instead of k times. Where the helper fails, the new node decodes itself. The result is checked against
the checksum of the lost node.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import xxhash

from keepstep.errors import Error, IntegrityError, KeeperError
from keepstep.keeper.transfer.chunk_store import DATA, PARITY, REBUILT, ChunkRequest
from keepstep.keeper.transfer.stripe_reads import (
    HELPING,
    ChunkClient,
    ChunkSource,
    FetchSettings,
    SourceFailedError,
    StoppedError,
    StripeRead,
    StripeReader,
)
from keepstep.keeper.workers import manifest as manifests
from keepstep.keeper.workers.manifest import NodeManifest, TableChunk
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.parity_buffer import ParityGroup
from keepstep.parity.placement import Placement
from keepstep.recovery.inventory import SetKey
from keepstep.recovery.plan import Rebuild
from keepstep.transport.interface import Body, Refusal

MAX_GROUPS = 4  # whose manifests a helper keeps decoded


@dataclass(frozen=True)
class LostChunk:
    """A chunk that no node holds any more, and what it is rebuilt from."""

    chunk: TableChunk
    erased: int  # its index in the code
    sources: list[ChunkSource]
    zeros: list[int]  # indexes that are zero: beyond the end of what their node had


class GroupStripes:
    """A group as a plan describes it: what is left of each stripe."""

    def __init__(self, rebuild: Rebuild, manifests: list[NodeManifest]) -> None:
        self.rebuild, self.manifests = rebuild, manifests
        self.placement = Placement(len(rebuild.ranks), rebuild.losses)
        self._numbers: dict[tuple[int, int], int] = {}

    def number_of(self, rank: int, chunk: TableChunk) -> int:
        """The number of a chunk among all chunks of the lost node."""
        if not self._numbers:  # built on demand: a helper makes a GroupStripes for each of thousands of chunks
            coded = self.manifests[self.rebuild.position].coded
            self._numbers = {(rank, c.at): number for number, (rank, c) in enumerate(coded)}
        return self._numbers[rank, chunk.at]

    def lost(self, number: int) -> LostChunk:
        """What chunk `number` of the lost node is rebuilt from: data that is left first, then parity."""
        rebuild, placement = self.rebuild, self.placement
        _, lost_chunk = self.manifests[rebuild.position].coded[number]
        stripe, row = placement.where(rebuild.position, number)
        sources: list[ChunkSource] = []
        zeros: list[int] = []
        longest = 0
        for index, position in enumerate(placement.sources(stripe)):
            chunk = placement.chunk_of(position, stripe, row)
            if chunk >= len(self.manifests[position].coded):
                zeros.append(index)
                continue
            rank, piece = self.manifests[position].coded[chunk]
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
        return LostChunk(lost_chunk, placement.source_index(rebuild.position, stripe), sources, zeros)

    def helper(self, number: int) -> str:
        """The node that decodes it: the holders of its parity in turn."""
        stripe, row = self.placement.where(self.rebuild.position, number)
        holders = [self.rebuild.parity[p] for p in self.placement.parity_holders(stripe) if self.rebuild.parity[p]]
        return holders[row % len(holders)]

    def ask_helper(self, number: int) -> StripeRead:
        """The read that asks the helper for a lost chunk."""
        rank, chunk = self.manifests[self.rebuild.position].coded[number]
        request = ChunkRequest(REBUILT, chunk=number, rebuild=self.rebuild).encode()
        return StripeRead([ChunkSource(self.helper(number), request, chunk.size_bytes, chunk.digest, 0, rank)], chunk)

    def decode(self, lost: LostChunk, buffers: list[memoryview], out: memoryview) -> None:
        """Fill `out` with the lost chunk. Raises IntegrityError when the result does not match its checksum."""
        available: dict[int, memoryview | None] = {
            source.index: buffer for source, buffer in zip(lost.sources, buffers, strict=True)
        }
        available.update(dict.fromkeys(lost.zeros))
        Code(self.placement.k, self.placement.m).rebuild(lost.erased, available, out)
        if xxhash.xxh3_128_digest(out) != lost.chunk.digest:
            chunk = lost.chunk
            raise IntegrityError(f"chunk {chunk.index} of the {chunk.region} does not match its checksum when rebuilt")


class Rebuilder:
    """Rebuilds chunks for peers, on the threads of their streams."""

    def __init__(self, client: ChunkClient, *, timeout_s: float) -> None:
        self._client = client
        self._settings = FetchSettings(CHUNK_BYTES, timeout_s)
        self._lock = threading.Lock()
        self._groups: OrderedDict[SetKey, list[NodeManifest]] = OrderedDict()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def rebuild(self, request: ChunkRequest) -> Body:
        """The chunk that a peer has lost. Raises Refusal when it cannot be rebuilt here."""
        if request.rebuild is None:
            raise Refusal("request names no group to rebuild from")
        try:
            stripes = GroupStripes(request.rebuild, self._manifests(request.rebuild.key))
            lost = stripes.lost(request.chunk)
            reader = StripeReader(self._client, HELPING, self._settings, self._closed)
            out = memoryview(bytearray(lost.chunk.size_bytes))
            with contextlib.closing(reader.run([StripeRead(lost.sources, None)])) as finished:
                for read in finished:
                    stripes.decode(lost, read.buffers, out)
        except (OSError, Error) as error:
            raise Refusal(str(error)) from error
        except (
            SourceFailedError, StoppedError, IndexError, KeyError, ValueError, msgspec.DecodeError, RecursionError,
        ) as error:  # fmt: skip
            raise Refusal(f"cannot be rebuilt here: {error}") from error
        return Body(lost.chunk.size_bytes, lost.chunk.digest, data=out)

    def _manifests(self, key: SetKey) -> list[NodeManifest]:
        """The manifests of the whole group, as they are stored beside the parity."""
        with self._lock:
            if key not in self._groups:
                meta = msgspec.msgpack.decode(self._client.store.meta(key), type=ParityGroup)
                self._groups[key] = [manifests.decode(encoded, key.version) for encoded in meta.manifests]
                while len(self._groups) > MAX_GROUPS:
                    self._groups.popitem(last=False)
            return self._groups[key]
