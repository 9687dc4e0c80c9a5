"""Snapshots in progress: committed, sealed, complete; grants issued to the ranks, and the slots they name. Pure.

It has no section of its own: it decides between `arenas` (slots) and `grants`.
"""

from __future__ import annotations

from keepstep.arena.records import Grant
from keepstep.control.messages import Committed, Complete, Protected, Void, Voided
from keepstep.keeper.coordinator.messages import GrantOrder, GrantOutcome, Orders
from keepstep.keeper.node import arenas
from keepstep.keeper.node.effects import SealSlot, Send, WriteGrant
from keepstep.keeper.node.events import SlotSealed
from keepstep.keeper.node.grants import GrantRecord, NodeGrant
from keepstep.keeper.node.state import (
    COMMITTED,
    CORRUPT,
    FREE,
    GRANTED,
    SEALED,
    SERVING,
    NodeState,
    RegisteredTrainer,
    Slot,
)
from keepstep.types import Incarnation, Version


def committed(node: NodeState, trainer: RegisteredTrainer, message: Committed) -> None:
    """A rank has written a slot: seal it, if it was granted."""
    slot = node.arenas.slot(message.arena_id, message.slot)
    if slot is None:
        return
    arena, version = node.arenas.by_id[message.arena_id], message.version
    if arena.local_index != trainer.index or version.incarnation != node.incarnation:
        node.problem(f"rank {trainer.rank} committed {version}, which is not its own to commit")
        return
    if _keep_unclaimed(node, trainer, message):
        return
    if slot.state == SEALED and slot.version == version:  # sent again after the keeper's death
        complete = node.orders.active.complete
        if complete is not None and complete >= version:
            node.emit(Send(trainer.conn, Complete(version)))
        return
    if slot.state == COMMITTED and slot.version == version:
        node.grants.commit(trainer.index, message, trainer.rank)
    elif slot.state == GRANTED and node.grants.commit(trainer.index, message, trainer.rank):
        slot.commit(version)
        node.emit(SealSlot(message.arena_id, message.slot, version, None))
    elif trainer.alive and slot.state == FREE:
        node.problem(f"rank {trainer.rank} committed slot {message.slot}, which was not granted")


def void(node: NodeState, trainer: RegisteredTrainer, message: Void) -> None:
    if not _keep_unclaimed(node, trainer, message) and node.grants.void(trainer.index, message, trainer.rank):
        node.count("voids")
        node.log("warning", "grant void", rank=trainer.rank, step=message.version.step, reason=message.reason)


def sealed(node: NodeState, event: SlotSealed) -> None:
    """Sealing a committed slot has ended; ignored where the slot does not wait for it any more."""
    slot = node.arenas.slot(event.arena_id, event.slot)
    if slot is None or slot.state != COMMITTED or slot.version not in (None, event.version):
        return
    index = node.arenas.by_id[event.arena_id].local_index
    grant = node.grants.find(index, event.arena_id, event.slot)
    if event.info is None:
        slot.free()
        if grant is not None:
            grant.fail(node.trainers.rank_of(index), event.problem)
        return
    slot.seal(event.info, node.now)
    if grant is not None:
        grant.seal(index, event.info.version, event.shares)
    node.count("sealed_bytes", event.info.size_bytes)
    node.count("seal_seconds", event.took_s)


def _keep_unclaimed(node: NodeState, trainer: RegisteredTrainer, message: Committed | Void) -> bool:
    """Keep a report of a rank that came back first: its grants are taken up only when all ranks are back."""
    if not node.grants.awaits_takeover(trainer.index, node.incarnation):
        return False
    node.grants.keep_unclaimed(trainer.index, trainer.conn, message)
    return True


# Orders of the coordinator


def close_grants(node: NodeState) -> list[tuple[NodeGrant, GrantOutcome]]:
    """Close the grants whose outcome is known on all nodes; their slots are free, or hold what is retained."""
    closed: list[tuple[NodeGrant, GrantOutcome]] = []
    for outcome in node.orders.active.outcomes:
        node.grants.note_resolved(outcome.serial)
        grant = node.grants.close(outcome.serial)
        if grant is None:
            continue
        for index, slot_index in grant.slots.items():
            _free(node, grant.arenas[index], slot_index, keep=outcome.version)
        closed.append((grant, outcome))
        if outcome.version is not None:
            arenas.forget_damage(node)
    return closed


def issue_grants(node: NodeState) -> bool:
    """Issue the coordinator's next grants to all local ranks at once. True when there was one."""
    if node.trainers.opening is not None or not node.all_loaded():
        return False
    open_serials, grants = {grant.serial for grant in node.grants.open}, node.orders.active.grants
    new = [g for g in grants if g.serial > node.grants.last_resolved_serial and g.serial not in open_serials]
    for order in new:
        if order.serial > node.grants.serial:
            _issue(node, order)
        else:
            # Two grants are recorded: all ranks have resolved it, or the second one after it would not have been given.
            node.grants.void_lost(order, node.trainers.rank_of(min(node.trainers.registered)))
    return bool(new)


