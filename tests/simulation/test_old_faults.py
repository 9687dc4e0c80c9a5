"""The faults that forced the rules, put back in one by one: the simulation must find each of them.

PROTOCOL B 1 to 5. A simulation that stays green without a rule does not check that rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lives_of_many import live
from many import Setting
from test_many_nodes import started

from keepstep.keeper import events as e
from keepstep.keeper import protecting, snapshots
from keepstep.keeper.job import Job
from keepstep.keeper.node import FREE, SEALED, Member, Node, Slot
from keepstep.keeper.words import Orders

SEEDS = 40


def only_a_newer_protected_version_frees_a_slot(patch: pytest.MonkeyPatch) -> None:
    """B1, literally: "overwritten only when a newer one has reached the protection on all ranks"."""

    def free_slot(node: Node, member: Member) -> Slot | None:
        arena = node.arenas.get(member.arena_id)
        named = {grant.slots.get(member.index) for grant in node.grants.open}
        protected = node.kept.protected
        for slot in arena.slots if arena is not None else []:
            old = slot.state == SEALED and protected is not None and slot.version is not None
            if slot.index not in named and (slot.state == FREE or (old and slot.version < protected)):
                return slot
        return None

    patch.setattr(snapshots, "_free_slot", free_slot)
    patch.setattr(Job, "_expose", lambda self, now: None)


def a_node_skips_on_its_own(patch: pytest.MonkeyPatch) -> None:
    """B2: who could not honour a grant is left out, and the version counts as complete for the rest."""

    def settle(self: Job, now: float) -> None:
        for grant in self.open:
            if len(grant.said) == len(self.views) and grant.versions:
                grant.void = None
                grant.versions = {max(grant.versions)}
                grant.sealed = len(self.views)
        real(self, now)

    real = Job._settle
    patch.setattr(Job, "_settle", settle)


def a_group_protects_what_is_newest_for_it(patch: pytest.MonkeyPatch) -> None:
    """B3: no common target; what is late for a version is dropped."""

    def new_target(self: Job, now: float) -> None:
        before = self.orders
        real(self, now)
        if self.orders is not before:
            self.retry_at = now

    def protect(self: Job, now: float) -> None:
        orders = self.orders
        if orders.target is not None and orders.complete is not None and orders.complete > orders.target:
            self._abandon("a newer version is there", now)
            self.retry_at = now
        real_protect(self, now)

    real, real_protect = Job._new_target, Job._protect
    patch.setattr(Job, "_new_target", new_target)
    patch.setattr(Job, "_protect", protect)


def one_parity_buffer(patch: pytest.MonkeyPatch) -> None:
    """B4: the next version is encoded over the one that is protected."""

    def take_orders(node: Node) -> None:
        before = node.exchange
        real(node)
        if node.exchange is not None and node.exchange is not before:
            for found in list(node.sets.values()):
                node.do(e.FreeParity(found.buffer_id))
            node.sets.clear()

    real = protecting.take_orders
    patch.setattr(protecting, "take_orders", take_orders)


def a_reader_pins_its_slot(patch: pytest.MonkeyPatch) -> None:
    """B5: "a slot that the keeper is reading is never written": a peer that hangs in mid-fetch holds it."""

    def retain(self: Orders) -> set[Any]:
        found = {self.protected, self.complete, self.target, self.base, *pinned}
        return {version for version in found if version is not None}

    def abandon(self: Job, reason: str, now: float) -> None:
        pinned.add(self.orders.target)
        real(self, reason, now)

    pinned: set[Any] = set()
    real = Job._abandon
    patch.setattr(Orders, "retain", property(retain))
    patch.setattr(Job, "_abandon", abandon)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Setting, str]] = {
    only_a_newer_protected_version_frees_a_slot: (Setting(3, losses=1), "rule 6"),
    a_node_skips_on_its_own: (Setting(3, losses=1), "rule (1|2|3|6)"),
    a_group_protects_what_is_newest_for_it: (Setting(4, losses=1, slots=4), "rule 6"),
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
            for seed in range(SEEDS):
                live(seed, setting)
    live(0, setting)  # and it is gone again
    assert started(0, setting)
