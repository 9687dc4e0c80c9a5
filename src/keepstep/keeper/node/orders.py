"""Between this node and the job's coordinator: reports out, orders in. Pure.

A node that coordinates itself (one node, or node rank 0) hands its report to its own `Coordinator` and follows
the answer in the same breath; all others send and hear. What is said is said again with every
heartbeat, so that nothing depends on a single message.
"""

from __future__ import annotations

import msgspec

from keepstep.control.messages import Done, NodeCard
from keepstep.keeper.coordinator.coordinator import Coordinator
from keepstep.keeper.coordinator.messages import GrantOrder, Orders, Report
from keepstep.keeper.coordinator.state import GATHERING, Terms
from keepstep.keeper.node import protection, restore, snapshots
from keepstep.keeper.node.effects import End, Kill, ReadReplicaDigests, Send, SendToPeer, SetPeers
from keepstep.keeper.node.events import MembershipSet, PeerLink, PeerMessage, ReplicaDigestsRead
from keepstep.keeper.node.state import COMMITTED, CORRUPT, RESTORING, SERVING, NodeState
from keepstep.types import Version

HEARTBEAT_S = 0.5
# Each turn follows from the one before: seal, plan, verify, begin, grant. More would be a loop.
MAX_TURNS = 12


def follow(node: NodeState) -> None:
    """Do all that follows from what is known now, and say what changed."""
    appoint(node)
    if node.job is not None:
        for _ in range(MAX_TURNS):
            if node.touched:
                node.job.hear(report_of(node), node.now)
            node.touched = True
            if node.job.state == GATHERING or not take_orders(node, node.job.orders_for(node.card.node_id)):
                break
        while node.job.faults:
            node.log("warning", node.job.faults.popleft())
        if node.job.state != GATHERING:
            _spread(node)
    elif node.membership is not None:
        if node.orders is not None and node.orders is not node.kept:
            take_orders(node, node.orders)  # they may have come before this node served
        _report(node)
    if node.state == SERVING:
        restore.answer_requests(node)


def appoint(node: NodeState) -> None:
    """Become the coordinator of this incarnation, where that is this node's part."""
    if node.job is not None and node.job.incarnation == node.incarnation:
        return
    node.job, node.touched = None, True
    if node.state not in (RESTORING, SERVING) or not node.members:
        return
    register = next(iter(node.members.values())).register
    limits, me = node.limits, node.card.node_id
    terms = Terms(limits.deadline_s, limits.stall_s, limits.inventory_s)
    if register.world_size == register.local_world_size:
        node.job = Coordinator(node.incarnation, {me: node.card.domain}, (), terms, node.now)
        return
    membership = node.membership
    if membership is None or membership.incarnation != node.incarnation or membership.node_rank != 0:
        return
    members = {card.node_id: card.domain for card in membership.nodes}
    former = tuple(card.node_id for card in membership.former)
    node.job = Coordinator(node.incarnation, members, former, terms, node.now)
    # The membership of the others names the keeper that coordinated before this one.
    node.job.moved_to(node.card)


def members_set(node: NodeState, event: MembershipSet) -> None:
    """The nodes of the next incarnation are known: find them."""
    membership = event.membership
    if node.membership is not None and membership.incarnation.number < node.membership.incarnation.number:
        return
    node.membership = membership
    node.cards = {card.node_id: card for card in (*membership.nodes, *membership.former)}
    node.said_key, node.ordered = None, (0, 0, 0)
    node.meet_at = node.now
    _meet(node)


def _meet(node: NodeState) -> None:
    assert node.membership is not None
    others = tuple(card for card in node.cards.values() if card.node_id != node.card.node_id)
    node.do(SetPeers(others, node.membership.secret))


def _moved(node: NodeState, card: NodeCard) -> bool:
    """A peer's keeper is a new one, or somewhere else."""
    if card.node_id == node.card.node_id or node.cards.get(card.node_id) in (None, card):
        return False
    node.cards[card.node_id] = card
    _meet(node)
    return True