def _issue(node: NodeState, order: GrantOrder) -> None:
    slots: dict[int, Slot] = {}
    trainers = node.trainers.registered
    for index, trainer in trainers.items():
        slot = _free_slot(node, trainer)
        if slot is None:
            node.grants.refuse(order, trainer.rank, "no slot is free")
            return
        slots[index] = slot
    arena_ids = {index: trainer.arena_id for index, trainer in trainers.items()}
    issued = node.grants.issue(order, {index: slot.index for index, slot in slots.items()}, arena_ids)
    for index, slot in slots.items():
        slot.grant()
        earlier = node.grants.earlier(index, issued, node.incarnation)
        grant = Grant(node.incarnation, issued.step, issued.serial, slot.index, earlier)
        node.grants.record(index, arena_ids[index], grant)
        node.emit(WriteGrant(arena_ids[index], grant))


def has_free_slots(node: NodeState) -> bool:
    """Every rank has a slot that may be granted. Of a node whose ranks are all loaded."""
    return all(_free_slot(node, trainer) is not None for trainer in node.trainers.registered.values())


def _free_slot(node: NodeState, trainer: RegisteredTrainer) -> Slot | None:
    """The slot to grant next: a free one, else a corrupt one, else the oldest that is not retained."""
    arena = node.arenas.by_id.get(trainer.arena_id)
    if arena is None or arena.quarantined or arena.arena_id in node.preparing:
        return None
    retain, oldest = node.retain, Version(Incarnation(0, 0), -1)
    in_use = node.grants.slots_in_use(trainer.index, trainer.arena_id)
    order = {FREE: 0, CORRUPT: 1, SEALED: 2}
    usable = [slot for slot in arena.slots if slot.state in order and slot.index not in in_use]
    usable = [slot for slot in usable if slot.state != SEALED or slot.version not in retain]
    return min(usable, key=lambda slot: (order[slot.state], slot.version or oldest), default=None)


def _free(node: NodeState, arena_id: str, slot_index: int, *, keep: Version | None) -> None:
    slot = node.arenas.slot(arena_id, slot_index)
    if slot is None:
        return
    trainer = node.trainers.registered.get(node.arenas.by_id[arena_id].local_index)
    if slot.state == GRANTED and not (trainer and trainer.alive):
        return  # its writer may not have begun: the next incarnation reads what the slot still holds
    unwanted = keep is None and slot.state == SEALED and slot.version not in node.retain
    if slot.state == GRANTED or unwanted:
        slot.free()


def report_outcomes(node: NodeState, closed: list[tuple[NodeGrant, GrantOutcome]], before: Orders) -> None:
    """Report to the trainers what became of their snapshots.

    After all other effects: when a trainer learns that a version is complete, its next grant is in its arena.
    """
    orders, trainers = node.orders.active, node.trainers.registered
    for grant, outcome in closed:
        for index in grant.slots:
            trainer = trainers.get(index)
            if trainer is None or not trainer.alive:
                continue
            if outcome.version is not None:
                node.emit_last(Send(trainer.conn, Complete(outcome.version, orders.group is None)))
            elif index in grant.committed:
                message = Voided(grant.committed[index], outcome.rank, outcome.reason, list(outcome.diverged))
                node.emit_last(Send(trainer.conn, message))
        node.count("complete_versions" if outcome.version is not None else "void_versions")
        if outcome.diverged:
            node.problem(outcome.reason)
    if orders.protected is not None and orders.protected != before.protected:
        for trainer in trainers.values():
            if trainer.alive:
                node.emit_last(Send(trainer.conn, Protected(orders.protected)))


# After a keeper's death


def take_up_grants(node: NodeState) -> None:
    """Once all ranks are back: continue the grants that the arenas record."""
    if node.state != SERVING or node.trainers.opening is not None or not node.all_loaded():
        return
    recorded = node.grants.recorded(node.incarnation)
    for serial in sorted(recorded):
        node.grants.adopt(_taken_up(node, recorded[serial]))
    if recorded:
        arenas.write_ledger(node)
    _claim_reports(node)


def _claim_reports(node: NodeState) -> None:
    for conn, message in node.grants.take_unclaimed():
        trainer = node.trainers.by_conn(conn)
        if trainer is None:
            continue
        if isinstance(message, Committed):
            committed(node, trainer, message)
        else:
            void(node, trainer, message)


def _taken_up(node: NodeState, records: dict[int, GrantRecord]) -> NodeGrant:
    """Any rank that has the grant may be writing under it: no slot it names is granted before it is resolved."""
    recorded = next(iter(records.values())).grant
    grant, void = NodeGrant(recorded.serial, recorded.step, {}, {}), None
    for index, trainer in node.trainers.registered.items():
        record = records.get(index)
        # Recorded in another arena than the one it writes: the rank has moved, or never had the new one.
        if record is None or record.arena_id != trainer.arena_id or trainer.arena_id not in node.arenas.by_id:
            void = (trainer.rank, "the keeper died before it had granted this to all ranks")
            continue
        slot = node.arenas.slot(record.arena_id, record.grant.slot)
        if slot is None:
            void = (trainer.rank, "its grant names a slot that does not exist")
            continue
        grant.add_rank(index, record.arena_id, slot.index)
        version = slot.version
        current = version is not None and version.incarnation == node.incarnation and version.step >= grant.step
        if version is not None and current and slot.state in (COMMITTED, SEALED):
            grant.add_committed(index, version, sealed=slot.state == SEALED)
        else:
            slot.grant_again()
    if void is not None:
        grant.fail(*void)
    return grant
