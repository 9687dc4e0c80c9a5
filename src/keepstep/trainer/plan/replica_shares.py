"""Which chunks of a replica set this rank stores. Pure.

full    every node stores all of it, its chunks dealt round-robin to the ranks of the node that hold it
share   the nodes are one stripe of an erasure code: each stores 1/n of the chunks and parity of others, which it
        computes from its own replica, so that no byte crosses the network; again dealt to its ranks

All ranks compute the same answer without communication: it follows from which ranks hold the set, on which nodes.

In share mode a rank reads its own chunks and those that its parity covers. The shares move on from version to version
(`PlanTurns`): in time every rank has read all of its replica, and the digests of the keepers find a replica that has
diverged (PROTOCOL 51).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.layout import CHUNK_BYTES, FULL, SHARE, Entry, ReplicaSet, class_id, num_chunks
from keepstep.parity.placement import NodePlace, ShareMap, cut_groups
from keepstep.trainer.connection.environment import Ranks, World


@dataclass(frozen=True)
class ReplicaShares:
    """How the job stores replicated state."""

    world: World
    mode: str = FULL
    losses: int = 1
    group_size: int = 8

    def holders(self, ranks: Ranks | None) -> Ranks | None:
        """The ranks that store together what `ranks` hold; None: on too few nodes, it counts as this rank's own.

        On fewer nodes than may be lost plus one, replication does not protect it. A code spans one group of nodes:
        replicas on more nodes form one replica set per group, and none depends on another.
        """
        if ranks is None or not self._are_ranks(ranks):
            return None
        nodes = self._nodes(ranks)
        if len(nodes) < max(2, min(self.losses, self.world.num_nodes - 1) + 1):
            return None
        if self._mode == FULL:
            return ranks
        losses = min(self.losses, len(nodes) - 1)
        for group in cut_groups([NodePlace(f"{node:09d}") for node in nodes], self.group_size, losses):
            members = {nodes[index] for index in group}
            if self._own_node in members:
                return tuple(rank for rank in ranks if self.world.nodes[rank] in members)
        raise AssertionError("this rank is not among the holders of its own replica set")

    def replica_set(self, ranks: Ranks, entries: tuple[Entry, ...], *, offset: int, turn: int = 0) -> ReplicaSet:
        """The set that `ranks` hold, and the part of it that this rank stores from `offset` of its payload on."""
        size = entries[-1].offset + entries[-1].size_bytes
        n, m, turn, chunks, parity = self._part(ranks, num_chunks(size), turn)
        return ReplicaSet(
            class_id(ranks, entries), ranks, tuple(self.world.nodes[rank] for rank in ranks), size, entries,
            self._mode, n, m, turn, offset, chunks, parity,
        )  # fmt: skip

    def stored_bytes(self, ranks: Ranks, size_bytes: int) -> int:
        """Bytes of this rank's part of a replica set of that size, at the largest turn."""
        chunks = num_chunks(size_bytes)
        turns = range(len(self._nodes(ranks))) if self._mode == SHARE else (0,)
        parts = [self._part(ranks, chunks, turn) for turn in turns]
        return max(len(data) + len(parity) for *_, data, parity in parts) * CHUNK_BYTES

    def _are_ranks(self, ranks: Ranks) -> bool:
        inside = self.world.rank in ranks and 0 <= ranks[0] <= ranks[-1] < len(self.world.nodes)
        return inside and list(ranks) == sorted(set(ranks))

    @property
    def _mode(self) -> str:
        return self.mode if self.losses else FULL  # Shares without parity would protect nothing.

    @property
    def _own_node(self) -> int:
        return self.world.nodes[self.world.rank]

    def _nodes(self, ranks: Ranks) -> list[int]:
        return sorted({self.world.nodes[rank] for rank in ranks})

    def _part(
        self, ranks: Ranks, chunks: int, turn: int
    ) -> tuple[int, int, int, tuple[int, ...], tuple[tuple[int, int], ...]]:
        """n, m, turn, the chunks and the parity of this rank."""
        nodes = self._nodes(ranks)
        local = [rank for rank in ranks if self.world.nodes[rank] == self._own_node]
        first, step = local.index(self.world.rank), len(local)
        if self._mode == FULL:
            return len(nodes), 0, 0, tuple(range(first, chunks, step)), ()
        m = min(self.losses, len(nodes) - 1)
        turn %= len(nodes)
        shares = ShareMap(chunks, len(nodes), m, turn)
        position = nodes.index(self._own_node)
        data, parity = shares.data_of(position), shares.parity_of(position)
        return len(nodes), m, turn, tuple(data[first::step]), tuple(parity[first::step])


@dataclass(frozen=True)
class ChunkRun:
    """Stored chunks that are adjacent both in the replica set and in the payload."""

    start: int  # in the replica set
    offset: int  # in the payload
    size_bytes: int


def entry_ranges(entries: Sequence[Entry], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(entry, begin, end) for every entry with bytes in [start, end) of its replica set; begin and end count in it."""
    first = max(0, bisect_right(entries, start, key=lambda entry: entry.offset) - 1)
    for index in range(first, len(entries)):
        entry = entries[index]
        if entry.offset >= end:
            return
        begin, stop = max(start, entry.offset), min(end, entry.offset + entry.size_bytes)
        if begin < stop:
            yield index, begin - entry.offset, stop - entry.offset


def chunk_runs(replica_set: ReplicaSet) -> list[ChunkRun]:
    """The chunks of the set that a slot stores, in as few runs as possible."""
    runs: list[ChunkRun] = []
    for stored in replica_set.stored():
        if stored.chunk < 0:
            continue
        start, size = stored.chunk * CHUNK_BYTES, replica_set.chunk_bytes(stored.chunk)
        last = runs[-1] if runs else ChunkRun(-1, -1, 0)
        if (last.start + last.size_bytes, last.offset + last.size_bytes) == (start, stored.offset):
            runs[-1] = ChunkRun(last.start, last.offset, last.size_bytes + size)
        else:
            runs.append(ChunkRun(start, stored.offset, size))
    return runs


def gaps(replica_set: ReplicaSet) -> list[tuple[int, int]]:
    """(offset, size) in the payload of the bytes of stored chunks that belong to no entry, and of their padding."""
    unused: list[tuple[int, int]] = []
    for run in chunk_runs(replica_set):
        position = run.start
        for index, begin, end in entry_ranges(replica_set.entries, run.start, run.start + run.size_bytes):
            entry = replica_set.entries[index]
            if entry.offset + begin > position:
                unused.append((run.offset + position - run.start, entry.offset + begin - position))
            position = entry.offset + end
        if position < run.start + run.size_bytes:
            unused.append((run.offset + position - run.start, run.start + run.size_bytes - position))
    for stored in replica_set.stored():
        if stored.chunk >= 0 and stored.size_bytes > replica_set.chunk_bytes(stored.chunk):
            used = replica_set.chunk_bytes(stored.chunk)
            unused.append((stored.offset + used, stored.size_bytes - used))
    return unused