def peer_link(node: NodeState, event: PeerLink) -> None:
    node.links[event.node_id] = event.up
    if event.up:
        if node.membership is None or event.node_id == node.membership.nodes[0].node_id:
            node.said_key = None  # say everything again: the coordinator may be new
        if node.job is not None and node.job.state != GATHERING and node.job.knows(event.node_id):
            node.do(SendToPeer(event.node_id, node.job.orders_for(event.node_id)))
    else:
        node.down_at[event.node_id] = node.now
        node.log("info", "a peer is away", peer=event.node_id, reason=event.reason)


def peer_said(node: NodeState, event: PeerMessage) -> None:
    word = event.message
    if isinstance(word, Orders):
        if _from_coordinator(node, event.node_id, word):
            for card in word.cards:
                _moved(node, card)
            node.touched = take_orders(node, word)
        elif word.incarnation.number > node.incarnation.number:
            _step_aside(node, event.node_id, word)
    elif word.node_id == event.node_id == word.card.node_id:
        if _moved(node, word.card) and node.job is not None:
            node.job.moved_to(word.card)
        if node.job is not None:
            node.job.hear(word, node.now)
        node.touched = False


def _step_aside(node: NodeState, coordinator: str, orders: Orders) -> None:
    """The job goes on without this node: its trainers must not, but what it holds may be needed."""
    number = orders.incarnation.number
    for member in node.members.values():
        if member.alive and member.finished is None:
            node.do(Kill(member.pid, f"incarnation {number} goes on without this node"))
    if not any(s.state == COMMITTED for a in node.arenas.values() for s in a.slots):
        node.do(SendToPeer(coordinator, msgspec.structs.replace(report_of(node), inventory=node.inventory())))


def watch_peers(node: NodeState) -> None:
    """A keeper of the last incarnation that nobody can reach is dead, for all that a plan may count on."""
    if node.job is None:
        return
    for node_id in list(node.job.sources):
        since = max(node.meet_at, node.down_at.get(node_id, node.meet_at))
        if not node.links.get(node_id) and node.now - since >= node.limits.dead_s:
            node.job.lost(node_id, node.now)


def _from_coordinator(node: NodeState, node_id: str, orders: Orders) -> bool:
    membership = node.membership
    if membership is None or membership.incarnation != orders.incarnation:
        return False
    return membership.nodes[0].node_id == node_id


# Reports


def report_of(node: NodeState) -> Report:
    node.report_number += 1
    members = node.members.values()
    first = next(iter(members)).register if members else None
    progress = max((node.progress.get(index, -1) for index in node.members), default=-1)
    said = tuple(word for grant in node.grants.open if (word := grant.said()) is not None)
    opened = tuple(GrantOrder(grant.serial, grant.step) for grant in node.grants.open)
    whole, loaded = node.whole(), node.all_loaded()
    inventory = node.inventory() if node.state == RESTORING and restore.inventory_ready(node) else None
    damaged: set[Version] = set()
    if "corrupt_slots" in node.counters:
        damaged = {s.version for a in node.arenas.values() for s in a.slots if s.state == CORRUPT and s.version}
    return Report(
        node_id=node.card.node_id, instance=node.card.instance, incarnation=node.incarnation,
        number=node.report_number, state=node.state, card=node.card, whole=whole,
        ranks=tuple(sorted(m.register.rank for m in members)), world_size=first.world_size if first else 0,
        progress=progress, step_s=_pace(node, progress), ready=loaded and node.state == SERVING,
        room=loaded and snapshots.has_room(node), every=first.every if first else 1, slots=first.slots if first else 2,
        grants=said, opened=opened, placed=tuple(node.sets), exchange=node.exchange,
        audit=node.audit,
        damaged=tuple(damaged), unreachable=_unreachable(node), finished=whole and _finished(node),
        losses=node.limits.losses, group_size=node.limits.group_size, orders=node.orders,
        inventory=inventory, restored=node.restored, failures=tuple(node.failures),
    )  # fmt: skip


