"""Where this trainer stands in its job: its place on its node, and the node of every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankPlace:
    """Who captures: goes into every slot header."""

    rank: int
    world_size: int
    local_index: int
    local_world_size: int


@dataclass(frozen=True)
class World:
    """All ranks of a job with more than one node, and the node of each."""

    rank: int
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, place: RankPlace, environ: Mapping[str, str] | None = None) -> World | None:
        """None on a single node, and where nobody can say which ranks share a node."""
        environ = os.environ if environ is None else environ
        size, local = place.world_size, place.local_world_size
        if size == local or size % local or place.rank % local != place.local_index:
            return None
        if environ.get("GROUP_RANK", str(place.rank // local)) != str(place.rank // local):
            return None
        return cls(place.rank, tuple(rank // local for rank in range(size)))

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))
