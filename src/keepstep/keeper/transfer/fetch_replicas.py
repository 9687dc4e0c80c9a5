"""Replicated state from the nodes that hold it: where each chunk lies, and how one that is lost comes back.

In `full` mode any node of the class has every chunk, in `share` mode each has its part and parity of
others'. Whoever needs a chunk asks all holders once what they have, fetches what is there, and decodes
what is not. Each node sends each of its chunks once to each node that asks; nothing is read twice.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from keepstep.arena.manifest import MAX_MANIFEST_BYTES
from keepstep.arena.memfd import Memfd
from keepstep.errors import KeeperError
from keepstep.keeper.transfer.chunk_store import STOCK, STREAM, ChunkRequest, HeldReplicas
from keepstep.keeper.transfer.reach import ChunkClient
from keepstep.keeper.transfer.stripe_reads import (
    ASKING,
    RECOVERING,
    ChunkSource,
    SourceFailedError,
    StripeRead,
    StripeReader,
    fetch_bytes,
)
from keepstep.layout import CHUNK_BYTES, SHARE, ReplicaSet, align
from keepstep.parity.code import Code
from keepstep.parity.placement import ShareMap
from keepstep.types import Version

_decoder = msgspec.msgpack.Decoder(list[HeldReplicas])


@dataclass(frozen=True)
class ChunkRecipe:
    """How one piece of a stripe row is made: from k others, or simply fetched."""

    sources: list[ChunkSource]
    stream: ReplicaSet
    chunk: int = -1
    parity: tuple[int, int] | None = None
    zeros: list[int] = field(default_factory=list)
    fetched: bool = False

    def make(self, buffers: Sequence[memoryview], out: memoryview) -> None:
        """Fill `out`, which may be shorter or longer than the chunk was stored."""
        if self.fetched:
            size = min(len(out), len(buffers[0]))
            out[:size] = buffers[0][:size]
            out[size:] = bytes(len(out) - size)
            return
        stream = self.stream
        code, k = Code(stream.n - stream.m, stream.m), stream.n - stream.m
        have: dict[int, memoryview | None] = {s.index: b for s, b in zip(self.sources, buffers, strict=True)}
        have.update(dict.fromkeys(self.zeros))
        if self.parity is None:
            code.rebuild(self.chunk % k, have, out)
            return
        data: list[memoryview | None] = []
        for index in range(k):
            if index not in have:
                missing = memoryview(bytearray(CHUNK_BYTES))
                code.rebuild(index, have, missing)
                data.append(missing)
            else:
                data.append(have[index])
        code.encode(self.parity[1], data, out)


class ReplicaIndex:
    """What the nodes that can be reached hold of the replicated state of a version."""

    def __init__(
        self,
        reach: ChunkClient,
        version: Version,
        holders: Iterable[str],
        *,
        timeout_s: float,
        stopped: threading.Event,
    ) -> None:
        self._version = version
        self._data: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        self._parity: dict[tuple[str, int, int], str] = {}
        request = ChunkRequest(STOCK, version).encode()
        for node_id in holders:
            try:
                source = ChunkSource(node_id, request, MAX_MANIFEST_BYTES, None)
                raw = fetch_bytes(reach, ASKING, source, timeout_s=timeout_s, stopped=stopped)
                self._take(node_id, _decoder.decode(raw))
            except (SourceFailedError, msgspec.DecodeError):
                continue  # what only it had is decoded, or missing: then the chunk that needs it says so

    def _take(self, node_id: str, found: list[HeldReplicas]) -> None:
        for one in found:
            for chunk, size in one.chunks:
                self._data[one.class_id, chunk].append((node_id, size))
            for row, code_row in one.parity:
                self._parity[one.class_id, row, code_row] = node_id

    def chunk(self, stream: ReplicaSet, chunk: int, *, rank: int = -1) -> ChunkRecipe:
        """How a data chunk is had."""
        held = self._data.get((stream.class_id, chunk))
        if held:
            return ChunkRecipe([self._source(stream, chunk, held, 0, rank)], stream, chunk, fetched=True)
        sources, zeros = self._pieces(stream, chunk // (stream.n - stream.m), rank)
        return ChunkRecipe(sources, stream, chunk, None, zeros)

    def parity(self, stream: ReplicaSet, row: int, code_row: int, *, rank: int = -1) -> ChunkRecipe:
        """How a parity chunk is made again."""
        sources, zeros = self._pieces(stream, row, rank)
        return ChunkRecipe(sources, stream, -1, (row, code_row), zeros)

    def _source(
        self, stream: ReplicaSet, chunk: int, held: list[tuple[str, int]], index: int, rank: int
    ) -> ChunkSource:
        node_id, size = held[chunk % len(held)]  # in turn: each node sends its part
        request = ChunkRequest(STREAM, self._version, chunk=chunk, class_id=stream.class_id).encode()
        return ChunkSource(node_id, request, size, None, index, rank)

    def _pieces(self, stream: ReplicaSet, row: int, rank: int) -> tuple[list[ChunkSource], list[int]]:
        """k pieces of a stripe row that are still there."""
        k = stream.n - stream.m
        if stream.mode != SHARE:
            raise KeeperError(f"nobody holds replicated state {stream.class_id[:8]} any more")
        chunks = ShareMap(stream.num_chunks, stream.n, stream.m, stream.turn).sources_of(row)
        zeros = list(range(len(chunks), k))
        sources = [
            self._source(stream, chunk, held, index, rank)
            for index, chunk in enumerate(chunks)
            if (held := self._data.get((stream.class_id, chunk)))
        ]
        for code_row in range(stream.m):
            node_id = self._parity.get((stream.class_id, row, code_row))
            if node_id and len(sources) + len(zeros) < k:
                request = ChunkRequest(
                    STREAM, self._version, class_id=stream.class_id, stripe=row, row=code_row
                ).encode()
                sources.append(ChunkSource(node_id, request, CHUNK_BYTES, None, k + code_row, rank))
        if len(sources) + len(zeros) < k:
            left = len(sources) + len(zeros)
            raise KeeperError(
                f"row {row} of the replicated state {stream.class_id[:8]} has {left} of the {k} pieces it needs"
            )
        return sources, zeros


@dataclass
class FetchedReplicas:
    """Chunks that this node does not store, for as long as its ranks restore."""

    segment: Memfd
    places: dict[tuple[str, int], int]
    """(class, chunk) -> offset"""


def gather(
    reach: ChunkClient,
    version: Version,
    holders: Iterable[str],
    missing: list[tuple[ReplicaSet, int]],
    *,
    window_bytes: int,
    timeout_s: float,
    stopped: threading.Event,
) -> FetchedReplicas:
    """Bring the missing chunks of streams into a memfd of their own. Raises SourceFailedError or KeeperError."""
    stock = ReplicaIndex(reach, version, holders, timeout_s=timeout_s, stopped=stopped)
    places: dict[tuple[str, int], int] = {}
    end = 0
    for stream, chunk in missing:
        places[stream.class_id, chunk] = end
        end += align(stream.chunk_bytes(chunk), 4096)
    segment = Memfd.create(max(end, 4096))
    out = memoryview(bytearray(CHUNK_BYTES))

    def finish(row: StripeRead) -> None:
        recipe: ChunkRecipe = row.purpose
        size = recipe.stream.chunk_bytes(recipe.chunk)
        recipe.make(row.buffers, out[:size])
        segment.write_from(places[recipe.stream.class_id, recipe.chunk], out[:size])

    rows = StripeReader(reach, RECOVERING, window_bytes=window_bytes, timeout_s=timeout_s, stopped=stopped)
    try:
        recipes = (stock.chunk(stream, chunk) for stream, chunk in missing)
        rows.run((StripeRead(recipe.sources, recipe) for recipe in recipes), finish)
    except BaseException:
        segment.close()
        raise
    return FetchedReplicas(segment, places)
