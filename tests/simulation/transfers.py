"""Transfers between simulated nodes: an exchange that encodes parity, and a snapshot that is fetched or rebuilt.

No bytes are copied: each read checks that its source holds, at that moment, exactly the bytes it should.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes import FakeArena, FakeParity, FakeSlot

from keepstep.keeper.coordinator.messages import Failure
from keepstep.keeper.node.effects import FetchSnapshot, StartExchange
from keepstep.keeper.node.events import ExchangeAdvanced, ParityPlaced, SnapshotFetched
from keepstep.parity.placement import Placement
from keepstep.recovery.inventory import ParitySet
from keepstep.recovery.plan import RankSource
from keepstep.types import SnapshotInfo

if TYPE_CHECKING:
    from machines import Machine

REPORT_S = 0.2
RETRY_S = 0.2
TRIES = 3
READS_PER_MEMBER = 2


class Exchange:
    """One exchange of one node: every member's data is read twice, at different times, before parity is placed."""

    def __init__(self, machine: Machine, effect: StartExchange) -> None:
        self.machine, self.effect, self.world = machine, effect, machine.world
        self.stopped, self.tries, self.moved, self.reported_at = False, 0, 0, -1.0
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.pace_s = self.world.random.choice(self.world.setting.pace_s)
        self.reads = list(effect.members) * READS_PER_MEMBER
        self._next(self.pace_s)

    def _next(self, delay_s: float) -> None:
        self.machine.in_this_life(delay_s * self.world.random.uniform(0.5, 1.5), self._read)

    def _read(self) -> None:
        machine, effect = self.machine, self.effect
        if self.stopped:
            return
        member = self.reads[0]
        source = self.world.machines.get(member)
        if member != machine.node_id and (source is None or not self.world.network.reaches(machine.node_id, member)):
            self._next(RETRY_S)  # a peer that cannot be reached is asked again until the exchange is stopped
            return
        assert source is not None
        version = effect.key.version
        ranks = self.ranks.setdefault(member, source.manifest(version))
        bad = [rank for rank in ranks if not source.holds((rank, version))]
        if not ranks or bad:
            self._failed(source, bad)
            return
        self.reads.pop(0)
        self.moved += 1
        if not self.reads:
            self._placed()
            return
        if self.world.now - self.reported_at >= REPORT_S:
            self.reported_at = self.world.now
            machine.handle(ExchangeAdvanced(effect.key, self.moved))
        self._next(self.pace_s)

    def _failed(self, source: Machine, bad: list[int]) -> None:
        self.tries += 1
        if self.tries < TRIES:
            self._next(RETRY_S)
            return
        for rank in bad:  # the source verifies what it sent
            for arena in source.arenas.values():
                for index, slot in enumerate(arena.slots):
                    if slot.whole == (rank, self.effect.key.version) and slot.sealed == self.effect.key.version:
                        source.in_this_life(0.02, source.verify, arena.arena_id, index, slot.sealed)
        problem = f"{source.node_id} does not have what its manifest says"
        self.machine.handle(ExchangeAdvanced(self.effect.key, self.moved, problem))

    def _placed(self) -> None:
        machine, effect = self.machine, self.effect
        found = ParitySet(
            effect.key, effect.losses, effect.members.index(machine.node_id), effect.members,
            tuple(self.ranks[member] for member in effect.members), self.world.setting.world_size,
            f"{machine.node_id}/parity{next(self.world.ids)}",
        )  # fmt: skip
        machine.parities[found.buffer_id] = FakeParity(found)
        machine.adopted.add(found.buffer_id)
        machine.handle(ParityPlaced(found, self.moved))


