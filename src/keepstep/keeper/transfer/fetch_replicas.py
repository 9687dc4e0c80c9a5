"""Chunks of replica sets: where they are on this node, which nodes hold the others, and how a lost one is decoded.

In `full` mode every node of a set holds each chunk, in `share` mode each has its part and parity of the others'. A node
that misses chunks asks all holders once what they have, fetches what they hold and decodes the rest. Each node sends
each of its chunks once to each node that asks; nothing is read twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from keepstep.arena.memfd import Memfd
from keepstep.arena.slots import Arena
from keepstep.control.messages import ReplicaSetSource, RestoreFrom
from keepstep.errors import Error, KeeperError
from keepstep.keeper.node.events import Conn
from keepstep.keeper.transfer.chunk_store import STOCK, STREAM, ChunkRequest, HeldReplicas
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
from keepstep.keeper.workers.manifest import MAX_MANIFEST_BYTES
from keepstep.keeper.workers.results import Result, Results, TransferThread
from keepstep.keeper.workers.sealed_snapshot import SealedSnapshot, open_sealed
from keepstep.layout import CHUNK_BYTES, SHARE, ReplicaSet, align
from keepstep.parity.code import Code
from keepstep.parity.placement import ShareMap
from keepstep.types import Version

MissingChunks = list[tuple[ReplicaSet, int]]
_decoder = msgspec.msgpack.Decoder(list[HeldReplicas])


# On other nodes


@dataclass(frozen=True)
class ChunkRecipe:
    """How one chunk is obtained: fetched as it is, or decoded from k others of its stripe row."""

    sources: list[ChunkSource]
    replica_set: ReplicaSet
    chunk: int = -1
    parity: tuple[int, int] | None = None  # (stripe row, row of the code), when the chunk is parity
    zeros: list[int] = field(default_factory=list)
    fetched: bool = False

    def make(self, buffers: Sequence[memoryview], out: memoryview) -> None:
        """Fill `out`, which may be shorter or longer than the chunk was stored."""
        if self.fetched:
            size = min(len(out), len(buffers[0]))
            out[:size] = buffers[0][:size]
            out[size:] = bytes(len(out) - size)
            return
        n, m = self.replica_set.n, self.replica_set.m
        code, k = Code(n - m, m), n - m
        available: dict[int, memoryview | None] = {s.index: b for s, b in zip(self.sources, buffers, strict=True)}
        available.update(dict.fromkeys(self.zeros))
        if self.parity is None:
            code.rebuild(self.chunk % k, available, out)
            return
        data: list[memoryview | None] = []
        for index in range(k):
            if index not in available:
                missing = memoryview(bytearray(CHUNK_BYTES))
                code.rebuild(index, available, missing)
                data.append(missing)
            else:
                data.append(available[index])
        code.encode(self.parity[1], data, out)


class ReplicaIndex:
    """What the nodes that can be reached hold of the replica sets of a version."""

    def __init__(
        self,
        client: ChunkClient,
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
                raw = fetch_bytes(client, ASKING, source, timeout_s=timeout_s, stopped=stopped)
                self._add(node_id, _decoder.decode(raw))
            except (SourceFailedError, msgspec.DecodeError, RecursionError):
                continue  # What only this node held is decoded, or the chunk that needs it cannot be obtained.

    def _add(self, node_id: str, held: list[HeldReplicas]) -> None:
        for part in held:
            for chunk, size in part.chunks:
                self._data[part.class_id, chunk].append((node_id, size))
            for row, code_row in part.parity:
                self._parity[part.class_id, row, code_row] = node_id

    def chunk(self, replica_set: ReplicaSet, chunk: int, *, rank: int = -1) -> ChunkRecipe:
        """How a data chunk is obtained."""
        held = self._data.get((replica_set.class_id, chunk))
        if held:
            source = self._source(replica_set, chunk, held, 0, rank)
            return ChunkRecipe([source], replica_set, chunk, fetched=True)
        sources, zeros = self._pieces(replica_set, chunk // (replica_set.n - replica_set.m), rank)
        return ChunkRecipe(sources, replica_set, chunk, None, zeros)

    def parity(self, replica_set: ReplicaSet, row: int, code_row: int, *, rank: int = -1) -> ChunkRecipe:
        """How a parity chunk is encoded again."""
        sources, zeros = self._pieces(replica_set, row, rank)
        return ChunkRecipe(sources, replica_set, -1, (row, code_row), zeros)

    def _source(
        self, replica_set: ReplicaSet, chunk: int, held: list[tuple[str, int]], index: int, rank: int
    ) -> ChunkSource:
        """A chunk from one of its holders, in turn, so that each sends its part; the other holders follow it."""
        first = chunk % len(held)
        node_id, size = held[first]
        others = tuple(other for other, other_size in held[first + 1 :] + held[:first] if other_size == size)
        request = ChunkRequest(STREAM, self._version, chunk=chunk, class_id=replica_set.class_id).encode()
        return ChunkSource(node_id, request, size, None, index, rank, others)

    def _pieces(self, replica_set: ReplicaSet, row: int, rank: int) -> tuple[list[ChunkSource], list[int]]:
        """k pieces of a stripe row that are still held, and the indexes that are zero."""
        class_id, k = replica_set.class_id, replica_set.n - replica_set.m
        if replica_set.mode != SHARE:
            raise KeeperError(f"no node holds replicated state {class_id[:8]} any more")
        share_map = ShareMap(replica_set.num_chunks, replica_set.n, replica_set.m, replica_set.turn)
        chunks = share_map.sources_of(row)
        zeros = list(range(len(chunks), k))
        sources = [
            self._source(replica_set, chunk, held, index, rank)
            for index, chunk in enumerate(chunks)
            if (held := self._data.get((class_id, chunk)))
        ]
        for code_row in range(replica_set.m):
            node_id = self._parity.get((class_id, row, code_row))
            if node_id and len(sources) + len(zeros) < k:
                request = ChunkRequest(STREAM, self._version, class_id=class_id, stripe=row, row=code_row).encode()
                sources.append(ChunkSource(node_id, request, CHUNK_BYTES, None, k + code_row, rank))
        if len(sources) + len(zeros) < k:
            left = len(sources) + len(zeros)
            raise KeeperError(f"row {row} of the replicated state {class_id[:8]} has {left} of the {k} pieces it needs")
        return sources, zeros


@dataclass
class FetchedReplicas:
    """Chunks that this node does not store, for as long as its ranks restore."""

    segment: Memfd
    offsets: dict[tuple[str, int], int]  # (class_id, chunk) -> offset

    def close(self) -> None:
        self.segment.close()


def fetch_replicas(
    client: ChunkClient,
    version: Version,
    holders: Iterable[str],
    missing: MissingChunks,
    *,
    settings: FetchSettings,
    stopped: threading.Event,
) -> FetchedReplicas:
    """Fetch chunks of replica sets into a memfd of their own. Raises SourceFailedError, StoppedError or KeeperError."""
    index = ReplicaIndex(client, version, holders, timeout_s=settings.timeout_s, stopped=stopped)
    offsets: dict[tuple[str, int], int] = {}
    end = 0
    for replica_set, chunk in missing:
        offsets[replica_set.class_id, chunk] = end
        end += align(replica_set.chunk_bytes(chunk), 4096)
    segment = Memfd.create(max(end, 4096))
    out = memoryview(bytearray(CHUNK_BYTES))

    reader = StripeReader(client, RECOVERING, settings, stopped)
    try:
        recipes = (index.chunk(replica_set, chunk) for replica_set, chunk in missing)
        reads = (StripeRead(recipe.sources, recipe) for recipe in recipes)
        with contextlib.closing(reader.run(reads)) as finished:
            for read in finished:
                fetched: ChunkRecipe = read.purpose
                size = fetched.replica_set.chunk_bytes(fetched.chunk)
                fetched.make(read.buffers, out[:size])
                segment.write(offsets[fetched.replica_set.class_id, fetched.chunk], out[:size])
    except BaseException:
        segment.close()
        raise
    return FetchedReplicas(segment, offsets)


# For the ranks of this node while they restore


@dataclass(frozen=True)
class ReplicasFetched(Result):
    """The end of a ReplicaFetch: the chunks, or why they could not be fetched."""

    version: Version
    replicas: FetchedReplicas | None
    problem: str = ""

    def close(self) -> None:
        if self.replicas is not None:
            self.replicas.close()


class ReplicaFetch(TransferThread):
    """Fetches missing chunks of replica sets for a rank of this node; the ranks share them."""

    def __init__(
        self,
        client: ChunkClient,
        version: Version,
        holders: tuple[str, ...],
        missing: MissingChunks,
        *,
        settings: FetchSettings,
        results: Results,
    ) -> None:
        super().__init__("fetch-replicas")
        self._client, self._version, self._holders, self._missing = client, version, holders, missing
        self._settings, self._results = settings, results
        self.start()

    def run(self) -> None:
        try:
            replicas = fetch_replicas(
                self._client, self._version, self._holders, self._missing, settings=self._settings, stopped=self.stopped
            )
        except (SourceFailedError, StoppedError, Error, OSError) as error:
            problem = f"replicated state cannot be fetched: {error}"
            self._results.put(ReplicasFetched(self._version, None, problem))
        else:
            self._results.put(ReplicasFetched(self._version, replicas))


@dataclass(frozen=True)
class WaitingRank:
    """A rank whose snapshot is sent when the chunks that it misses are fetched."""

    conn: Conn
    answer: RestoreFrom
    holders: tuple[str, ...]  # nodes that may hold the chunks


class ReplicaCache:
    """Fetched chunks of one version, and the ranks that wait for them. Used by the keeper's loop alone."""

    def __init__(self, client: ChunkClient, settings: FetchSettings, results: Results) -> None:
        self._client, self._settings, self._results = client, settings, results
        self._version: Version | None = None
        self._fetch: ReplicaFetch | None = None
        self._waiting: list[WaitingRank] = []
        self.replicas: FetchedReplicas | None = None

    def fetch(self, rank: WaitingRank, missing: MissingChunks) -> str:
        """Fetch what a rank misses, or let it wait for the fetch that is running. Otherwise, why that is useless."""
        version = rank.answer.version
        assert version is not None
        if version != self._version:
            self.drop()
            if self._fetch is not None:
                self._fetch.stop()
            self._version, self._waiting = version, []
            self._fetch = ReplicaFetch(
                self._client, version, rank.holders, missing, settings=self._settings, results=self._results
            )
        elif self.replicas is not None:  # fetched for another rank, whose layout is not this one's
            return f"{len(missing)} chunks of replicated state are on no node that can be reached"
        self._waiting.append(rank)
        return ""

    def add(self, result: ReplicasFetched) -> list[WaitingRank]:
        """Keep what was fetched, unless another version is wanted by now. Returns the ranks that waited for it."""
        if result.version != self._version:
            result.close()
            return []
        waiting, self._waiting = self._waiting, []
        self.replicas = result.replicas
        if result.replicas is None:
            self._version = None
        return waiting

    def drop(self) -> None:
        """Free the fetched chunks: all ranks have loaded, or another version is restored."""
        if self.replicas is not None:
            self.replicas.close()
            self.replicas, self._version = None, None

    def stop(self) -> None:
        if self._fetch is not None:
            self._fetch.stop()

    def close(self, timeout_s: float) -> None:
        self.stop()
        if self._fetch is not None:
            self._fetch.join(timeout_s)
        self.drop()


