"""Snapshots on their way: committed, sealed, complete; what may be granted next, and which slots are free. Pure."""

from __future__ import annotations

from keepstep.arena.records import Grant
from keepstep.control.messages import Committed, Complete, Protected, Void, Voided
from keepstep.keeper.coordinator.messages import GrantOrder, GrantOutcome, Orders
from keepstep.keeper.node.effects import DropArena, SealSlot, Send, WriteGrant
from keepstep.keeper.node.events import Conn, SlotSealed
from keepstep.keeper.node.grants import NodeGrant
from keepstep.keeper.node.state import (
    COMMITTED,
    CORRUPT,
    FREE,
    GRANTED,
    SEALED,
    SERVING,
    GrantPage,
    NodeState,
    RegisteredTrainer,
    Slot,
)
from keepstep.types import Incarnation, Version

# Of one rank, before all are back: it has at most so many grants open.
MAX_EARLY = 4


def committed(node: NodeState, conn: Conn, message: Committed) -> None:
    member = node.member_of(conn)
    arena = node.arenas.get(message.arena_id)
    if member is None or arena is None or not 0 <= message.slot < len(arena.slots):
        return
    if arena.local_index != member.index or message.version.incarnation != node.incarnation:
        node.problem(f"rank {member.register.rank} committed {message.version}, which is not its own to commit")
        return
    slot = arena.slots[message.slot]
    if _too_early(node, member, conn, message):
        return
    if slot.state == SEALED and slot.version == message.version:  # said again after the keeper came back
        if node.kept.complete is not None and node.kept.complete >= message.version:
            node.do(Send(conn, Complete(message.version)))
        return
    if slot.state == COMMITTED and slot.version == message.version:
        node.grants.commit(member.index, message.arena_id, message.slot, message.version, member.register.rank)
    elif slot.state == GRANTED and node.grants.commit(
        member.index, message.arena_id, message.slot, message.version, member.register.rank
    ):
        slot.commit(message.version)
        node.do(SealSlot(message.arena_id, message.slot, message.version, None))
    elif member.alive and slot.state == FREE:
        node.problem(f"rank {member.register.rank} committed slot {message.slot} that it was not granted")
    advance(node)


def void(node: NodeState, conn: Conn, message: Void) -> None:
    member = node.member_of(conn)
    if member is None:
        return
    if _too_early(node, member, conn, message):
        return
    grant = node.grants.refuse(
        member.index, message.arena_id, message.slot, message.version.step, member.register.rank, message.reason
    )
    if grant is not None:
        node.count("voids")
        node.log("warning", "grant void", rank=member.register.rank, step=message.version.step, reason=message.reason)
    advance(node)


def sealed(node: NodeState, event: SlotSealed) -> bool:
    """The work on a committed slot has ended. False when the slot is not waiting for it any more."""
    arena = node.arenas.get(event.arena_id)
    if arena is None or arena.slots[event.slot].state != COMMITTED:
        return False
    slot = arena.slots[event.slot]
    if slot.version not in (None, event.version):
        return False  # of a version that is not there any more
    if event.info is None:
        slot.free()
        rank = node.rank_of(arena.local_index)
        node.grants.fail_seal(arena.local_index, event.arena_id, event.slot, rank, event.problem)
    else:
        slot.seal(event.info, node.now)
        grant = node.grants.find(arena.local_index, event.arena_id, event.slot)
        if grant is not None and grant.committed.get(arena.local_index) == event.version:
            grant.sealed.add(arena.local_index)
            grant.shares[arena.local_index] = event.shares
        node.count("sealed_bytes", event.info.size_bytes)
        node.count("seal_seconds", event.took_s)
    return True


def _too_early(node: NodeState, member: RegisteredTrainer, conn: Conn, message: Committed | Void) -> bool:
    """A rank that came back first may speak of grants that are taken up only when all are back: keep its words."""
    own = node.last_grant.get(member.index)
    if own is None or own.grant.incarnation != node.incarnation or own.grant.serial <= node.grants.serial:
        return False
    node.early[member.index] = [*node.early.get(member.index, []), (conn, message)][-MAX_EARLY:]
    return True


