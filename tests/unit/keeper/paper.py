"""A real core and fake arenas, which hold grant, ledger and slots as they would be read from their headers.

A new core can adopt them at any moment. Nothing happens by itself: tests decide who does what, and when.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keepstep.arena.records import Grant, Ledger
from keepstep.config import Config
from keepstep.control.messages import (
    ArenaGiven,
    Committed,
    Loaded,
    Register,
    Registered,
    RestoreFrom,
    Void,
    WantArena,
    WantRestore,
)
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.effects import (
    CreateArena,
    DropArena,
    Effect,
    SealSlot,
    Send,
    SendSnapshot,
    VerifySlot,
    WriteGrant,
    WriteLedger,
)
from keepstep.keeper.node.events import (
    ArenaAdded,
    Event,
    FromTrainer,
    ProcessDied,
    SlotFound,
    SlotSealed,
    SlotVerified,
    TrainerRegisters,
)
from keepstep.keeper.node.grants import NodeGrant
from keepstep.layout import SnapshotSize
from keepstep.types import Incarnation, SnapshotInfo, Version

NEED = SnapshotSize(1, 1, 1)


@dataclasses.dataclass
class FakeArena:
    """An arena as its headers describe it."""

    arena_id: str
    index: int
    capacity: SnapshotSize
    generation: int
    slots: list[tuple[str, Version | None]]
    grant: Grant | None = None
    ledger: Ledger | None = None


class Node:
    def __init__(self, ranks: int = 1, slots: int = 2) -> None:
        self.ranks, self.slots = ranks, slots
        self.arenas: dict[str, FakeArena] = {}
        self.sent: list[tuple[int, Any]] = []
        self.progress = dict.fromkeys(range(ranks), -1)
        self.seals: list[SealSlot] = []
        self.stop_after: int | None = None
        """the number of effects after which the keeper dies"""
        self.incarnation: Incarnation | None = None
        self.core = Core(Config())

    def handle(self, event: Event) -> None:
        self.core.progress.update(self.progress)
        for effect in self.core.handle(event, 0.0):
            if self.stop_after is not None:
                if self.stop_after == 0:
                    return
                self.stop_after -= 1
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.sent.append((effect.conn, effect.message))
            if isinstance(effect.message, Registered):
                self.incarnation = effect.message.incarnation
        elif isinstance(effect, SendSnapshot):
            self.sent.append((effect.conn, effect.answer))
        elif isinstance(effect, WriteGrant):
            self.arenas[effect.arena_id].grant = effect.grant
        elif isinstance(effect, WriteLedger):
            for arena in self.arenas.values():
                if self.stop_after is None or arena.index == 0 or self.stop_after:
                    arena.ledger = effect.ledger
        elif isinstance(effect, SealSlot):
            self.seals.append(effect)
        elif isinstance(effect, VerifySlot):
            self.handle(SlotVerified(effect.arena_id, effect.slot, effect.version))
        elif isinstance(effect, CreateArena):
            wanted = effect.wanted
            made = FakeArena(f"{effect.local_index}.{effect.generation}", effect.local_index, wanted.need,
                         effect.generation, [("free", None)] * wanted.slots)  # fmt: skip
            self.arenas[made.arena_id] = made
            self.handle(self.described(made))
            self.sent.append((effect.conn, ArenaGiven(made.arena_id, 1, True, wanted.ticket)))
        elif isinstance(effect, DropArena):
            del self.arenas[effect.arena_id]

    def described(self, arena: FakeArena) -> ArenaAdded:
        found = tuple(
            SlotFound(i, state, self.info(version, arena.index) if version is not None else None)
            for i, (state, version) in enumerate(arena.slots)
        )
        return ArenaAdded(
            arena.arena_id, arena.index, arena.generation, 1, arena.capacity, found, arena.ledger, arena.grant
        )

    def info(self, version: Version, index: int) -> SnapshotInfo:
        return SnapshotInfo(version, index, self.ranks, self.ranks, 1)

    # What trainers do

    def register(
        self,
        index: int,
        *,
        rejoin: bool = False,
        pid: int = 0,
        known: bool = True,
        arena_id: str = "",
        agreed: Incarnation | None = None,
        label: str = "round",
    ) -> None:
        """`agreed`: by a launcher, which holds the memory too. Otherwise the job has no launcher."""
        incarnation = agreed or (self.incarnation if known else None)
        register = Register(
            index, self.ranks, index, self.ranks, incarnation, label, 0, 1, self.slots,
            self.progress[index], rejoin, 1, arena_id, no_holder=agreed is None,
        )  # fmt: skip
        self.handle(TrainerRegisters(index, pid or 100 + index, True, register, 77))

    def start(self) -> None:
        """A first start, up to the first grant."""
        for index in range(self.ranks):
            self.register(index, known=False)
        for index in range(self.ranks):
            self.handle(FromTrainer(index, WantRestore(2)))
            self.handle(FromTrainer(index, WantArena(NEED, self.slots, 0, 3)))
            self.handle(FromTrainer(index, Loaded(None, 4)))
        assert all(self.own(index).grant for index in range(self.ranks))

    def own(self, index: int) -> FakeArena:
        return max((a for a in self.arenas.values() if a.index == index), key=lambda a: a.generation)

    def version(self, step: int) -> Version:
        assert self.incarnation is not None
        return Version(self.incarnation, step)

    def write(self, index: int, step: int, *, slot: int | None = None) -> int:
        """The trainer begins to write: its header describes the slot as free until it commits."""
        arena = self.own(index)
        if slot is None:
            grant = self._usable(index)
            assert grant.step <= step
            slot = grant.slots[index]
        arena.slots[slot] = ("free", None)
        self.progress[index] = step
        return slot

    def _usable(self, index: int) -> NodeGrant:
        """The oldest grant in the rank's arena that was not used."""
        page = self.own(index).grant
        assert page is not None
        there = {grant.serial for grant in page.both}
        return next(g for g in self.core.grants.open if g.serial in there and not g.resolved_for(index))

    def commit(self, index: int, step: int, slot: int, *, report: bool = True) -> None:
        self.own(index).slots[slot] = ("committed", self.version(step))
        if report:
            self.report_commit(index, step, slot)

    def report_commit(self, index: int, step: int, slot: int) -> None:
        self.handle(FromTrainer(index, Committed(self.own(index).arena_id, slot, self.version(step))))

    def void(self, index: int, step: int, reason: str, *, slot: int | None = None) -> None:
        if slot is None:
            grant = self.own(index).grant
            assert grant is not None
            slot = grant.slot
        self.progress[index] = max(step, self.progress[index])
        self.handle(FromTrainer(index, Void(self.own(index).arena_id, slot, self.version(step), reason)))

    def seal(self) -> None:
        """Carry out all seals that were requested."""
        while self.seals:
            effect = self.seals.pop(0)
            arena = self.arenas[effect.arena_id]
            state, version = arena.slots[effect.slot]
            held = version if state != "free" else None
            fits = held is not None and effect.version in (None, held)
            if fits:
                arena.slots[effect.slot] = ("sealed", held)
            if fits and held is not None:
                self.handle(SlotSealed(arena.arena_id, effect.slot, held, self.info(held, arena.index)))
            else:
                self.handle(SlotSealed(arena.arena_id, effect.slot, effect.version, problem="half written"))

    def snapshot(self, step: int) -> None:
        """Take a snapshot on all ranks, up to complete."""
        for index in range(self.ranks):
            self.commit(index, step, self.write(index, step))
        self.seal()
        assert self.core.orders.active.complete == self.version(step)

    def snapshot_under(self, grant: NodeGrant) -> None:
        for index, slot in grant.slots.items():
            self.commit(index, grant.step, self.write(index, grant.step, slot=slot))
        self.seal()
        assert self.core.orders.active.complete == self.version(grant.step)

    def replace_keeper(self, *, give_back: bool = True) -> None:
        """The keeper is killed; a new one adopts the arenas."""
        self.core = Core(Config())
        self.stop_after, self.seals = None, []
        if give_back:
            self.give_back(*self.arenas.values())

    def give_back(self, *arenas: FakeArena) -> None:
        for arena in arenas:
            self.handle(self.described(arena))

    def end_trainers(self, *, first_pid: int = 100) -> None:
        for index in range(self.ranks):
            self.handle(ProcessDied(first_pid + index))

    def restored(self) -> list[Version | None]:
        """The versions that were sent to the ranks to restore."""
        return [message.version for _, message in self.sent if isinstance(message, RestoreFrom)]

    def assert_snapshots_continue(self, step: int) -> None:
        """The next takes lead to a complete version, whichever rank is still copying."""
        for attempt in range(4):
            waiting = [grant for grant in self.core.grants.open if not grant.resolved]
            if waiting and self._untouched(waiting[0]):
                self.snapshot(max(step, waiting[0].step) + attempt)
                return
            for grant in waiting:
                for index in grant.slots if grant.void else ():  # a rank that has it uses it, although it is void
                    self.commit(index, grant.step, self.write(index, grant.step, slot=grant.slots[index]))
            self.seal()
        raise AssertionError(f"no grant is given any more: {self.core.grants}")

    def _untouched(self, grant: NodeGrant) -> bool:
        """All ranks have it in their arenas, and none has used it."""
        pages = (self.own(index).grant for index in range(self.ranks))
        seen = all(page is not None and grant.serial in {one.serial for one in page.both} for page in pages)
        return seen and len(grant.slots) == self.ranks and not any(map(grant.resolved_for, grant.slots))
