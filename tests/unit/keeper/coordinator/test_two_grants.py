"""Three slots: the next grant is given before the last one is written. Reports of one must not count for the other.

One version is complete, two may be in progress; they are used, committed and closed in order.
"""

from __future__ import annotations

import pytest
from paper import Node

from keepstep.arena.records import Grant
from keepstep.control.messages import Committed, Void, WantArena
from keepstep.keeper.coordinator.grants import SERIALIZED_GRANTS
from keepstep.keeper.node.events import FromTrainer
from keepstep.layout import SnapshotSize


def started(ranks: int = 1, slots: int = 3) -> Node:
    node = Node(ranks, slots)
    node.start()
    node.snapshot(0)
    return node


def grants(node: Node, index: int = 0) -> tuple[Grant, ...]:
    page = node.own(index).grant
    assert page is not None
    return page.both


def begin_both(node: Node) -> list[tuple[int, int]]:
    """All ranks write under both grants. Returns (step, slot) of each."""
    found = [(grant.step, grant.slot) for grant in grants(node)]
    assert len(found) == 2
    for index in range(node.ranks):
        for step, slot in found:
            node.write(index, step, slot=slot)
    return found


@pytest.mark.parametrize(("slots", "given"), [(2, 1), (3, 2), (4, 2)])
def test_so_many_snapshots_may_be_written_at_once(slots: int, given: int) -> None:
    node = started(slots=slots)
    open_grants = [grant for grant in node.core.grants.open if not grant.resolved]
    assert len(open_grants) == given
    assert len({grant.step for grant in open_grants}) == given
    assert len({grant.slots[0] for grant in open_grants}) == given


def test_every_step_is_captured_while_each_is_committed_after_the_next_has_begun() -> None:
    """The copy takes a little longer than a step: k is committed and sealed between the takes k+1 and k+2."""
    node = started(ranks=2)
    done, flying = [0], [node.core.grants.open[0].step]
    for index in range(2):
        node.write(index, flying[0], slot=grants(node, index)[0].slot)
    for _ in range(20):
        step = flying[-1] + 1
        due = next(grant for grant in node.core.grants.open if grant.step == step)
        for index in range(2):
            node.write(index, step, slot=due.slots[index])
        earlier = node.core.grants.open[0]
        assert earlier.step == flying[-1]
        for index in range(2):
            node.commit(index, earlier.step, earlier.slots[index])
        node.seal()
        done.append(earlier.step)
        flying.append(step)
    assert done == list(range(21))
    assert node.core.orders.active.complete == node.version(20)


def test_the_second_can_be_void_without_harm_to_the_first() -> None:
    node = started()
    (first, slot), (second, other) = begin_both(node)
    node.void(0, second, "outgrown", slot=other)
    node.commit(0, first, slot)
    node.seal()
    assert node.core.orders.active.complete == node.version(first)


def test_the_first_can_be_void_without_harm_to_the_second() -> None:
    node = started()
    (first, slot), (second, other) = begin_both(node)
    node.void(0, first, "the copy failed", slot=slot)
    node.commit(0, second, other)
    node.seal()
    assert node.core.orders.active.complete == node.version(second)


def test_the_next_keeper_takes_over_both_grants() -> None:
    """It would grant a slot that is being written, or never learn the outcome."""
    node = started(ranks=2)
    both = begin_both(node)
    before = grants(node)
    node.replace_keeper()
    for index in range(2):
        node.register(index, rejoin=True)
    assert grants(node) == before, "a slot was granted that is being written"
    for step, slot in both:
        for index in range(2):
            node.commit(index, step, slot)
        node.seal()
        assert node.core.orders.active.complete == node.version(step)
    node.assert_snapshots_continue(both[-1][0] + 1)


@pytest.mark.parametrize("lost", [0, 1])
def test_reports_of_both_grants_are_kept_until_the_other_rank_is_back(lost: int) -> None:
    node = started(ranks=2)
    (first, slot), (second, other) = begin_both(node)
    node.replace_keeper()
    node.register(lost, rejoin=True)
    node.void(lost, first, "the copy failed", slot=slot)
    node.commit(lost, second, other)
    node.register(1 - lost, rejoin=True)
    node.commit(1 - lost, first, slot)
    node.commit(1 - lost, second, other)
    node.seal()
    assert node.core.orders.active.complete == node.version(second)


@pytest.mark.parametrize("effects", range(6))
def test_snapshots_continue_after_a_keeper_died_while_giving_the_second_grant(effects: int) -> None:
    node = started(ranks=2)
    first = node.core.grants.open[0]
    for index in range(2):
        node.write(index, first.step, slot=first.slots[index])
        node.commit(index, first.step, first.slots[index], report=False)
    node.stop_after = effects
    node.report_commit(0, first.step, first.slots[0])
    node.report_commit(1, first.step, first.slots[1])
    node.seal()
    node.replace_keeper()
    for index in range(2):
        node.register(index, rejoin=True)
    node.seal()
    complete = node.core.orders.active.complete
    assert complete is not None
    assert complete.step >= 0
    node.assert_snapshots_continue(first.step + 1)


