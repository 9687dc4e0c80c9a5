"""The core of a keeper that replaced a dead one, and messages that are late, early or repeated.

Each of these cases once stopped snapshots, or lost one.

Two slots per rank.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from paper import NEED, Node

from keepstep.arena.records import Ledger, Progress
from keepstep.control.messages import (
    ArenaGiven,
    Committed,
    Complete,
    Done,
    Loaded,
    Refused,
    Registered,
    RestoreFrom,
    WantArena,
    WantRestore,
)
from keepstep.errors import Error
from keepstep.keeper.node.effects import Kill, WriteGrant
from keepstep.keeper.node.events import FromTrainer, LauncherSeen, ProcessDied, SlotSealed, Tick
from keepstep.layout import SnapshotSize
from keepstep.types import Incarnation, Version


def test_a_repeated_void_does_not_free_the_slot_that_is_being_written() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    node.progress[0] = 1
    node.void(0, 1, "no memory")
    slot = node.write(0, 2)  # under the grant after the void one
    node.replace_keeper()
    node.register(0, rejoin=True)
    node.void(0, 1, "no memory")
    grant = node.own(0).grant
    assert grant is not None
    assert grant.step <= 2, "a new grant was given while the trainer writes under the old one"
    node.commit(0, 2, slot)
    node.seal()
    assert node.core.orders.active.complete == node.version(2)


def test_a_repeated_commit_does_not_count_for_a_newer_grant_of_its_slot() -> None:
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    slot = node.write(0, 1)
    node.write(1, 1)
    node.commit(0, 1, slot)
    node.seal()
    node.void(1, 1, "no memory")  # void everywhere: the slot is granted again
    assert node.write(0, 2) == slot
    other = node.write(1, 2)
    node.replace_keeper()
    for index in range(2):
        node.register(index, rejoin=True)
    node.report_commit(0, 1, slot)
    assert node.core.grants.open[0].committed == {}
    node.commit(0, 2, slot)
    node.commit(1, 2, other)
    node.seal()
    assert node.core.orders.active.complete == node.version(2)


def test_a_slot_granted_to_only_one_rank_is_not_granted_again_before_it_is_resolved() -> None:
    node = Node(ranks=2)
    node.start()
    for index in range(2):
        node.commit(index, 0, node.write(index, 0))
    # The keeper dies when it has written the next grant of rank 0, and not that of rank 1.
    first = node.own(1).grant
    while node.own(0).grant == first and node.seals:
        effect = node.seals.pop(0)
        arena = node.arenas[effect.arena_id]
        arena.slots[effect.slot] = ("sealed", node.version(0))
        done = SlotSealed(arena.arena_id, effect.slot, node.version(0), node.info(node.version(0), arena.index))
        for planned in node.core.handle(done, 0.0):
            node._carry_out(planned)
            if isinstance(planned, WriteGrant):
                break
    mine, theirs = node.own(0).grant, node.own(1).grant
    assert mine is not None
    assert theirs is not None
    assert mine.serial != theirs.serial
    saw = 0 if mine.serial > theirs.serial else 1
    slot = node.write(saw, 1)
    node.replace_keeper()
    for index in range(2):
        node.register(index, rejoin=True)
    grant = node.own(saw).grant
    assert grant is not None
    assert grant.serial == max(mine.serial, theirs.serial), "the slot was granted again while it is being written"
    node.commit(saw, 1, slot)
    node.seal()
    node.assert_snapshots_continue(2)


def test_a_commit_reported_before_the_other_ranks_are_back_is_kept() -> None:
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    slots = [node.write(index, 1) for index in range(2)]
    node.replace_keeper()
    node.register(0, rejoin=True)
    node.commit(0, 1, slots[0])  # rank 1 still waits for a keeper
    node.register(1, rejoin=True)
    node.commit(1, 1, slots[1])
    node.seal()
    assert node.core.orders.active.complete == node.version(1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_void_reported_before_the_other_ranks_are_back_is_kept(first: int) -> None:
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    slots = [node.write(index, 1) for index in range(2)]
    node.replace_keeper()
    node.register(first, rejoin=True)
    node.void(first, 1, "the copy failed")
    node.register(1 - first, rejoin=True)
    node.commit(1 - first, 1, slots[1 - first])
    node.seal()
    node.assert_snapshots_continue(2)


def test_a_ledger_written_to_only_one_arena_does_not_keep_the_old_base_for_ever() -> None:
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    for index in range(2):
        node.handle(ProcessDied(100 + index))
    node.incarnation = None
    for index in range(2):
        node.register(index, pid=200 + index, known=False)
    node.seal()
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
        node.handle(FromTrainer(index, WantArena(NEED, 2, 0, 3)))
        node.handle(FromTrainer(index, Loaded(0, 4)))
    before = node.own(1).ledger
    assert before is not None
    assert before.base is not None
    node.snapshot(1)
    node.own(1).ledger = before  # the keeper died between the two writes
    node.replace_keeper()
    for index in range(2):
        node.register(index, rejoin=True, pid=200 + index)
    node.assert_snapshots_continue(2)


def test_a_rank_that_is_loaded_when_its_keeper_dies_is_loaded_for_the_next_one() -> None:
    """Everything but the last answer was received: the rank does not request its arena again."""
    node = Node()
    node.register(0, known=False)
    node.handle(FromTrainer(0, WantRestore(2)))
    node.handle(FromTrainer(0, WantArena(NEED, 2, 0, 3)))
    node.replace_keeper()
    node.register(0)
    node.sent.clear()
    node.handle(FromTrainer(0, Loaded(None, 4)))
    assert [message for _, message in node.sent if isinstance(message, Done)]
    node.assert_snapshots_continue(0)


def test_an_arena_that_is_given_back_late_does_not_change_the_incarnation_that_serves() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    old = dataclasses.replace(node.own(0), arena_id="stray", slots=[("free", None)] * 2)
    serving = node.core.incarnation
    old.ledger = Ledger(incarnation=Incarnation(serving.number, serving.nonce + 1), base=None, complete=None, serial=1)
    node.handle(node.described(old))
    assert node.core.incarnation == serving


@pytest.mark.parametrize("order", ["words first", "deaths first", "between"])
def test_a_version_committed_by_all_ranks_just_before_they_died_is_restored(order: str) -> None:
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    slots = [node.write(index, 1) for index in range(2)]
    for index in range(2):
        node.commit(index, 1, slots[index], report=False)
    words = [lambda i=i: node.report_commit(i, 1, slots[i]) for i in range(2)]
    deaths = [lambda i=i: node.handle(ProcessDied(100 + i)) for i in range(2)]
    acts = {
        "words first": [*words, *deaths],
        "deaths first": [*deaths, *words],
        "between": [words[0], node.seal, deaths[1], deaths[0], words[1]],
    }
    for act in acts[order]:
        act()
    node.seal()
    lost = node.version(1)
    for index in range(2):
        node.register(index, pid=200 + index, known=False)
    node.seal()
    node.sent.clear()
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
    answers = [message for _, message in node.sent if isinstance(message, RestoreFrom)]
    assert [answer.version for answer in answers] == [lost, lost]


def test_a_second_process_cannot_register_as_the_same_rank_in_one_incarnation() -> None:
    """It would restore `base` while the others are steps ahead, or write the same slots as the first one."""
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    node.sent.clear()
    node.register(1, pid=999)
    assert isinstance(node.sent[-1][1], Refused)
    node.handle(ProcessDied(101))
    node.register(1, pid=999)
    assert isinstance(node.sent[-1][1], Refused)
    assert node.core.trainers.registered[1].pid == 101


def test_grants_name_the_larger_arena_that_replaced_another() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    node.progress[0] = 1
    node.void(0, 1, "outgrown")
    node.handle(FromTrainer(0, WantArena(SnapshotSize(9, 9, 9), 2, 0, 5)))
    node.assert_snapshots_continue(2)
    assert list(node.arenas) == ["0.2"], "the old arena was not dropped"


def test_a_trainer_that_never_received_its_larger_arena_continues_in_the_old_one() -> None:
    """The keeper died between creating the larger one and the trainer's move: others held it, and gave it back."""
    node = Node()
    node.start()
    node.snapshot(0)
    small = node.own(0)
    slot = node.write(0, 1)
    large = dataclasses.replace(small, arena_id="0.2", generation=2, slots=[("free", None)] * 2, grant=None)
    node.arenas["0.2"] = large
    node.replace_keeper()
    node.register(0, rejoin=True, arena_id=small.arena_id)
    small.slots[slot] = ("committed", node.version(1))
    node.handle(FromTrainer(0, Committed(small.arena_id, slot, node.version(1))))
    node.seal()
    assert node.core.orders.active.complete == node.version(1)
    assert list(node.arenas) == [small.arena_id]
    node.assert_snapshots_continue(2)


