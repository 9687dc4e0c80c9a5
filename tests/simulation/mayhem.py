"""Fault injection, drawn from the world's seed. No fault is worse than the code covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes import FakeParity, FakeSlot

if TYPE_CHECKING:
    from machines import Machine
    from world_of_many import World


class Mayhem:
    def __init__(self, world: World) -> None:
        self.world, self.draw = world, world.random
        self.done: list[str] = []

    def strike(self) -> None:
        """One fault."""
        faults = [
            self.kill_trainers, self.kill_keeper, self.kill_coordinator, self.kill_keepers, self.kill_node,
            self.kill_nodes, self.freeze, self.cut, self.flip, self.exclude, self.all_at_once, self.storm,
        ]  # fmt: skip
        fault = self.draw.choice(faults)
        self.done.append(f"{self.world.now:.2f} {fault.__name__}")
        fault()

    def _members(self) -> list[Machine]:
        return [self.world.machines[node_id] for node_id in self.world.launcher.order]

    def kill_trainers(self) -> None:
        for machine in self._members():
            for trainer in machine.trainers:
                if self.draw.random() < 0.4:
                    machine.kill_trainer(trainer)

    def kill_keeper(self) -> None:
        self._kill_keeper(self.draw.choice(self._members()))

    def kill_coordinator(self) -> None:
        self._kill_keeper(self._members()[0])

    def kill_keepers(self) -> None:
        for machine in self._members():
            if self.draw.random() < 0.5:
                self._kill_keeper(machine)

    def _kill_keeper(self, machine: Machine) -> None:
        if machine.core is None or not machine.alive:
            return
        if self.draw.random() < 0.5:
            machine.dies_after = self.draw.randrange(12)  # in the middle of what it does next
        else:
            machine.kill_keeper()

    def kill_node(self) -> None:
        self._kill_nodes([self.draw.choice(self._members())])

    def kill_nodes(self) -> None:
        """As many as one group may lose, at once."""
        machines = self._members()
        self._kill_nodes(self.draw.sample(machines, min(len(machines), self.world.setting.losses + 1)))

    def _kill_nodes(self, machines: list[Machine]) -> None:
        for machine in machines:
            if machine.alive and self.world.rules.may_lose(machine.node_id):
                self.done.append(f"  {machine.node_id} is dead")
                machine.alive, machine.core = False, None
                self.world.rules.lost_memory()
                self.world.network.recompute(machine)
                self.world.launcher.again(self.draw.uniform(0.1, 0.8))
        self.world.rules.memory_changed()

    def exclude(self) -> None:
        """The launcher leaves out a node whose keeper and trainers are alive."""
        machine = self.draw.choice(self._members())
        if machine.alive and self.world.rules.may_lose(machine.node_id):
            self.done.append(f"  without {machine.node_id}")
            self.world.launcher.unwanted.add(machine.node_id)
            self.world.rules.lost_memory()
            self.world.launcher.again(self.draw.uniform(0.1, 0.4))

    def freeze(self) -> None:
        machine = self.draw.choice(self._members())
        if machine.alive and not machine.frozen:
            self.world.network.freeze(machine, self.draw.choice([0.3, 1.0, 4.0]))

    def cut(self) -> None:
        one, other = self.draw.sample(self._members(), 2)
        self.world.network.cut(one.node_id, other.node_id, self.draw.choice([0.2, 1.0, 5.0]))

    def flip(self) -> None:
        """A bit in memory that is in use, of a node that the code could lose."""
        rules = self.world.rules
        machine = self.draw.choice(self._members())
        if not machine.alive or not rules.may_lose(machine.node_id):
            return
        slots = [slot for slot in machine.slots() if slot.whole and slot.sealed == slot.whole[1]]
        places: list[FakeSlot | FakeParity] = [*slots, *machine.parities.values()]
        if not places:
            return
        place = self.draw.choice(places)
        place.damaged = True
        version = place.found.key.version if isinstance(place, FakeParity) else place.sealed
        assert version is not None
        rules.hurt.add((machine.node_id, version))
        self.done.append(f"  {machine.node_id} {version}")
        rules.lost_memory()

    def all_at_once(self) -> None:
        """Trainers, keepers and a node in one instant, as when a rack loses power for a moment."""
        self.kill_trainers()
        self.kill_keepers()
        self.kill_node()

    def storm(self) -> None:
        """The network is bad for a while."""
        world = self.world
        world.drop_rate, world.slow_rate = 0.3, 0.5
        world.later(self.draw.uniform(0.5, 3.0), self._calm)

    def _calm(self) -> None:
        self.world.drop_rate, self.world.slow_rate = 0.02, 0.08
