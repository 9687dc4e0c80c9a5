"""The rules of the protocol, checked from outside: all memories and all orders, whenever one of them changes.

1  once a version was called complete there is always one at least as new that a restart can give back,
   unless `exposed` was published
2  once a version was protected there is always one at least as new that survives the loss of any `losses`
   nodes of a group: through every exchange, every restart and every healing
3  what is restored is one version on all ranks, the bytes of that rank at that step, and not older than 1 and 2 say
4  what a node has as complete or protected never goes back within an incarnation (complete may, when exposed
   or damaged)
5  memory that the coordinator retains is not written; parity is encoded beside one other at most
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fakes import FakeSlot, FakeTrainer

from keepstep.control.messages import Refused, RestoreFrom
from keepstep.keeper.coordinator.messages import Orders
from keepstep.parity.placement import recoverable
from keepstep.recovery.inventory import ParitySet, SetKey
from keepstep.types import Incarnation, Version

if TYPE_CHECKING:
    from machines import Machine
    from world_of_many import World

# Texts that a trainer may be refused with: its job starts again.
EXPECTED = (
    "ended while the job was restoring", "is over", "newer incarnation", "was restored here, and",
    "damaged after it was checked",
)  # fmt: skip


@dataclass(frozen=True)
class Cover:
    """The newest protected version, and the groups that protect it."""

    version: Version
    key: SetKey
    groups: tuple[ParitySet, ...]
    """one member's set of each"""


