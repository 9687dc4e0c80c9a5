"""Memory, trainers and parity of a simulated node: what survives a keeper's death, and what does not.

A snapshot's bytes are named, not made: the content of a slot is (rank, version). Two ranks, two steps or two
lives never have the same name, so bytes that are mixed or stale show up as another content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.arena.records import Grant, Ledger, Progress
from keepstep.control.messages import Committed, Void
from keepstep.keeper.node.events import ArenaAdded, SlotFound
from keepstep.layout import SnapshotSize
from keepstep.recovery.inventory import ParitySet
from keepstep.types import Incarnation, SnapshotInfo, Version

NEED = SnapshotSize(1, 1, 1)

Content = tuple[int, Version]


@dataclass
class FakeSlot:
    writing: bool = False
    content: Content | None = None
    sealed: Version | None = None
    damaged: bool = False
    world_size: int = 1
    local_size: int = 1

    @property
    def whole(self) -> Content | None:
        """What a restart could give back: its writer finished it. Damage is found only when it is read."""
        return self.content if not self.writing else None

    def sound(self, content: Content) -> bool:
        """Sealed for these bytes, and undamaged."""
        return self.whole == content and self.sealed == content[1] and not self.damaged


@dataclass
class FakeArena:
    arena_id: str
    local_index: int
    generation: int
    slots: list[FakeSlot]
    grant: Grant | None = None
    ledger: Ledger | None = None
    writer: FakeTrainer | None = None

    def describe(self) -> ArenaAdded:
        """As its headers would be read back."""
        found = []
        for index, slot in enumerate(self.slots):
            rank, version = slot.whole or (0, None)
            state = "free" if version is None else "sealed" if slot.sealed == version else "committed"
            info = SnapshotInfo(version, rank, slot.world_size, slot.local_size, 1) if version is not None else None
            found.append(SlotFound(index, state, info))
        writer = self.writer
        progress = None
        if writer is not None and writer.alive and writer.incarnation is not None:
            progress = Progress(writer.incarnation, writer.progress, writer.pid)
        return ArenaAdded(
            self.arena_id, self.local_index, self.generation, 1, NEED, tuple(found), self.ledger, self.grant, progress
        )


@dataclass
class FakeParity:
    found: ParitySet
    damaged: bool = False


@dataclass
class FakeTrainer:
    """One rank. Its state at a step is (rank, version)."""

    rank: int
    index: int
    pid: int
    conn: int
    incarnation: Incarnation
    alive: bool = True
    stage: str = "registering"
    """registering, restoring, making room, loading, ready"""
    progress: int = -1
    loaded: Version | None = None
    used_serial: int = -1
    busy: list[tuple[str, int, Version]] = field(default_factory=list)
    """oldest first: they are finished in order"""
    free_at: float = 0.0
    """when its last copy ends"""
    arena_id: str = ""
    outcomes: list[Committed | Void] = field(default_factory=list)
    """the last ones, sent again to a new keeper"""
    received_until: float = 0.0
    """messages between a trainer and its keeper arrive in order"""
    sent_until: float = 0.0
    died: list[str] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.stage == "ready"
