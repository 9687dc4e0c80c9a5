"""The faults that forced the rules, put back in one by one: the simulation must find each of them.

PROTOCOL B 1 to 5. A simulation that stays green without a rule does not check that rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from lives_of_many import live
from world_of_many import Setting

from keepstep.keeper.coordinator import grants, protection
from keepstep.keeper.coordinator.coordinator import Coordinator
from keepstep.keeper.coordinator.messages import Orders
from keepstep.keeper.coordinator.state import CoordinatorState
from keepstep.keeper.node import protection as node_protection
from keepstep.keeper.node import snapshots
from keepstep.keeper.node.effects import FreeParity
from keepstep.keeper.node.state import FREE, SEALED, NodeState, RegisteredTrainer, Slot

SEEDS = 40
SLOW = (0.4, 0.6)


def only_a_newer_protected_version_frees_a_slot(patch: pytest.MonkeyPatch) -> None:
    """B1, literally: "overwritten only when a newer one has reached the protection on all ranks"."""

    def free_slot(node: NodeState, member: RegisteredTrainer) -> Slot | None:
        arena = node.arenas.get(member.arena_id)
        named = {grant.slots.get(member.index) for grant in node.grants.open}
        protected = node.kept.protected
        for slot in arena.slots if arena is not None else []:
            old = (
                slot.state == SEALED and protected is not None and slot.version is not None and slot.version < protected
            )
            if slot.index not in named and (slot.state == FREE or old):
                return slot
        return None

    patch.setattr(snapshots, "_free_slot", free_slot)
    patch.setattr(protection, "expose", lambda board, now: None)


def a_node_skips_on_its_own(patch: pytest.MonkeyPatch) -> None:
    """B2: who could not honour a grant is left out, and the version counts as complete for the rest."""

    def settle(board: CoordinatorState, now: float) -> None:
        for grant in board.open:
            if len(grant.said) == len(board.views) and grant.versions:
                grant.void = None
                grant.versions = {max(grant.versions)}
                grant.sealed = len(board.views)
        real(board, now)

    real = grants.settle
    patch.setattr(grants, "settle", settle)


def what_is_late_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """B3: a newer version takes the place of the one that is being protected."""

    def protect(board: CoordinatorState, now: float) -> None:
        orders = board.orders
        if orders.target is not None and orders.complete is not None and orders.complete > orders.target:
            board.change(target=None, attempt=orders.attempt + 1)
        real(board, now)

    real = protection.protect
    patch.setattr(protection, "protect", protect)


def groups_choose_what_to_protect(patch: pytest.MonkeyPatch) -> None:
    """B3: each group protects what is the newest when it begins, and the groups never share a version."""

    def orders_for(self: Coordinator, node_id: str) -> Orders:
        orders = real(self, node_id)
        group = orders.group
        if orders.target is None or group is None or self.views.keys() <= set(group.members):
            return orders
        if next(iter(self.views)) in group.members:
            return orders
        return msgspec.structs.replace(orders, target=orders.complete)

    real = Coordinator.orders_for
    patch.setattr(Coordinator, "orders_for", orders_for)


def one_parity_buffer(patch: pytest.MonkeyPatch) -> None:
    """B4: the next version is encoded over the one that is protected."""

    def take_orders(node: NodeState) -> None:
        before = node.exchange
        real(node)
        if node.exchange is not None and node.exchange is not before:
            for found in list(node.sets.values()):
                node.do(FreeParity(found.buffer_id))
            node.sets.clear()

    real = node_protection.take_orders
    patch.setattr(node_protection, "take_orders", take_orders)


def a_reader_pins_its_slot(patch: pytest.MonkeyPatch) -> None:
    """B5: "a slot that the keeper is reading is never written": a peer that hangs in mid-fetch holds it."""

    def retain(self: Orders) -> set[Any]:
        found = {self.protected, self.complete, self.target, self.base, *pinned}
        return {version for version in found if version is not None}

    def abandon(board: CoordinatorState, reason: str, now: float) -> None:
        pinned.add(board.orders.target)
        real(board, reason, now)

    pinned: set[Any] = set()
    real = protection.abandon
    patch.setattr(Orders, "retain", property(retain))
    patch.setattr(protection, "abandon", abandon)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Setting, str]] = {
    only_a_newer_protected_version_frees_a_slot: (Setting(3, losses=1), "rule 6"),
    a_node_skips_on_its_own: (Setting(3, losses=1), "rule (1|2|3|6)"),
    what_is_late_is_dropped: (Setting(4, losses=1, slots=4, pace_s=SLOW), "rule 6"),
    groups_choose_what_to_protect: (Setting(6, losses=1, group_size=3, slots=4, pace_s=SLOW), "rule (5|6)"),
    one_parity_buffer: (Setting(3, losses=1), "rule 2"),
    a_reader_pins_its_slot: (Setting(3, losses=1), "rule 6"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_simulation_finds_an_old_fault(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, rule = FAULTS[fault]
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError, match=rule):
            live_all(setting)
    live(0, setting)  # and it is gone again


def live_all(setting: Setting) -> None:
    for seed in range(SEEDS):
        live(seed, setting)
