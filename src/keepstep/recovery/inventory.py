"""What is there: every sealed snapshot a keeper holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.types import Version


@dataclass(frozen=True)
class Holding:
    """One rank's sealed snapshot and where it lies."""

    version: Version
    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    arena_id: str
    slot: int
    size_bytes: int


@dataclass(frozen=True)
class Inventory:
    """All holdings of a node, and the newest version that its ledger remembers as complete."""

    holdings: tuple[Holding, ...]
    complete: Version | None
    damaged: tuple[str, ...] = ()
    """what failed verification, one sentence each"""