class Rules:
    def __init__(self, world: World) -> None:
        self.world = world
        self.cover: Cover | None = None
        self.covers = 0
        self.promise: Version | None = None
        """the newest complete version, unless an excused fault came after it"""
        self.completed: Version | None = None
        self.hurt: set[tuple[str, Version]] = set()
        """what the simulation itself damaged: (node, version)"""
        self.decided: dict[Incarnation, Version | None] = {}
        self._marks: dict[tuple[str, int], Orders] = {}
        """by node and life of its keeper"""
        self._seen: Orders | None = None

    # What is checked

    def handled(self, machine: Machine) -> None:
        core = machine.core
        if core is None:
            return
        who = (machine.node_id, machine.life)
        if core.orders.active is not self._marks.get(who):
            self._check_marks(who, core.orders.active)
        if (
            core.orders.coordinator is not None
            and core.orders.coordinator.orders is not self._seen
            and self._current(machine)
        ):
            self._seen = orders = core.orders.coordinator.orders
            if orders.exposed:
                self.promise = orders.protected or orders.base
            key = orders.protected_by
            if key is not None and (self.cover is None or key > self.cover.key):
                self._covered(key)

    def _current(self, machine: Machine) -> bool:
        """Orders of a coordinator that all others have left promise nothing."""
        assert machine.core is not None
        number = machine.core.incarnation.number
        cores = (self.world.machines[node_id].core for node_id in self.world.launcher.order)
        return all(core is None or core.incarnation.number <= number for core in cores)

    def _covered(self, key: SetKey) -> None:
        found: dict[tuple[str, ...], ParitySet] = {}
        for machine in self.world.machines.values():
            if machine.alive:
                for parity in machine.parities.values():
                    if parity.found.key == key:
                        found[parity.found.members] = parity.found
        self.cover = Cover(key.version, key, tuple(found.values()))
        self.covers += 1
        ranks = {rank for group in found.values() for ranks in group.ranks for rank in ranks}
        assert ranks == set(range(self.world.setting.world_size)), f"rule 2: {key.version} covers only {sorted(ranks)}"
        self.memory_changed()

    def promised(self, machine: Machine, version: Version) -> None:
        """A rank has received that this version is complete."""
        orders = self._coordinator()
        if self._current(machine) and self._all_alive(version.incarnation):
            self.completed = max(self.completed or version, version)
            if orders is None or not orders.exposed:
                self._promise(version)
        self.memory_changed()

    def _promise(self, version: Version) -> None:
        if all(version != hurt for _, hurt in self.hurt):
            self.promise = max(self.promise or version, version)

    def _all_alive(self, incarnation: Incarnation) -> bool:
        """Messages of a job that has lost a node meanwhile promise nothing: the version may be lost with it."""
        launcher = self.world.launcher
        if launcher.unwanted or not all(self.world.machines[node_id].alive for node_id in launcher.order):
            return False
        return incarnation.number == launcher.number or not launcher.former

    def _coordinator(self) -> Orders | None:
        core = self.world.machines[self.world.launcher.order[0]].core
        return (
            core.orders.coordinator.orders
            if core is not None and core.orders.coordinator is not None and core.orders.coordinator.state == "serving"
            else None
        )

    # 1 and 2: what is held

    def memory_changed(self) -> None:
        if self.promise is not None:
            self._check_promise()
        if self.cover is not None:
            self._check_cover(self.cover)

    def _check_promise(self) -> None:
        assert self.promise is not None
        found: dict[Version, set[int]] = {}
        for machine in self._present():
            for slot in machine.slots():
                if slot.whole is not None and slot.whole[1] >= self.promise and not slot.damaged:
                    found.setdefault(slot.whole[1], set()).add(slot.whole[0])
        if any(len(ranks) == self.world.setting.world_size for ranks in found.values()):
            return
        if self.cover is not None and self.cover.version >= self.promise:
            return  # its parity has it: rule 2
        raise AssertionError(f"rule 1: {self.promise} was complete, and is gone")

    def _present(self) -> list[Machine]:
        """Nodes whose memory a plan may draw on."""
        launcher = self.world.launcher
        machines = (self.world.machines[node_id] for node_id in (*launcher.order, *launcher.former))
        return [machine for machine in machines if machine.alive]

    def _check_cover(self, cover: Cover) -> None:
        for group in cover.groups:
            hurt = self._hurt(group, cover.version)
            whole = all(self._intact(group, p, cover) for p in range(len(group.members)) if p not in hurt)
            # A newer version that all hold replaces it, and bits of that one may have been flipped.
            excused = any(version > cover.version for _, version in self.hurt)
            if not whole and not excused and not self._survives(cover, group, hurt):
                where = [group.members[p] for p in range(len(group.members)) if not self._intact(group, p, cover)]
                raise AssertionError(
                    f"rule 2: {cover.version} was protected and is not any more: not all on {where}, "
                    f"hurt are {[group.members[p] for p in hurt]}"
                )

    def _hurt(self, group: ParitySet, version: Version) -> set[int]:
        """Positions that the simulation took away or damaged."""
        launcher = self.world.launcher
        present = {n for n in launcher.order if self.world.machines[n].alive} - launcher.unwanted
        return {
            p for p, node_id in enumerate(group.members) if node_id not in present or (node_id, version) in self.hurt
        }

    def _intact(self, group: ParitySet, position: int, cover: Cover) -> bool:
        machine = self.world.machines[group.members[position]]
        data = all(machine.holds((rank, cover.version)) for rank in group.ranks[position])
        return data and any(p.found.key == cover.key and not p.damaged for p in machine.parities.values())

    def _survives(self, cover: Cover, group: ParitySet, hurt: set[int]) -> bool:
        """By brute force: every loss that the code still has to cover, and any version that is new enough."""
        present = {machine.node_id: machine for machine in self._present()}
        for more in range(group.losses - len(hurt) + 1):
            for lost in itertools.combinations([m for m in group.members if m in present], more):
                left = [machine for node_id, machine in present.items() if node_id not in lost]
                if not any(self._obtainable(version, left) for version in self._versions(cover.version, left)):
                    return False
        return True

    def _versions(self, floor: Version, left: list[Machine]) -> set[Version]:
        return {slot.whole[1] for machine in left for slot in machine.slots() if slot.whole and slot.whole[1] >= floor}

    def _obtainable(self, version: Version, left: list[Machine]) -> bool:
        """All its ranks, from what these nodes hold."""
        held = {
            slot.whole[0]
            for machine in left
            for slot in machine.slots()
            if slot.whole and slot.whole[1] == version and not slot.damaged
        }
        sets: dict[tuple[SetKey, tuple[str, ...]], list[ParitySet]] = {}
        for machine in left:
            for parity in machine.parities.values():
                if parity.found.key.version == version and not parity.damaged:
                    sets.setdefault((parity.found.key, parity.found.members), []).append(parity.found)
        for (_, members), found in sets.items():
            group = found[0]
            data_lost = {p for p, ranks in enumerate(group.ranks) if not held.issuperset(ranks)}
            parity_lost = set(range(len(members))) - {one.position for one in found}
            if not recoverable(len(members), group.losses, data_lost, parity_lost):
                held.update(rank for ranks in group.ranks for rank in ranks)
        return len(held) == self.world.setting.world_size

    # What the simulation may do, and what it excuses

    def may_lose(self, *node_ids: str) -> bool:
        """The code covers it: no group of the newest protected version has lost more than it may.

        Nor may one whose parity is newer and placed, though nobody has said so yet: words of nodes that die now may be
        on their way, and the last of them makes it the one that counts.
        """
        if self.cover is None:
            return False
        placed = {
            (parity.found.key, parity.found.members): parity.found
            for machine in self._present()
            for parity in machine.parities.values()
            if parity.found.key > self.cover.key
        }
        for group in (*self.cover.groups, *placed.values()):
            hurt = {group.members[p] for p in self._hurt(group, group.key.version)}
            if len(hurt.union(node_ids).intersection(group.members)) > group.losses:
                return False
        return True

    def lost_memory(self) -> None:
        self.promise = None

    # 3: restored

    def restored(self, machine: Machine, trainer: FakeTrainer, message: RestoreFrom) -> None:
        version = message.version
        before = self.decided.setdefault(trainer.incarnation, version)
        assert before == version, f"rule 3: {before} and {version} in one incarnation"
        floor = max((v for v in (self.promise, self.cover.version if self.cover else None) if v), default=None)
        if floor is not None:
            assert version is not None, f"rule 3: nothing is given back, and {floor} was there"
            assert version >= floor, f"rule 3: {version} is given back after {floor}"
        if version is not None:
            slot = machine.arenas[message.arena_id].slots[message.slot]
            flipped = (machine.node_id, version) in self.hurt and slot.damaged  # after it was checked
            assert flipped or slot.sound((trainer.rank, version)), (
                f"rule 3: rank {trainer.rank} gets {slot} for {version}"
            )
            if self._all_alive(trainer.incarnation):
                self._promise(version)

    def refused(self, trainer: FakeTrainer, message: Refused) -> None:
        if trainer.incarnation.number < self.world.launcher.number:
            return  # a keeper that was frozen does not know yet that the job went on without them both
        text = message.message
        assert any(word in text for word in EXPECTED), f"rule 3: rank {trainer.rank} is refused: {text}"

    # 4: marks

    def _check_marks(self, who: tuple[str, int], orders: Orders) -> None:
        before = self._marks.get(who)
        self._marks[who] = orders
        node_id = who[0]
        if before is None or before.incarnation != orders.incarnation or before.epoch == 0:
            return  # epoch 0: a ledger that was written before this incarnation began
        assert (before.protected or orders.protected) is None or (
            orders.protected is not None and (before.protected is None or orders.protected >= before.protected)
        ), f"rule 4: {node_id} has {orders.protected} protected after {before.protected}"
        excused = orders.exposed or bool(self.hurt)
        if before.complete is not None and not excused:
            assert orders.complete is not None, f"rule 4: {node_id} has nothing complete after {before.complete}"
            assert orders.complete >= before.complete, f"rule 4: {orders.complete} after {before.complete}"

    # 5: memory in use

    def written(self, machine: Machine, slot: FakeSlot) -> None:
        orders = self._coordinator()
        if orders is None or slot.whole is None or not slot.sound(slot.whole):
            return
        assert slot.whole[1] not in orders.retain, f"rule 5: {machine.node_id} overwrites {slot.whole}"

    def exchange_starts(self, machine: Machine) -> None:
        held = [str(parity.found.key.version) for parity in machine.parities.values()]
        assert len(held) <= 1, f"rule 5: {machine.node_id} encodes into a third buffer, beside {held}"
