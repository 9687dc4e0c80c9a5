"""A thousand keepers without faults: what a report costs the coordinator, and what a version costs each node.

Every node reports to the coordinator: its work per version grows with their number and no faster. A node
exchanges messages with its coordinator and its group: its work does not grow at all.
"""

from __future__ import annotations

from statistics import median

import pytest
from machines import Machine
from rules import Rules
from world_of_many import Network, Setting, World

from counting import counted_lines
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.effects import Effect, SendToPeer
from keepstep.keeper.node.events import Event, PeerMessage
from keepstep.parity.placement import NodePlace, cut_groups
from keepstep.types import Version

# Of Python, counted: no machine is too busy for it. It was 203.
MAX_REPORT_LINES = 1000
MAX_GROWTH = 2.0


class Neighbours(Network):
    """Links to the coordinator and within groups only: the keepers are measured, not the network."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        setting = world.setting
        places = [NodePlace(f"n{number}") for number in range(setting.nodes)]
        groups = cut_groups(places, setting.group_size, setting.losses)
        named = [[places[index].node_id for index in group] for group in groups]
        self.near = {node_id: sorted({"n0", *group}) for group in named for node_id in group}

    def others(self, machine: Machine) -> list[Machine]:
        if machine.node_id == "n0":
            return super().others(machine)
        found = self.world.machines
        return [found[n] for n in self.near[machine.node_id] if n != machine.node_id and n in found]


class NoRules(Rules):
    """No rule is checked: reading all memories after every event is for small jobs."""

    def memory_changed(self) -> None: ...

    def promised(self, machine: Machine, version: Version) -> None: ...

    def written(self, machine: Machine, slot: object) -> None: ...

    def _current(self, machine: Machine) -> bool:
        return True


class Counted(World):
    def __init__(self, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.report_lines: list[int] = []
        self.node_lines: list[int] = []
        self.num_events = self.num_orders = 0
        monkeypatch.setattr("world_of_many.Network", Neighbours)
        monkeypatch.setattr("world_of_many.Rules", NoRules)
        super().__init__(5, Setting(nodes, losses=1, slots=3))
        self.step_s, self.drop_rate, self.twice_rate, self.slow_rate, self.void_rate = 0.5, 0.0, 0.0, 0.0, 0.0
        real = Core.handle

        def handle(core: Core, event: Event, now: float) -> list[Effect]:
            if core.card.node_id not in ("n0", "n9"):
                return real(core, event, now)
            with counted_lines() as count:
                effects = real(core, event, now)
            if core.card.node_id == "n9":
                self.node_lines.append(count.lines)
                return effects
            self.num_events += 1
            self.num_orders += sum(isinstance(effect, SendToPeer) for effect in effects)
            if isinstance(event, PeerMessage) and isinstance(event.message, Report):
                self.report_lines.append(count.lines)
            return effects

        monkeypatch.setattr(Core, "handle", handle)

    def protect(self) -> None:
        before = self.rules.covers
        assert self.run(60.0, lambda: self.rules.covers > before), "nothing is protected"

    def figures(self) -> dict[str, float]:
        """Of the second protected version: what is measured, and what is counted."""
        self.protect()
        self.num_events = self.num_orders = 0
        self.protect()
        nodes = self.setting.nodes
        return {
            "lines per report": median(self.report_lines),
            "lines per event of a node": median(self.node_lines),
            "events of the coordinator per version and node": self.num_events / nodes,
            "orders per version and node": self.num_orders / nodes,
        }


@pytest.mark.timeout(300)
def test_the_cost_of_a_report_does_not_grow_with_the_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, dict[str, float]] = {}
    for nodes in (100, 1000):
        with monkeypatch.context() as patch:
            found[nodes] = Counted(nodes, patch).figures()
            print(nodes, {name: round(value, 1) for name, value in found[nodes].items()})
    for name, value in found[1000].items():
        assert value <= MAX_GROWTH * found[100][name], f"{name} grows with the number of nodes: {found}"
    assert found[1000]["lines per report"] <= MAX_REPORT_LINES