def test_restoring_from_a_keeper_that_took_over_in_mid_training_is_refused_and_does_not_hang() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    node.replace_keeper()
    node.register(0, rejoin=True)
    node.sent.clear()
    node.handle(FromTrainer(0, WantRestore(9)))
    assert isinstance(node.sent[-1][1], Refused)


def test_a_rank_that_reports_loaded_after_another_died_is_refused() -> None:
    node = Node(ranks=2)
    for index in range(2):
        node.register(index, known=False)
    for index in range(2):
        node.handle(FromTrainer(index, WantArena(NEED, 2, 0, 3)))
    node.handle(ProcessDied(101))
    node.sent.clear()
    node.handle(FromTrainer(0, Loaded(None, 4)))
    (refused,) = [message for _, message in node.sent if isinstance(message, Refused)]
    assert isinstance(refused.error(), Error)


def test_ranks_that_loaded_different_versions_do_not_begin() -> None:
    """The dead keeper answered rank 0; that version is damaged since, and rank 1 gets the older one."""
    node = Node(ranks=2)
    node.start()
    for step in (0, 1):
        node.snapshot(step)
    for index in range(2):
        node.handle(ProcessDied(100 + index))
    for index in range(2):
        node.register(index, pid=200 + index, known=False)
    node.seal()
    node.handle(FromTrainer(0, WantRestore(2)))
    (answer,) = [message for _, message in node.sent if isinstance(message, RestoreFrom) and message.version]
    assert answer.version is not None
    assert answer.version.step == 1
    (slot,) = [i for i, (_, version) in enumerate(node.own(1).slots) if version and version.step == 1]
    node.own(1).slots[slot] = ("free", None)  # its header does not survive
    node.replace_keeper()
    for index in range(2):
        node.register(index, pid=200 + index)
    node.seal()
    node.sent.clear()
    node.handle(FromTrainer(0, Loaded(1, 4)))
    node.handle(FromTrainer(1, WantRestore(2)))
    (other,) = [message for _, message in node.sent if isinstance(message, RestoreFrom)]
    assert other.version is not None
    assert other.version.step == 0
    node.handle(FromTrainer(1, Loaded(0, 4)))
    refused = [conn for conn, message in node.sent if isinstance(message, Refused)]
    assert refused == [0]
    assert not [message for _, message in node.sent if isinstance(message, Done)]


