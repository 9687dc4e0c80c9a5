"""Inventories: the sealed snapshots and parity sets that keepers hold.

Pure values, sent between keepers: field names are part of the wire format.
"""

from __future__ import annotations

import msgspec

from keepstep.types import Incarnation, SnapshotInfo, Version


class Holding(msgspec.Struct, frozen=True):
    """One rank's sealed snapshot, and its slot on its node."""

    version: Version
    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    arena_id: str
    slot: int
    size_bytes: int

    @classmethod
    def of(cls, info: SnapshotInfo, *, local_index: int, arena_id: str = "", slot: int = 0) -> Holding:
        place = (local_index, info.local_world_size, arena_id, slot, info.size_bytes)
        return cls(info.version, info.rank, info.world_size, *place)


class SetKey(msgspec.Struct, frozen=True, order=True):
    """One protection of a version. A restored version is protected again, in the placement of the new incarnation."""

    version: Version
    incarnation: Incarnation
    attempt: int


class ParitySet(msgspec.Struct, frozen=True):
    """One member's parity units of a protected version, and the group that made them."""

    key: SetKey
    losses: int
    position: int
    members: tuple[str, ...]  # node ids by position
    ranks: tuple[tuple[int, ...], ...]  # by position: the ranks whose snapshots that node held
    world_size: int
    buffer_id: str = ""


class Inventory(msgspec.Struct, frozen=True):
    """Everything a node holds, and the newest versions in its ledger."""

    holdings: tuple[Holding, ...]
    complete: Version | None
    damaged: tuple[str, ...] = ()  # what failed verification, one sentence each
    sets: tuple[ParitySet, ...] = ()
    protected: Version | None = None