# On this node


@dataclass
class ReplicaSources:
    """Where the chunks of a rank's replica sets are on this node, and which are not."""

    sources: list[ReplicaSetSource] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)  # the rank's own arena first
    missing: MissingChunks = field(default_factory=list)


def find_replicas(
    arenas: Mapping[str, Arena], answer: RestoreFrom, fetched: FetchedReplicas | None = None
) -> ReplicaSources:
    """For each replica set of the rank, where each chunk is: in slots of this node, else among the fetched."""
    own = open_sealed(arenas[answer.arena_id], answer.slot)
    found = ReplicaSources(fds=[own.arena.segment.fd])
    snapshots = [own]
    if own.index.replica_sets:
        for arena in arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == answer.version and arena.arena_id != answer.arena_id:
                    snapshots.append(open_sealed(arena, slot))
    for replica_set in own.index.replica_sets:
        indexes, offsets = [], []
        for chunk in range(replica_set.num_chunks):
            place = _find(snapshots, fetched, replica_set.class_id, chunk)
            if place is None:
                found.missing.append((replica_set, chunk))
                continue
            fd, offset = place
            if fd not in found.fds:
                found.fds.append(fd)
            indexes.append(found.fds.index(fd))
            offsets.append(offset)
        found.sources.append(ReplicaSetSource(replica_set.class_id, indexes, offsets))
    return found


def _find(
    snapshots: list[SealedSnapshot], fetched: FetchedReplicas | None, class_id: str, chunk: int
) -> tuple[int, int] | None:
    for snapshot in snapshots:
        number = snapshot.find(class_id, chunk)
        if number is not None:
            return snapshot.arena.segment.fd, snapshot.chunks[number].span.offset
    if fetched is not None and (class_id, chunk) in fetched.offsets:
        return fetched.segment.fd, fetched.offsets[class_id, chunk]
    return None