def test_a_repeated_commit_of_a_complete_version_is_answered_with_complete() -> None:
    node = Node()
    node.start()
    slot = node.write(0, 0)
    node.commit(0, 0, slot)
    node.seal()
    node.replace_keeper()
    node.register(0, rejoin=True)
    node.sent.clear()
    node.report_commit(0, 0, slot)
    assert (0, Complete(node.version(0))) in node.sent


# What a new keeper does not have yet


def test_nothing_is_planned_before_the_launcher_has_given_back_the_last_arena() -> None:
    """New trainers register first. With the arena of one rank alone no version is whole."""
    for order in ((0, 1), (1, 0)):
        node = Node(ranks=2)
        node.start()
        for step in (0, 1):
            node.snapshot(step)
        saved = node.version(1)
        node.end_trainers()
        node.replace_keeper(give_back=False)
        node.sent.clear()
        for index in range(2):
            node.register(index, pid=200 + index, agreed=Incarnation(2, 5))
        for index in order:
            node.give_back(node.own(index))
        node.handle(LauncherSeen(99))
        node.seal()
        for index in range(2):
            node.handle(FromTrainer(index, WantRestore(2)))
        assert not [message for _, message in node.sent if isinstance(message, Refused)]
        assert node.restored() == [saved, saved]


