"""What this rank stores of a stream: of the state that others hold too, its part. Pure.

full    every node keeps all of it; the ranks of a node that hold it take its chunks in turn
share   the nodes are one stripe of an erasure code: each keeps 1/n of the chunks and parity of others, which it
        computes from its own replica, so that no byte crosses the network; again its ranks take turns

All ranks come to the same answer without talking: it follows from who holds the class and where they run.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.layout import CHUNK_BYTES, FULL, SHARE, Entry, ReplicaSet, class_id, num_chunks
from keepstep.parity.placement import NodePlace, ShareMap, cut_groups
from keepstep.trainer.connection.environment import Ranks, World


@dataclass(frozen=True)
class ReplicaShares:
    """How the job keeps what several nodes hold."""

    world: World
    mode: str = FULL
    losses: int = 1
    group_size: int = 8

    def holders(self, ranks: Ranks | None) -> Ranks | None:
        """The ranks that store together what `ranks` hold; None: on too few nodes, it is this rank's own.

        On fewer nodes than may be lost plus one, holding it more than once does not protect it. A code spans a
        group of nodes only: each set of a larger class is a class of its own, and none depends on another.
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
        raise AssertionError("a rank that does not hold its own class")

    def stream(self, ranks: Ranks, entries: tuple[Entry, ...], *, offset: int, turn: int = 0) -> ReplicaSet:
        """The class that `ranks` hold, and the part of it that this rank stores from `offset` of its payload on."""
        size = entries[-1].offset + entries[-1].size_bytes
        n, m, turn, chunks, parity = self._part(ranks, num_chunks(size), turn)
        return ReplicaSet(
            class_id(ranks, entries), ranks, tuple(self.world.nodes[rank] for rank in ranks), size, entries,
            self._mode, n, m, turn, offset, chunks, parity,
        )  # fmt: skip

    def stored_bytes(self, ranks: Ranks, size_bytes: int) -> int:
        """Room for this rank's part of a class of that size, at whatever turn."""
        chunks = num_chunks(size_bytes)
        turns = range(len(self._nodes(ranks))) if self._mode == SHARE else (0,)
        parts = [self._part(ranks, chunks, turn) for turn in turns]
        return max(len(data) + len(parity) for *_, data, parity in parts) * CHUNK_BYTES

    def _are_ranks(self, ranks: Ranks) -> bool:
        inside = self.world.rank in ranks and 0 <= ranks[0] <= ranks[-1] < len(self.world.nodes)
        return inside and list(ranks) == sorted(set(ranks))

    @property
    def _mode(self) -> str:
        return self.mode if self.losses else FULL  # shares without parity would protect nothing

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
