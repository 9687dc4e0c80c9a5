"""Arenas that are asked for, made, adopted after the keeper's own death, and refused. Pure."""

from __future__ import annotations

from keepstep.arena.records import Ledger
from keepstep.control.messages import ArenaGiven, WantArena
from keepstep.errors import KeeperError
from keepstep.keeper.coordinator.messages import GrantOutcome, Orders
from keepstep.keeper.node import snapshots, trainers
from keepstep.keeper.node.effects import CreateArena, SealSlot, Send
from keepstep.keeper.node.events import ArenaAdded, ArenaRefused, Conn
from keepstep.keeper.node.state import COMMITTED, MAX_DAMAGED, ArenaState, GrantPage, NodeState, RegisteredTrainer, Slot
from keepstep.layout import SnapshotSize
from keepstep.recovery.inventory import SetKey
from keepstep.types import Incarnation


def arena_wanted(node: NodeState, conn: Conn, wanted: WantArena) -> None:
    member = node.member_of(conn)
    if member is None:
        node.refuse(conn, wanted.ticket, KeeperError("register first"))
        return
    arena = node.arena_of(member.index)
    if arena is not None and len(arena.slots) == wanted.slots and _fits(wanted.need, arena.capacity):
        _move_to(node, member, arena.arena_id)
        given = ArenaGiven(arena.arena_id, arena.size_bytes, False, wanted.ticket)
        node.do(Send(conn, given, arena.arena_id))
        snapshots.advance(node)
        return
    generation = 1 + max((a.generation for a in node.arenas.values() if a.local_index == member.index), default=0)
    node.do(CreateArena(conn, wanted, member.index, generation))


def arena_added(node: NodeState, event: ArenaAdded) -> None:
    slots = [
        Slot(s.index, s.state, s.info.version if s.info is not None else None, s.info, node.now - s.age_s)
        for s in event.slots
    ]
    node.arenas[event.arena_id] = ArenaState(
        event.arena_id, event.local_index, event.generation, event.size_bytes, event.capacity, slots,
        writer_pid=event.writer.pid if event.writer is not None else -1,
    )  # fmt: skip
    member = node.members.get(event.local_index)
    if member is not None and event.ledger is None:
        _move_to(node, member, event.arena_id)
        node.write_ledger()
    _adopt_ledger(node, event)
    if event.writer is not None and all(m.pid != event.writer.pid for m in node.members.values()):
        trainers.stranger_found(node, event.writer.pid, event.writer.incarnation)
    if event.grant is not None:
        known = node.last_grant.get(event.local_index)
        newest = (event.grant.incarnation, event.grant.serial)
        if known is None or (known.grant.incarnation, known.grant.serial) < newest:
            node.last_grant[event.local_index] = GrantPage(event.arena_id, event.grant)
    for slot in slots:
        if slot.state == COMMITTED and slot.version is not None:
            node.do(SealSlot(event.arena_id, slot.index, slot.version, node.remembered))
    snapshots.advance(node)


def arena_refused(node: NodeState, event: ArenaRefused) -> None:
    text = f"arena {event.arena_id} was refused: {event.problem}"
    if text not in node.damaged and len(node.damaged) < MAX_DAMAGED:
        node.damaged.append(text)
    node.problem(text)


def _move_to(node: NodeState, member: RegisteredTrainer, arena_id: str) -> None:
    """The rank writes another arena from now on: a grant that lies in the old one will not be seen any more."""
    if member.arena_id not in ("", arena_id):
        node.grants.withdraw(member.index, member.register.rank, "its arena was replaced by a larger one")
    member.arena_id = arena_id


def _adopt_ledger(node: NodeState, event: ArenaAdded) -> None:
    """Take over what the keeper before knew. Numbers only grow: any record may be the newest that is left."""
    ledger = event.ledger
    newer = ledger is not None and ledger.serial > node.ledger_serial
    if ledger is not None:
        node.ledger_serial = max(node.ledger_serial, ledger.serial)
        if ledger.complete is not None:
            node.remembered = max(node.remembered or ledger.complete, ledger.complete)
    if node.members:
        return  # what is given back late changes nothing for a life that has begun
    seen = [slot.info.version.incarnation for slot in event.slots if slot.info is not None]
    seen += [record.incarnation for record in (ledger, event.grant, event.writer) if record is not None]
    node.incarnation = max([node.incarnation, *seen])
    if newer and ledger is not None:
        _adopt_orders(node, ledger)


def _fits(need: SnapshotSize, capacity: SnapshotSize) -> bool:
    return (
        need.layout_bytes <= capacity.layout_bytes
        and need.values_bytes <= capacity.values_bytes
        and need.payload_bytes <= capacity.payload_bytes
    )


def _adopt_orders(node: NodeState, ledger: Ledger) -> None:
    """What the keeper before was told last: it says what is kept, and where a coordinator goes on."""
    number, nonce, attempt = ledger.protected_by
    covered = ledger.protected or ledger.base  # base: its parity is kept, though a member of its group is lost
    by = SetKey(covered, Incarnation(number, nonce), attempt) if covered is not None and number else None
    node.kept = Orders(
        ledger.incarnation, ledger.epoch, ledger.seq, ledger.attempt, ledger.protected, by, ledger.current,
        ledger.target, ledger.base, outcomes=(GrantOutcome(ledger.settled, None),) if ledger.settled else (),
    )  # fmt: skip
    node.settled = ledger.settled
    if ledger.epoch:
        node.orders, node.orders_from_ledger = node.kept, True