def test_an_older_arena_that_is_given_back_first_is_not_restored() -> None:
    """Its versions are whole and its ledger names no newer ones: nothing would show that the job fell back."""
    node = Node()
    node.start()
    node.snapshot(0)
    old = dataclasses.replace(node.own(0), slots=list(node.own(0).slots))
    node.progress[0] = 1
    node.void(0, 1, "outgrown")
    node.handle(FromTrainer(0, WantArena(SnapshotSize(9, 9, 9), 2, 0, 5)))
    node.assert_snapshots_continue(2)
    newest = node.core.orders.active.complete
    assert newest is not None
    assert old.arena_id not in node.arenas
    node.end_trainers()
    node.replace_keeper(give_back=False)
    node.sent.clear()
    node.register(0, pid=200, agreed=Incarnation(2, 5))
    node.arenas[old.arena_id] = old  # its holder was not told to drop it
    node.give_back(old, node.own(0))
    node.handle(LauncherSeen(99))
    node.seal()
    node.handle(FromTrainer(0, WantRestore(2)))
    assert node.restored() == [newest]


def test_a_restore_waits_for_the_memory_of_the_last_trainer_to_register() -> None:
    """No launcher holds it. Rank 1 had registered with the keeper that died, and rank 0 had not."""
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    saved = node.version(0)
    node.end_trainers()
    node.register(1, pid=201, known=False, label="second")
    node.replace_keeper(give_back=False)
    node.sent.clear()
    node.register(0, pid=200, known=False, label="second")
    node.handle(FromTrainer(0, WantRestore(2)))
    assert node.restored() == [], "decided before rank 1 could give anything back"
    node.incarnation = Incarnation(2, 77)
    node.give_back(*node.arenas.values())
    node.register(
        1, pid=201, label="second"
    )  # of a later incarnation than the one that rank 0 opened: that one is over
    node.end_trainers(first_pid=200)
    for index in range(2):
        node.register(index, pid=300 + index, known=False, label="third")
    node.seal()
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
    assert node.restored() == [saved, saved]


def test_an_incarnation_with_too_low_a_number_is_refused_and_the_next_one_restores() -> None:
    """Its snapshots would count as older than what it had restored."""
    node = Node(ranks=2)
    node.start()
    for life in range(3):
        node.snapshot(life)
        node.end_trainers(first_pid=100 * (life + 1))
        for index in range(2):
            node.register(index, pid=100 * (life + 2) + index, known=False)
        node.seal()
        for index in range(2):
            node.handle(FromTrainer(index, WantRestore(2)))
            node.handle(FromTrainer(index, WantArena(NEED, 2, 0, 3)))
            node.handle(FromTrainer(index, Loaded(life, 4)))
    node.snapshot(3)
    saved = node.version(3)
    node.end_trainers(first_pid=400)
    node.replace_keeper(give_back=False)
    node.sent.clear()
    node.register(0, pid=500, known=False, label="second")
    node.give_back(*node.arenas.values())  # by rank 1, which held it and never registered
    node.register(1, pid=501, known=False, label="second")
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
    assert node.restored() == []
    assert len([message for _, message in node.sent if isinstance(message, Refused)]) == 2
    node.end_trainers(first_pid=500)
    for index in range(2):
        node.register(index, pid=600 + index, known=False, label="third")
    node.seal()
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
    assert node.restored() == [saved, saved]
    assert node.core.incarnation > saved.incarnation


def test_a_waiting_incarnation_gets_a_larger_number_when_newer_memory_is_given_back() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    saved = Version(Incarnation(5, 5), 1)
    later = dataclasses.replace(node.own(0), arena_id="later", slots=[("free", None), ("sealed", saved)], ledger=None)
    node.replace_keeper(give_back=False)
    node.handle(msgspec.structs.replace(node.described(node.own(0)), writer=Progress(Incarnation(1, 77), 0, 100, 1)))
    node.register(0, pid=200, known=False, label="second")  # waits for the end of process 100
    node.arenas["later"] = later
    node.give_back(later)
    node.handle(ProcessDied(100))
    assert node.core.incarnation.number == 6
    node.seal()
    node.sent.clear()
    node.handle(FromTrainer(0, WantRestore(2)))
    assert node.restored() == [saved]