def advance(node: NodeState) -> None:
    """Take up what a keeper before this one had granted, once all ranks are back."""
    if node.state == SERVING and node.opening is None and node.all_loaded():
        _resume(node)


def settle(node: NodeState) -> list[tuple[NodeGrant, GrantOutcome]]:
    """Close the grants that the coordinator has settled; their slots are free or hold what is retained."""
    over: list[tuple[NodeGrant, GrantOutcome]] = []
    for outcome in node.kept.outcomes:
        node.settled = max(node.settled, outcome.serial)
        grant = node.grants.settle(outcome.serial)
        if grant is None:
            continue
        for index, slot_index in grant.slots.items():
            _free(node, grant.arenas[index], slot_index, keep=outcome.version)
        over.append((grant, outcome))
        if outcome.version is not None:
            node.damaged.clear()  # nothing will fall back behind this version any more
    return over


def hand_out(node: NodeState) -> bool:
    """Give the coordinator's next grant to all local ranks at once."""
    if not (node.opening is None and node.all_loaded()):
        return False
    known = {grant.serial for grant in node.grants.open}
    new = [order for order in node.kept.grants if order.serial > node.settled and order.serial not in known]
    for order in new:
        if order.serial > node.grants.serial:
            _grant(node, order)
        else:
            # All had finished with it, or the second one after it would not have been given: two are remembered.
            node.grants.forget(order, node.rank_of(min(node.members)))
    return bool(new)


def has_room(node: NodeState) -> bool:
    """Of a node whose ranks are all loaded."""
    return all(_free_slot(node, member) is not None for member in node.members.values())


def _resume(node: NodeState) -> None:
    """After the keeper's own death: the grants that stand in the arenas."""
    known = max(node.grants.serial, node.settled)
    standing: dict[int, dict[int, GrantPage]] = {}
    for index, page in node.last_grant.items():
        for grant in page.grant.both:
            if grant.incarnation == node.incarnation and grant.serial > known:
                standing.setdefault(grant.serial, {})[index] = GrantPage(page.arena_id, grant)
    for serial in sorted(standing):
        node.grants.serial = serial
        _take_up(node, standing[serial])
    if standing:
        node.write_ledger()
    unclaimed, node.early = node.early, {}
    for conn, message in (report for reports in unclaimed.values() for report in reports):
        if isinstance(message, Committed):
            committed(node, conn, message)
        else:
            void(node, conn, message)


def _take_up(node: NodeState, standing: dict[int, GrantPage]) -> None:
    """Whoever saw the grant may be writing under it: no slot in it is given out again before it is resolved."""
    one = next(iter(standing.values())).grant
    grant = NodeGrant(one.serial, one.step, {}, {})
    for index, member in node.members.items():
        page = standing.get(index)
        arena = node.arenas.get(member.arena_id)
        # In another arena than the one it writes: it has moved on, or never got there.
        if page is None or arena is None or page.arena_id != arena.arena_id:
            grant.void = (member.register.rank, "the keeper died before it had granted this to all ranks")
            continue
        own = page.grant
        if not 0 <= own.slot < len(arena.slots):
            grant.void = (member.register.rank, "its grant names a slot that is not there")
            continue
        grant.slots[index], grant.arenas[index] = own.slot, arena.arena_id
        slot = arena.slots[own.slot]
        current = slot.version is not None and slot.version.incarnation == node.incarnation
        fresh = current and slot.version is not None and slot.version.step >= grant.step
        if fresh and slot.state in (COMMITTED, SEALED):
            assert slot.version is not None
            grant.committed[index] = slot.version
            if slot.state == SEALED:
                grant.sealed.add(index)
        else:
            slot.grant_again()
    if grant.slots:
        node.grants.open.append(grant)


def _free(node: NodeState, arena_id: str, slot_index: int, *, keep: Version | None) -> None:
    arena = node.arenas.get(arena_id)
    if arena is None:
        return
    slot, member = arena.slots[slot_index], node.members.get(arena.local_index)
    if slot.state == GRANTED and not (member and member.alive):
        return  # its writer may not have begun: the next incarnation looks at what the slot still holds
    unwanted = keep is None and slot.state == SEALED and slot.version not in node.retain
    if slot.state == GRANTED or unwanted:
        slot.free()


