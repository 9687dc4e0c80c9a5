"""The size of orders and reports in a job of a thousand nodes."""

from __future__ import annotations

import msgspec

from counting import counted_lines
from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator import coordinator, messages
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import RESTORING, SERVING, CoordinatorState, Deadlines
from keepstep.parity.placement import NodePlace, cut_groups
from keepstep.recovery.inventory import Holding, Inventory, ParitySet, SetKey
from keepstep.types import Incarnation, Version

NODES, LOCAL = 1000, 8
BEFORE, NOW = Incarnation(3, 5), Incarnation(4, 7)
NAMES = [f"gpu-node-{number:04d}" for number in range(NODES)]
LOST = 7
"""it has lost everything"""


def reports() -> list[Report]:
    """Every second node has the newest step; all have the one before, which is protected."""
    older, newer = Version(BEFORE, 1000), Version(BEFORE, 1001)
    groups = cut_groups([NodePlace(name) for name in NAMES], 8, 1)
    group_of = {node: group for group in groups for node in group}
    found = []
    for node, name in enumerate(NAMES):
        ranks = tuple(range(LOCAL * node, LOCAL * (node + 1)))
        held = [
            Holding(version, rank, LOCAL * NODES, rank % LOCAL, LOCAL, f"{rank:032x}", slot, 17 << 30)
            for slot, version in enumerate((older, newer) if node % 2 == 0 else (older,))
            for rank in ranks
        ]
        group = group_of[node]
        members = tuple(NAMES[one] for one in group)
        rows = tuple(tuple(range(LOCAL * one, LOCAL * (one + 1))) for one in group)
        parity = ParitySet(SetKey(older, BEFORE, 3), 1, group.index(node), members, rows, LOCAL * NODES, "b" * 32)
        inventory = Inventory((), older) if node == LOST else Inventory(tuple(held), older, (), (parity,), older)
        card = NodeCard(name, "i" * 32, "10.0.0.1", 40000)
        found.append(
            Report(name, "i" * 32, NOW, 1, RESTORING, card, True, ranks, LOCAL * NODES, inventory=inventory, losses=1)
        )
    return found


def hear(job: CoordinatorState, said: list[Report], number: int, **changes: object) -> list[Report]:
    said = [msgspec.structs.replace(one, number=number, orders=job.orders_for(one.node_id), **changes) for one in said]
    for one in said:
        coordinator.receive(job, one, 1.0)
    return said


def size_of_orders(job: CoordinatorState) -> int:
    return max(len(messages.encode(job.orders_for(name))) for name in NAMES)


def test_the_plan_is_sent_to_each_node_until_all_have_loaded() -> None:
    job = CoordinatorState(NOW, dict.fromkeys(NAMES, ""), now=0.0, deadlines=Deadlines())
    first = reports()
    with counted_lines() as count:
        said = hear(job, first, 2)
    assert job.restore.plan is not None
    assert job.restore.plan.version == Version(BEFORE, 1000)
    order = job.orders_for(NAMES[LOST]).restore
    assert order is not None
    assert len(order.pieces) == LOCAL
    assert len(order.holders) == NODES - 1
    assert size_of_orders(job) < 40_000
    with counted_lines(count):
        said = hear(job, said, 3, restored=order.number)
    assert job.state == SERVING
    with counted_lines(count):
        said = hear(job, said, 4, state=SERVING, inventory=None, ready=True, room=True)
    assert job.orders.ready
    assert count.lines < 1000 * NODES, "no report has the coordinator go through all nodes"
    over = job.orders_for(NAMES[LOST]).restore
    assert over is not None
    assert (over.number, over.version, over.begin) == (order.number, order.version, True)
    assert size_of_orders(job) < 1000
    said = hear(job, said, 5)
    assert max(len(messages.encode(one)) for one in said) < 2000, "a report repeats the orders"