def test_grants_are_serialized_for_a_while_after_an_overlapping_one_was_void() -> None:
    """A rank could not keep up: the copies of the others for that step were lost."""
    node = started()
    (first, slot), (second, other) = begin_both(node)
    node.void(0, second, "the snapshot before it is still being copied", slot=other)
    node.commit(0, first, slot)
    node.seal()
    for number in range(1, SERIALIZED_GRANTS + 1):
        waiting = [grant for grant in node.core.grants.open if not grant.resolved]
        assert len(waiting) == (1 if number < SERIALIZED_GRANTS else 2), number
        node.snapshot_under(waiting[0])


def test_with_two_slots_grants_never_overlap() -> None:
    node = started(slots=2)
    for step in range(1, 30):
        assert [grant.before for grant in grants(node)] == [None]
        node.snapshot(step)


# A rank that moves into a larger arena


def grow(node: Node, index: int = 0) -> None:
    node.handle(FromTrainer(index, WantArena(SnapshotSize(2, 2, 2), node.slots, 0, 9)))


def written(node: Node, index: int, grant: Grant) -> tuple[int, str, int]:
    """The rank begins to write. Returns (step, arena, slot), as it would report them."""
    step = max(node.progress[index] + 1, grant.step)
    node.write(index, step, slot=grant.slot)
    return step, node.own(index).arena_id, grant.slot


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_keeper_that_dies_while_a_rank_moves_finds_its_grants_in_the_new_arena(slots: int) -> None:
    node = started(slots=slots)
    node.void(0, node._usable(0).step, "outgrown", slot=node._usable(0).slots[0])
    grow(node)
    node.replace_keeper()
    node.register(0, rejoin=True, arena_id=node.own(0).arena_id)
    for number in range(6):
        (grant, *_) = [grant for grant in grants(node) if node.own(0).slots[grant.slot][0] == "free"] or grants(node)
        node.assert_snapshots_continue(grant.step + number)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_rank_that_never_received_the_new_arena_continues_in_the_old_one(slots: int) -> None:
    node = started(slots=slots)
    old = node.own(0).arena_id
    node.void(0, node._usable(0).step, "outgrown", slot=node._usable(0).slots[0])
    grow(node)
    node.replace_keeper()
    node.register(0, rejoin=True, arena_id=old)
    complete = node.core.orders.active.complete
    for _ in range(6):
        (grant, *_) = [grant for grant in node.core.grants.open if not grant.resolved]
        assert grant.arenas[0] == old
        step = max(grant.step, node.progress[0] + 1)
        node.progress[0] = step
        node.arenas[old].slots[grant.slots[0]] = ("committed", node.version(step))
        node.handle(FromTrainer(0, Committed(old, grant.slots[0], node.version(step))))
        node.seal()
        assert node.core.orders.active.complete == node.version(step) != complete


def test_a_repeated_void_of_the_old_arena_does_not_count_in_the_new_one() -> None:
    """Though the keeper reads no progress of the rank, as while the new arena is empty."""
    node = started()
    for first, second in iter(lambda: grants(node), ()):
        if second.slot == 0:
            break
        node.snapshot(first.step)
    node.write(0, first.step, slot=first.slot)
    node.commit(0, first.step, first.slot)
    void = FromTrainer(0, Void(node.own(0).arena_id, second.slot, node.version(second.step), "outgrown"))
    node.progress[0] = second.step
    node.handle(void)
    grow(node)
    node.progress[0] = -1
    node.seal()
    grant = grants(node)[0]
    node.progress[0] = second.step + 7
    written(node, 0, grant)
    node.replace_keeper()
    node.register(0, rejoin=True, arena_id=node.own(0).arena_id)
    node.handle(void)
    (same,) = [one for one in node.core.grants.open if one.serial == grant.serial]
    assert not same.resolved
    others = [one for one in node.core.grants.open if one.serial != grant.serial]
    assert all(one.slots[0] != grant.slot for one in others), "a slot is granted that is being written"


def test_the_record_of_the_new_arena_names_no_grant_of_the_old_one() -> None:
    node = started(ranks=2)
    first, second = grants(node)
    for index in (0, 1):
        node.write(index, first.step, slot=first.slot)
        node.commit(index, first.step, first.slot)
    node.write(1, second.step, slot=second.slot)
    node.void(0, second.step, "outgrown", slot=second.slot)
    grow(node)
    node.seal()
    assert second.serial not in {grant.serial for grant in grants(node, 0)}


def test_with_four_slots_a_grant_that_is_still_being_written_stays_recorded() -> None:
    """The grant after it was void at once, so that a third was given."""
    node = started(slots=4)
    first, second = grants(node)
    node.write(0, first.step, slot=first.slot)
    node.void(0, second.step, "the snapshot before it is still being copied", slot=second.slot)
    assert first.serial in {grant.serial for grant in grants(node)}
    node.replace_keeper()
    node.register(0, rejoin=True)
    node.void(0, second.step, "again", slot=second.slot)
    for _ in range(6):
        for grant in node.core.grants.open:
            assert grant.serial == first.serial or grant.slots.get(0) != first.slot or grant.resolved
        waiting = [g for g in node.core.grants.open if not g.resolved and g.serial != first.serial]
        if not waiting:
            break
        grant = waiting[0]
        step = max(grant.step, node.progress[0] + 1)
        node.commit(0, step, node.write(0, step, slot=grant.slots[0]))
        node.seal()
    node.commit(0, first.step, first.slot)
    node.seal()
    node.assert_snapshots_continue(node.progress[0] + 1)
