"""Arenas: requested, added, refused, quarantined and dropped; damage found in them; the ledger in each. Pure.

Owner of `node.arenas`.
"""

from __future__ import annotations

from keepstep.arena.records import Ledger
from keepstep.arena.slots import AUTO, FEW_SLOTS
from keepstep.control.messages import ArenaGiven, WantArena
from keepstep.keeper.node.effects import CreateArena, DropArena, SealSlot, Send, WriteLedger
from keepstep.keeper.node.events import ArenaAdded, ArenaRefused
from keepstep.keeper.node.state import COMMITTED, FREE, GRANTED, ArenaState, NodeState, RegisteredTrainer, Slot
from keepstep.types import Version

MAX_DAMAGED = 64  # sentences kept for inventories and `keepstep inspect`


def requested(node: NodeState, trainer: RegisteredTrainer, wanted: WantArena) -> None:
    """Give a trainer the arena it has, or have a larger one created."""
    arena = node.arenas.of(trainer.index)
    if arena is None or wanted.slots not in (AUTO, len(arena.slots)) or not wanted.need.fits(arena.capacity):
        generation, num_ranks = node.arenas.next_generation(trainer.index), trainer.register.local_world_size
        unused = arena is not None and not trainer.arena_id and not node.restore.fetching
        if arena is not None and unused and all(slot.state == FREE for slot in arena.slots):
            # Left by a trainer that has ended: what was promised to it must not count against the new one.
            del node.arenas.by_id[arena.arena_id]
            node.emit(DropArena(arena.arena_id, "it holds nothing, and its rank gets another one"))
        node.emit(CreateArena(trainer.conn, wanted, trainer.index, generation, num_ranks))
        return
    move_to(node, trainer, arena.arena_id)
    node.emit(Send(trainer.conn, ArenaGiven(arena.arena_id, arena.size_bytes, False, wanted.ticket), arena.arena_id))


def slots_per_rank(node: NodeState) -> int:
    """Slots that every rank of this node has: the fewest, where memory did not allow the same for all."""
    arenas = [node.arenas.of(index) for index in node.trainers.registered]
    return min((len(arena.slots) for arena in arenas if arena is not None), default=FEW_SLOTS)


def move_to(node: NodeState, trainer: RegisteredTrainer, arena_id: str) -> None:
    """Have the rank write this arena: a grant in its old arena will not be used."""
    if trainer.arena_id not in ("", arena_id):
        node.grants.withdraw(trainer.index, trainer.rank, "its arena was replaced by a larger one")
    trainer.move_to(arena_id)


def add(node: NodeState, event: ArenaAdded) -> None:
    slots = [
        Slot(s.index, s.state, s.info.version if s.info is not None else None, s.info, node.now - s.age_s)
        for s in event.slots
    ]
    node.arenas.by_id[event.arena_id] = ArenaState(
        event.arena_id, event.local_index, event.generation, event.size_bytes, event.capacity, slots,
        writer_pid=event.writer.pid if event.writer is not None else -1,
    )  # fmt: skip


def seal_committed(node: NodeState, arena_id: str) -> None:
    """Seal what an adopted arena holds committed, unless it was sealed once and its seal is gone."""
    for slot in node.arenas.by_id[arena_id].slots:
        if slot.state == COMMITTED and slot.version is not None:
            node.emit(SealSlot(arena_id, slot.index, slot.version, node.arenas.newest_complete))


def refused(node: NodeState, event: ArenaRefused) -> None:
    text = f"arena {event.arena_id} was refused: {event.problem}"
    if text not in node.arenas.damaged and len(node.arenas.damaged) < MAX_DAMAGED:
        node.arenas.damaged.append(text)
    node.problem(text)


def mark_corrupt(node: NodeState, slot: Slot, text: str) -> None:
    slot.mark_corrupt()
    node.arenas.damaged.append(text)
    node.count("corrupt_slots")
    node.problem(text)


def forget_damage(node: NodeState) -> None:
    """A version is complete: no restore will go back behind it."""
    node.arenas.damaged.clear()


def quarantine(node: NodeState, pids: set[int]) -> None:
    """Write nothing into arenas that these processes may still write."""
    indexes = {trainer.index for trainer in node.trainers.registered.values() if trainer.pid in pids}
    for arena in node.arenas.by_id.values():
        if arena.local_index in indexes or arena.writer_pid in pids:
            arena.quarantined = True


def read_again(node: NodeState) -> None:
    """Have slots without a living writer read again: it may have committed without a report, or not have begun."""
    for arena, slot in node.arenas.slots():
        if slot.state in (GRANTED, FREE):
            slot.read_again()
            node.emit(SealSlot(arena.arena_id, slot.index, None, node.arenas.newest_complete))


def drop_replaced(node: NodeState) -> None:
    """Free replaced and quarantined arenas that hold nothing that is retained."""
    retain = node.retain
    for arena in list(node.arenas.by_id.values()):
        current, trainer = node.arenas.of(arena.local_index), node.trainers.registered.get(arena.local_index)
        used = trainer.arena_id if trainer is not None and trainer.arena_id else current.arena_id if current else ""
        replaced = arena.quarantined or used not in ("", arena.arena_id)
        busy = any(s.version in retain or s.state in (GRANTED, COMMITTED) for s in arena.slots)
        if replaced and not busy:
            del node.arenas.by_id[arena.arena_id]
            node.emit(DropArena(arena.arena_id, "its rank writes another one"))


# The ledger


def write_ledger(node: NodeState) -> None:
    """Write what a later keeper must know into every arena."""
    own = node.arenas
    active, by = node.orders.active, node.orders.active.protected_by
    current = active.incarnation == node.incarnation
    own.ledger_serial += 1
    ledger = Ledger(
        incarnation=node.incarnation, base=active.base, complete=own.newest_complete, serial=own.ledger_serial,
        current=active.complete, protected=active.protected, target=active.target,
        protected_by=(by.incarnation.number, by.incarnation.nonce, by.attempt) if by else (0, 0, 0),
        epoch=active.epoch if current else 0, seq=active.seq if current else 0, attempt=active.attempt,
        settled=node.grants.last_resolved_serial,
    )  # fmt: skip
    node.emit(WriteLedger(ledger))


def note_ledger(node: NodeState, ledger: Ledger) -> bool:
    """Count on from a ledger that was given back. True when it is the newest one yet."""
    newer = ledger.serial > node.arenas.ledger_serial
    node.arenas.ledger_serial = max(node.arenas.ledger_serial, ledger.serial)
    note_complete(node, ledger.complete)
    return newer


def note_complete(node: NodeState, version: Version | None) -> None:
    if version is not None:
        node.arenas.newest_complete = max(node.arenas.newest_complete or version, version)
