"""Three slots: the next grant is given before the last one is written. Words of one must not count for the other.

One version is complete, two may be on their way; they are used, committed and settled in order.
"""

from __future__ import annotations

import pytest
from paper import Node

from keepstep.arena.header import Grant
from keepstep.keeper.granting import ONE_BY_ONE


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
def test_so_many_may_be_written_at_once(slots: int, given: int) -> None:
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
    assert node.core.kept.complete == node.version(20)


def test_the_second_can_be_void_without_harm_to_the_first() -> None:
    node = started()
    (first, slot), (second, other) = begin_both(node)
    node.void(0, second, "outgrown", slot=other)
    node.commit(0, first, slot)
    node.seal()
    assert node.core.kept.complete == node.version(first)


def test_the_first_can_be_void_without_harm_to_the_second() -> None:
    node = started()
    (first, slot), (second, other) = begin_both(node)
    node.void(0, first, "the copy failed", slot=slot)
    node.commit(0, second, other)
    node.seal()
    assert node.core.kept.complete == node.version(second)


def test_both_are_known_to_the_keeper_that_comes_after() -> None:
    """It would grant a slot again that is being written, or never hear the end of it."""
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
        assert node.core.kept.complete == node.version(step)
    node.works(both[-1][0] + 1)


@pytest.mark.parametrize("lost", [0, 1])
def test_words_of_both_are_heard_though_the_other_rank_is_not_back(lost: int) -> None:
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
    assert node.core.kept.complete == node.version(second)


@pytest.mark.parametrize("effects", range(6))
def test_a_keeper_that_dies_while_it_gives_the_second_leaves_nothing_stuck(effects: int) -> None:
    node = started(ranks=2)
    first = node.core.grants.open[0]
    for index in range(2):
        node.write(index, first.step, slot=first.slots[index])
        node.commit(index, first.step, first.slots[index], say=False)
    node.stop_after = effects
    node.say_committed(0, first.step, first.slots[0])
    node.say_committed(1, first.step, first.slots[1])
    node.seal()
    node.replace_keeper()
    for index in range(2):
        node.register(index, rejoin=True)
    node.seal()
    complete = node.core.kept.complete
    assert complete is not None
    assert complete.step >= 0
    node.works(first.step + 1)


def test_after_one_that_was_void_grants_wait_for_each_other_for_a_while() -> None:
    """A rank could not keep up: what the others copied for that step was for nothing."""
    node = started()
    (first, slot), (second, other) = begin_both(node)
    node.void(0, second, "the snapshot before it is still being copied", slot=other)
    node.commit(0, first, slot)
    node.seal()
    for number in range(1, ONE_BY_ONE + 1):
        waiting = [grant for grant in node.core.grants.open if not grant.resolved]
        assert len(waiting) == (1 if number < ONE_BY_ONE else 2), number
        node.snapshot_under(waiting[0])


def test_with_two_slots_nothing_is_given_ahead_whatever_happens() -> None:
    node = started(slots=2)
    for step in range(1, 30):
        assert [grant.before for grant in grants(node)] == [None]
        node.snapshot(step)
