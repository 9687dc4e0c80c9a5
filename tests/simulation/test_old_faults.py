"""Faults of earlier designs, put back in one by one: the simulation must find each of them.

A simulation that passes without a rule does not check that rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from lives_of_many import live
from world_of_many import Setting

from keepstep.keeper.coordinator import grants, protection
from keepstep.keeper.coordinator.messages import Orders
from keepstep.keeper.coordinator.state import CoordinatorState
from keepstep.keeper.node import protection as node_protection
from keepstep.keeper.node import snapshots
from keepstep.keeper.node.effects import FreeParity
from keepstep.keeper.node.state import FREE, SEALED, NodeState, RegisteredTrainer, Slot

SEEDS = 40
SLOW = (0.4, 0.6)


def only_a_newer_protected_version_frees_a_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot is overwritten only when a newer version is protected on all ranks."""

    def free_slot(node: NodeState, trainer: RegisteredTrainer) -> Slot | None:
        arena = node.arenas.by_id.get(trainer.arena_id)
        in_use = {grant.slots.get(trainer.index) for grant in node.grants.open}
        protected = node.orders.active.protected
        for slot in arena.slots if arena is not None else []:
            old = (
                slot.state == SEALED and protected is not None and slot.version is not None and slot.version < protected
            )
            if slot.index not in in_use and (slot.state == FREE or old):
                return slot
        return None

    patch.setattr(snapshots, "_free_slot", free_slot)
    patch.setattr(protection, "expose", lambda job, now: None)


def a_node_skips_on_its_own(patch: pytest.MonkeyPatch) -> None:
    """A rank that could not honour a grant is left out, and the version counts as complete for the others."""

    def settle(job: CoordinatorState, now: float) -> None:
        for grant in job.grants.open:
            if len(grant.progress) == len(job.views) and grant.versions:
                grant.void = None
                grant.versions = {max(grant.versions)}
                grant.num_sealed = len(job.views)
        real(job, now)

    real = grants.settle
    patch.setattr(grants, "settle", settle)


def what_is_late_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """A newer version takes the place of the one that is being protected."""

    def protect(job: CoordinatorState, now: float) -> None:
        orders = job.orders
        if orders.target is not None and orders.complete is not None and orders.complete > orders.target:
            job.change(target=None, attempt=orders.attempt + 1)
        real(job, now)

    real = protection.protect
    patch.setattr(protection, "protect", protect)


def groups_choose_what_to_protect(patch: pytest.MonkeyPatch) -> None:
    """Each group protects what is the newest when it begins, and the groups never share a version."""

    def orders_for(self: CoordinatorState, node_id: str) -> Orders:
        orders = real(self, node_id)
        group = orders.group
        if orders.target is None or group is None or self.views.keys() <= set(group.members):
            return orders
        if next(iter(self.views)) in group.members:
            return orders
        return msgspec.structs.replace(orders, target=orders.complete)

    real = CoordinatorState.orders_for
    patch.setattr(CoordinatorState, "orders_for", orders_for)


def one_parity_buffer(patch: pytest.MonkeyPatch) -> None:
    """The next version is encoded over the one that is protected."""

    def follow_orders(node: NodeState) -> None:
        before = node.protection.exchange
        real(node)
        if node.protection.exchange is not None and node.protection.exchange is not before:
            for parity_set in list(node.protection.sets.values()):
                node.emit(FreeParity(parity_set.buffer_id))
            node.protection.sets.clear()

    real = node_protection.follow_orders
    patch.setattr(node_protection, "follow_orders", follow_orders)


def a_reader_pins_its_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot that is being read is never written: a peer that hangs in mid-fetch holds it."""

    def retain(self: Orders) -> set[Any]:
        versions = {self.protected, self.complete, self.target, self.base, *pinned}
        return {version for version in versions if version is not None}

    def abandon(job: CoordinatorState, reason: str, now: float) -> None:
        pinned.add(job.orders.target)
        real(job, reason, now)

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