def tell(node: NodeState, over: list[tuple[NodeGrant, GrantOutcome]], before: Orders) -> None:
    """Said after all else, so that a trainer that hears of a complete version finds its next grant in place."""
    final = node.kept.group is None
    for grant, outcome in over:
        for index in grant.slots:
            member = node.members.get(index)
            if member is None or not member.alive:
                continue
            if outcome.version is not None:
                node.said_last.append(Send(member.conn, Complete(outcome.version, final)))
            elif index in grant.committed:
                diverged = list(outcome.diverged)
                voided = Voided(grant.committed[index], outcome.rank, outcome.reason, diverged)
                node.said_last.append(Send(member.conn, voided))
        node.count("complete_versions" if outcome.version is not None else "void_versions")
        if outcome.diverged:
            node.problem(outcome.reason)
    protected = node.kept.protected
    if protected is not None and protected != before.protected:
        for member in node.members.values():
            if member.alive:
                node.said_last.append(Send(member.conn, Protected(protected)))


def _grant(node: NodeState, order: GrantOrder) -> None:
    slots: dict[int, int] = {}
    arenas = {index: member.arena_id for index, member in node.members.items()}
    for index, member in node.members.items():
        slot = _free_slot(node, member)
        if slot is None:
            node.grants.refuse_all(order, member.register.rank, "no slot is free")
            return
        slots[index] = slot.index
    opened = node.grants.begin(order, slots, arenas)
    for index, slot_index in slots.items():
        member = node.members[index]
        slot = node.arenas[member.arena_id].slots[slot_index]
        slot.grant()
        grant = Grant(node.incarnation, opened.step, opened.serial, slot_index, _before(node, index, opened))
        node.last_grant[index] = GrantPage(member.arena_id, grant)
        node.do(WriteGrant(member.arena_id, grant))


def _before(node: NodeState, index: int, opened: NodeGrant) -> Grant | None:
    """The grant that this rank may still use or write under, if there is one: a keeper that comes after this one must
    know of it. There is one at most, or this one would not have been given. Else the last one that it has committed."""
    here = opened.arenas[index]
    others = [grant for grant in node.grants.open if grant is not opened and grant.arenas.get(index) == here]
    waiting = [grant for grant in others if not grant.resolved_for(index)]
    done = [grant for grant in others if index in grant.committed]
    if not waiting and not done:
        return None
    last = waiting[0] if waiting else done[-1]
    return Grant(node.incarnation, last.step, last.serial, last.slots[index])


def _free_slot(node: NodeState, member: RegisteredTrainer) -> Slot | None:
    arena = node.arenas.get(member.arena_id)
    if arena is None or arena.evidence:
        return None
    kept = node.retain
    mine = (grant for grant in node.grants.open if grant.arenas.get(member.index) == member.arena_id)
    named = {grant.slots[member.index] for grant in mine}
    order = {FREE: 0, CORRUPT: 1, SEALED: 2}
    usable = [
        slot
        for slot in arena.slots
        if slot.state in order and slot.index not in named and not (slot.state == SEALED and slot.version in kept)
    ]
    oldest = Version(Incarnation(0, 0), -1)
    return min(usable, key=lambda slot: (order[slot.state], slot.version or oldest), default=None)


def drop_old_arenas(node: NodeState) -> None:
    """An arena that was replaced goes when none of its versions is needed any more."""
    retain = node.retain
    for arena in list(node.arenas.values()):
        current, member = node.arena_of(arena.local_index), node.members.get(arena.local_index)
        used = member.arena_id if member is not None and member.arena_id else current.arena_id if current else ""
        replaced = arena.evidence or used not in ("", arena.arena_id)
        busy = any(s.version in retain or s.state in (GRANTED, COMMITTED) for s in arena.slots)
        if replaced and not busy:
            del node.arenas[arena.arena_id]
            node.do(DropArena(arena.arena_id, "its rank writes another one"))