class Fetch:
    """The fetch of a rank's snapshot: it succeeds if its sources hold it."""

    def __init__(self, machine: Machine, effect: FetchSnapshot) -> None:
        self.machine, self.effect, self.world = machine, effect, machine.world
        self.stopped, self.tries = False, 0
        self.place: tuple[FakeArena, int] | None = None
        self._next(self.world.random.choice([0.05, 0.3]))

    def _next(self, delay_s: float) -> None:
        self.machine.in_this_life(delay_s * self.world.random.uniform(0.5, 1.5), self._try)

    def _try(self) -> None:
        machine, effect, piece = self.machine, self.effect, self.effect.piece
        if self.stopped:
            machine.handle(SnapshotFetched(effect.plan, piece.rank, "", 0, None))
            return
        failed = self._failed_source(piece)
        if failed is not None:
            self.tries += 1
            if self.tries < TRIES:
                self._next(RETRY_S)
                return
            machine.handle(SnapshotFetched(effect.plan, piece.rank, "", 0, None, (failed,)))
            return
        if self.place is None:  # from its first bytes on the slot is being written
            self._begin()
            self._next(0.05)
            return
        arena, index = self.place
        slot = arena.slots[index]
        slot.writing, slot.sealed = False, piece.version
        self._done(arena, index)

    def _begin(self) -> None:
        effect, piece = self.effect, self.effect.piece
        arena, index = self.machine.arenas.get(effect.arena_id), effect.slot
        if arena is None:
            generation = effect.generation
            arena, index = FakeArena("", effect.local_index, generation, [FakeSlot() for _ in range(effect.slots)]), 0
        slot = arena.slots[index]
        self.world.rules.written(self.machine, slot)
        slot.writing, slot.content, slot.damaged = True, (piece.rank, piece.version), False
        slot.world_size, slot.local_size = self.world.setting.world_size, effect.local_world_size
        self.place = (arena, index)
        self.world.rules.memory_changed()

    def _done(self, arena: FakeArena, index: int) -> None:
        machine, effect, piece = self.machine, self.effect, self.effect.piece
        added = None
        if not arena.arena_id:
            arena.arena_id = f"{machine.node_id}/{effect.local_index}.{effect.generation}.{next(self.world.ids)}"
            machine.fetched_arenas[arena.arena_id] = arena
            added = arena.describe()
        info = SnapshotInfo(piece.version, piece.rank, self.world.setting.world_size, effect.local_world_size, 1)
        machine.handle(SnapshotFetched(effect.plan, piece.rank, arena.arena_id, index, info, added=added))

    def _failed_source(self, piece: RankSource) -> Failure | None:
        """The first source that does not hold what the plan names, as a real fetch would report it."""
        for node_id, rank in self._sources(piece):
            source = self.world.machines.get(node_id)
            away = node_id != self.machine.node_id and not self.world.network.reaches(self.machine.node_id, node_id)
            if source is None or away:
                return Failure(self.effect.plan, node_id, rank, piece.version, False, f"{node_id} is away")
            if rank >= 0:
                good = source.holds((rank, piece.version))
            else:
                assert piece.rebuild is not None
                key = piece.rebuild.key
                good = any(p.found.key == key and not p.damaged for p in source.parities.values())
            if not good:
                return Failure(self.effect.plan, node_id, rank, piece.version, True, f"{node_id} sends rubbish")
        return None

    def _sources(self, piece: RankSource) -> list[tuple[str, int]]:
        """(node, rank or -1 for parity) of all that is read."""
        rebuild = piece.rebuild
        if rebuild is None:
            return [(piece.node_id, piece.rank)]
        placement = Placement(len(rebuild.ranks), rebuild.losses)
        found: dict[tuple[str, int], None] = {}
        for stripe in placement.data_stripes(rebuild.position):
            left = 0
            for position in placement.sources(stripe):
                if "" not in rebuild.data[position]:
                    left += 1
                    ranks = zip(rebuild.data[position], rebuild.ranks[position], strict=True)
                    found.update(dict.fromkeys(ranks))
            for holder in placement.parity_holders(stripe):
                if left < placement.k and rebuild.parity[holder]:
                    left += 1
                    found[rebuild.parity[holder], -1] = None
            assert left == placement.k, "a plan that cannot be carried out"
        return list(found)