def _pace(node: NodeState, progress: int) -> float:
    """Seconds per step, smoothed: a grant must be ahead of every rank when it arrives."""
    seen, at, step_s = node.pace
    if progress < seen or seen < 0:
        node.pace = (progress, node.now, 0.0)
    elif progress > seen and node.now > at:
        now_s = (node.now - at) / (progress - seen)
        node.pace = (progress, node.now, now_s if step_s == 0 else 0.7 * step_s + 0.3 * now_s)
    return node.pace[2]


def _unreachable(node: NodeState) -> tuple[str, ...]:
    group = node.kept.group
    if group is None:
        return ()
    return tuple(m for m in group.members if m != node.card.node_id and not node.links.get(m))


def _finished(node: NodeState) -> bool:
    return node.opening is None and all(m.finished for m in node.members.values())


def _report(node: NodeState) -> None:
    """Tell the coordinator, when something changed or a heartbeat is due; former sources tell it too."""
    assert node.membership is not None
    to = node.membership.nodes[0].node_id
    if to == node.card.node_id or not node.links.get(to):
        return
    if not node.touched and node.now - node.said_at < HEARTBEAT_S:
        return
    report = report_of(node)
    key = (report.state, report.whole, report.ready, report.room, report.grants, report.opened, report.placed,
           report.exchange, report.damaged, report.finished, report.orders and report.orders.order,
           report.inventory, report.restored, report.failures, report.audit, report.incarnation)  # fmt: skip
    if key != node.said_key or node.now - node.said_at >= HEARTBEAT_S:
        node.said_key, node.said_at = key, node.now
        node.do(SendToPeer(to, report))


def shares_read(node: NodeState, event: ReplicaDigestsRead) -> None:
    node.audit = (event.audit, event.answer)


# Orders


def _spread(node: NodeState) -> None:
    assert node.job is not None
    order = node.job.orders.order
    if order == node.ordered and node.now - node.said_at < HEARTBEAT_S:
        return
    node.ordered, node.said_at = order, node.now
    for node_id in (*node.job.views, *node.job.sources):
        if node_id != node.card.node_id and node.links.get(node_id):
            node.do(SendToPeer(node_id, node.job.orders_for(node_id)))


def take_orders(node: NodeState, orders: Orders) -> bool:
    """Follow the coordinator. False when nothing came of it."""
    if orders.incarnation != node.incarnation:
        return False
    # A ledger keeps only a part of the orders: the same ones say more when they come from the coordinator.
    fresh = orders.newer_than(node.orders) or (node.orders_from_ledger and orders.order == node.kept.order)
    if fresh:
        node.orders, node.orders_from_ledger = orders, False
    newest = node.orders
    if newest is not None and newest.restore is not None:
        restore.take_plan(node, newest.restore)
    if newest is None or node.state != SERVING or not (newest.restore is None or newest.restore.begin):
        return fresh
    before = node.kept
    changed = newest is not before
    node.kept = newest
    over = snapshots.settle(node)
    if changed:
        _keep(node, before)
    handed = snapshots.hand_out(node)
    _answer_loaded(node)
    snapshots.tell(node, over, before)
    if node.kept.finished:
        node.do(End("training finished"))
    return changed or handed or bool(over)


def _keep(node: NodeState, before: Orders) -> None:
    """What is kept has changed: remember it across this keeper's death, and let go of the rest."""
    kept = node.kept
    if kept.complete is not None:
        node.remembered = max(node.remembered or kept.complete, kept.complete)
    if before.retain != kept.retain or before.protected_by != kept.protected_by:
        snapshots.drop_old_arenas(node)
    protection.take_orders(node)
    if kept.audit != before.audit:
        node.audit = None  # the answer to the question before is large, and in every report
        if kept.audit is not None:
            node.do(ReadReplicaDigests(kept.audit))
    node.write_ledger()


def _answer_loaded(node: NodeState) -> None:
    if node.kept.ready:
        for conn, request in node.loaded_requests:
            node.do(Send(conn, Done(ticket=request.ticket)))
        node.loaded_requests = []