def test_a_writer_known_only_from_an_adopted_arena_is_fenced() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    node.replace_keeper(give_back=False)
    node.sent.clear()
    node.register(0, pid=200, agreed=Incarnation(2, 5))
    writer = Progress(Incarnation(1, 77), 0, 100, 1)
    added = msgspec.structs.replace(node.described(node.own(0)), writer=writer)
    assert Kill(100, "incarnation 2 begins") in node.core.handle(added, 0.0)
    node.handle(LauncherSeen(99))
    assert not [message for _, message in node.sent if isinstance(message, Registered)], "it may still write"
    node.handle(ProcessDied(100))
    assert [message for _, message in node.sent if isinstance(message, Registered)]


def test_the_arena_of_a_writer_that_cannot_be_killed_is_quarantined_by_a_new_keeper() -> None:
    node = Node()
    node.start()
    node.snapshot(0)
    saved = node.version(0)
    node.replace_keeper(give_back=False)
    writer = Progress(saved.incarnation, 0, 100, 1)
    node.handle(msgspec.structs.replace(node.described(node.own(0)), writer=writer))
    node.handle(LauncherSeen(99))
    node.register(0, pid=200, agreed=Incarnation(2, 5))
    for effect in node.core.handle(Tick(), node.core.config.keeper.fence_s + 1):
        node._carry_out(effect)
    node.seal()
    node.sent.clear()
    node.handle(FromTrainer(0, WantRestore(2)))
    assert node.restored() == [saved]
    node.handle(FromTrainer(0, WantArena(NEED, 2, 0, 3)))
    assert isinstance(node.sent[-1][1], ArenaGiven)
    assert node.sent[-1][1].fresh, "a process that may still write into the old one"


def test_trainers_that_die_while_their_incarnation_waits_for_the_launcher_count_as_dead() -> None:
    """They once counted as alive: the next incarnation waited for their end, and gave their memory up."""
    node = Node(ranks=2)
    node.start()
    node.snapshot(0)
    saved = node.version(0)
    node.end_trainers()
    node.replace_keeper(give_back=False)
    for index in range(2):
        node.register(index, pid=200 + index, agreed=Incarnation(2, 5))
        assert node.core.lease_left_s() is None
        node.handle(ProcessDied(200 + index))
    assert node.core.lease_left_s() is not None, "nobody is left that needs this keeper"
    node.give_back(*node.arenas.values())
    node.handle(LauncherSeen(99))
    node.seal()
    node.sent.clear()
    for index in range(2):
        node.register(index, pid=300 + index, agreed=Incarnation(3, 6))
    node.seal()
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
    assert node.restored() == [saved, saved]


def test_training_continues_when_one_rank_rejoins_an_empty_keeper() -> None:
    """Rank 0 had not received that all were ready, and holds nothing; rank 1 writes its first snapshot."""
    node = Node(ranks=2)
    agreed = Incarnation(2, 5)
    node.handle(LauncherSeen(99))
    for index in range(2):
        node.register(index, agreed=agreed)
    for index in range(2):
        node.handle(FromTrainer(index, WantRestore(2)))
        node.handle(FromTrainer(index, WantArena(NEED, 2, 0, 3)))
    for index in range(2):
        node.handle(FromTrainer(index, Loaded(None, 4)))
    slot = node.write(1, 0)
    node.replace_keeper(give_back=False)
    node.register(0, agreed=agreed)
    node.give_back(*node.arenas.values())
    node.register(1, agreed=agreed, rejoin=True, arena_id=node.own(1).arena_id)
    node.handle(LauncherSeen(99))
    node.handle(FromTrainer(0, Loaded(None, 4)))
    node.commit(1, 0, slot)
    node.commit(0, 0, node.write(0, 0))
    node.seal()
    assert node.core.orders.active.complete == Version(agreed, 0)
