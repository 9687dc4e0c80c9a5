"""Reports to the job's coordinator and orders from it. Pure.

Owner of `node.orders`. A node that is its own coordinator (one node, or node rank 0) applies the resulting
orders in the same event; others exchange messages. Both are sent again with every heartbeat, so that nothing
depends on a single message.
"""

from __future__ import annotations

import msgspec

from keepstep.arena.records import Ledger
from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator import coordinator
from keepstep.keeper.coordinator.messages import GrantOrder, GrantOutcome, Orders, Report
from keepstep.keeper.coordinator.state import GATHERING, CoordinatorState
from keepstep.keeper.node import arenas, effects, protection, restore, snapshots
from keepstep.keeper.node.effects import Kill, SendToPeer, SetPeers
from keepstep.keeper.node.events import MembershipSet, PeerLink, PeerMessage, ReplicaDigestsRead
from keepstep.keeper.node.state import CORRUPT, RESTORING, SERVING, NodeState
from keepstep.recovery.inventory import SetKey
from keepstep.types import Incarnation, Version

HEARTBEAT_S = 0.5  # a lost message costs this long; a heartbeat costs the coordinator about 0.03 ms
MAX_TURNS = 12  # twice what was ever needed: see `_apply_own_orders`


def begin_event(node: NodeState) -> None:
    node.orders.report_changed = True


def follow(node: NodeState) -> None:
    """Do all that follows from the event, and report what changed."""
    appoint(node)
    orders = node.orders
    if orders.coordinator is not None:
        _apply_own_orders(node, orders.coordinator)
        for warning in orders.coordinator.take_warnings():
            node.log("warning", warning)
        if orders.coordinator.state != GATHERING:
            _send_orders(node, orders.coordinator)
    elif orders.membership is not None:
        if orders.received is not None and orders.received is not orders.active:
            take_orders(node, orders.received)  # received before this node served
        _send_report(node)
    if node.state == SERVING:
        restore.answer_requests(node)


def _apply_own_orders(node: NodeState, job: CoordinatorState) -> None:
    """Report to this keeper's own coordinator and follow its orders, until they ask for nothing new.

    A turn is followed by another one only when it changed the orders, or closed or issued a grant, and what it
    changed is in the next report: plan, ready, BEGIN, loaded, grants closed, grants issued, no slot left. Each of
    these happens once for one event; in the simulated lives one to three turns are usual and six the most. A 13th
    would mean that reports and orders change each other in a circle, which is a bug of ours. It is logged and not
    asserted: the keeper must not lose the memory it holds, and the next event continues from here.
    """
    for _ in range(MAX_TURNS):
        if node.orders.report_changed:
            coordinator.receive(job, report_of(node), node.now)
        node.orders.report_changed = True
        if job.state == GATHERING or not take_orders(node, job.orders_for(node.card.node_id)):
            return
    node.log("error", "orders do not settle", turns=MAX_TURNS, orders=job.orders.order)


def appoint(node: NodeState) -> None:
    """Become the coordinator of this incarnation, where that is this node's part."""
    orders, membership = node.orders, node.orders.membership
    if orders.coordinator is not None and orders.coordinator.incarnation == node.incarnation:
        return
    orders.coordinator, orders.report_changed = None, True
    if node.state not in (RESTORING, SERVING) or not node.trainers.registered:
        return
    register = next(iter(node.trainers.registered.values())).register
    alone = register.world_size == register.local_world_size
    if alone:
        nodes, former = [node.card], []
    elif membership is not None and membership.incarnation == node.incarnation and membership.node_rank == 0:
        nodes, former = list(membership.nodes), list(membership.former)
    else:
        return
    members, sources = {card.node_id: card.domain for card in nodes}, tuple(card.node_id for card in former)
    job = CoordinatorState(node.incarnation, members, sources, now=node.now, deadlines=node.deadlines)
    orders.coordinator = job
    if not alone:  # the membership of the others names the keeper that coordinated before this one
        coordinator.set_card(job, node.card)
        _receive_early_reports(node, job, {*nodes, *former})


def _receive_early_reports(node: NodeState, job: CoordinatorState, cards: set[NodeCard]) -> None:
    """Peers link to a new keeper before its trainers are back: it does not wait for their next reports."""
    reports, node.orders.early_reports = node.orders.early_reports, {}
    for report in reports.values():
        if report.incarnation == node.incarnation:
            if report.card not in cards:
                coordinator.set_card(job, report.card)
            coordinator.receive(job, report, node.now)


def count_reports_from(node: NodeState, number: int) -> None:
    """Start above all that an earlier keeper of this node has counted."""
    node.orders.report_number = number


# Peers


def members_set(node: NodeState, event: MembershipSet) -> None:
    """The nodes of the next incarnation are known: connect to them."""
    membership, orders = event.membership, node.orders
    if orders.membership is not None and membership.incarnation.number < orders.membership.incarnation.number:
        return
    orders.membership = membership
    orders.cards = {card.node_id: card for card in (*membership.nodes, *membership.former)}
    orders.sent_key, orders.sent_order = None, (0, 0, 0)
    orders.peers_set_at = node.now
    _set_peers(node)


def _set_peers(node: NodeState) -> None:
    assert node.orders.membership is not None
    others = tuple(card for card in node.orders.cards.values() if card.node_id != node.card.node_id)
    node.emit(SetPeers(others, node.orders.membership.secret))


def _card_changed(node: NodeState, card: NodeCard) -> bool:
    """A peer's keeper was replaced, or has another address."""
    if card.node_id == node.card.node_id or node.orders.cards.get(card.node_id) in (None, card):
        return False
    node.orders.cards[card.node_id] = card
    _set_peers(node)
    return True


def peer_link(node: NodeState, event: PeerLink) -> None:
    orders = node.orders
    orders.links[event.node_id] = event.up
    if not event.up:
        orders.down_since[event.node_id] = node.now
        node.log("info", "a peer is away", peer=event.node_id, reason=event.reason)
        return
    if orders.membership is None or event.node_id == orders.membership.nodes[0].node_id:
        orders.sent_key = None  # report everything again: the coordinator may be a new one
    job = orders.coordinator
    if job is not None and job.state != GATHERING and job.knows(event.node_id):
        node.emit(SendToPeer(event.node_id, job.orders_for(event.node_id)))


def peer_message(node: NodeState, event: PeerMessage) -> None:
    message = event.message
    if isinstance(message, Orders):
        if _from_coordinator(node, event, message):
            for card in message.cards:
                _card_changed(node, card)
            node.orders.report_changed = take_orders(node, message)
        elif message.incarnation.number > node.incarnation.number:
            _step_aside(node, event, message)
    elif message.node_id == event.node_id == message.card.node_id:
        job = node.orders.coordinator
        if _card_changed(node, message.card) and job is not None:
            coordinator.set_card(job, message.card)
        if job is not None:
            coordinator.receive(job, message, node.now)
        elif event.node_id in node.orders.cards:
            node.orders.early_reports[event.node_id] = message
        node.orders.report_changed = False


def _step_aside(node: NodeState, event: PeerMessage, orders: Orders) -> None:
    """The job goes on without this node: its trainers must end, but what it holds may be needed.

    Only a keeper of this node's own membership has trainers ended. The launcher ends those that a newcomer would.
    """
    number = orders.incarnation.number
    for trainer in node.trainers.registered.values() if _is_member(node, event) else ():
        if trainer.running:
            node.emit(Kill(trainer.pid, f"incarnation {number} goes on without this node"))
    if not node.arenas.any_committed():
        node.emit(SendToPeer(event.node_id, msgspec.structs.replace(report_of(node), inventory=node.inventory())))


def watch_peers(node: NodeState) -> None:
    """A keeper of the last incarnation that cannot be reached for `peers.dead_s` is dead: no plan waits for it."""
    orders = node.orders
    if orders.coordinator is None:
        return
    for node_id in list(orders.coordinator.sources):
        since = max(orders.peers_set_at, orders.down_since.get(node_id, orders.peers_set_at))
        if not orders.links.get(node_id) and node.now - since >= node.config.peers.dead_s:
            coordinator.lose_source(orders.coordinator, node_id, node.now)


def _from_coordinator(node: NodeState, event: PeerMessage, orders: Orders) -> bool:
    """A keeper that replaced the coordinator's dead one has the same instance (`KeeperAddress`)."""
    membership = node.orders.membership
    if membership is None or membership.incarnation != orders.incarnation:
        return False
    return (membership.nodes[0].node_id, membership.nodes[0].instance) == (event.node_id, event.instance)


def _is_member(node: NodeState, event: PeerMessage) -> bool:
    cards = node.orders.membership.nodes if node.orders.membership is not None else []
    return any((card.node_id, card.instance) == (event.node_id, event.instance) for card in cards)


# Reports


def report_of(node: NodeState) -> Report:
    orders, trainers, config = node.orders, node.trainers.registered, node.config.parity
    orders.report_number += 1
    first = next(iter(trainers.values())).register if trainers else None
    progress = max((node.progress.get(index, -1) for index in trainers), default=-1)
    grants = tuple(report for grant in node.grants.open if (report := grant.progress()) is not None)
    opened = tuple(GrantOrder(grant.serial, grant.step) for grant in node.grants.open)
    whole, loaded = node.trainers.complete(), node.all_loaded()
    inventory = node.inventory() if node.state == RESTORING and restore.inventory_ready(node) else None
    damaged: set[Version] = set()
    if "corrupt_slots" in node.counters:
        damaged = {slot.version for _, slot in node.arenas.slots() if slot.state == CORRUPT and slot.version}
    return Report(
        node_id=node.card.node_id, instance=node.card.instance, incarnation=node.incarnation,
        number=orders.report_number, state=node.state, card=node.card, whole=whole,
        ranks=tuple(sorted(t.rank for t in trainers.values())), world_size=first.world_size if first else 0,
        progress=progress, step_s=_step_s(node, progress), ready=loaded and node.state == SERVING,
        room=loaded and snapshots.has_free_slots(node), every=first.every if first else 1,
        slots=arenas.slots_per_rank(node), grants=grants, opened=opened, placed=tuple(node.protection.sets),
        exchange=node.protection.exchange, audit=orders.audit, damaged=tuple(damaged), unreachable=_unreachable(node),
        finished=whole and _finished(node), losses=config.losses, group_size=config.group_size,
        orders=orders.received, inventory=inventory, restored=node.restore.ready_number,
        failures=tuple(node.restore.failures),
    )  # fmt: skip


def _step_s(node: NodeState, progress: int) -> float:
    """Seconds per step, smoothed: a grant must be ahead of every rank when it arrives."""
    seen, at, step_s = node.orders.pace
    if progress < seen or seen < 0:
        node.orders.pace = (progress, node.now, 0.0)
    elif progress > seen and node.now > at:
        now_s = (node.now - at) / (progress - seen)
        node.orders.pace = (progress, node.now, now_s if step_s == 0 else 0.7 * step_s + 0.3 * now_s)
    return node.orders.pace[2]


def _unreachable(node: NodeState) -> tuple[str, ...]:
    members = node.orders.active.group.members if node.orders.active.group is not None else ()
    return tuple(m for m in members if m != node.card.node_id and not node.orders.links.get(m))


def _finished(node: NodeState) -> bool:
    return node.trainers.opening is None and all(t.finished for t in node.trainers.registered.values())


def _send_report(node: NodeState) -> None:
    """Report to the coordinator, when something changed or a heartbeat is due; former sources do so too."""
    orders = node.orders
    assert orders.membership is not None
    to = orders.membership.nodes[0].node_id
    if to == node.card.node_id or not orders.links.get(to):
        return
    if not orders.report_changed and node.now - orders.sent_at < HEARTBEAT_S:
        return
    report = report_of(node)
    key = (report.state, report.whole, report.ready, report.room, report.grants, report.opened, report.placed,
           report.exchange, report.damaged, report.finished, report.orders and report.orders.order,
           report.inventory, report.restored, report.failures, report.audit, report.incarnation)  # fmt: skip
    if key != orders.sent_key or node.now - orders.sent_at >= HEARTBEAT_S:
        orders.sent_key, orders.sent_at = key, node.now
        node.emit(SendToPeer(to, report))


def digests_read(node: NodeState, event: ReplicaDigestsRead) -> None:
    node.orders.audit = (event.audit, event.answer)


# Orders


def _send_orders(node: NodeState, job: CoordinatorState) -> None:
    """Send every node its orders, when they changed or a heartbeat is due."""
    orders, order = node.orders, job.orders.order
    if order == orders.sent_order and node.now - orders.sent_at < HEARTBEAT_S:
        return
    orders.sent_order, orders.sent_at = order, node.now
    for node_id in (*job.views, *job.sources):
        if node_id != node.card.node_id and orders.links.get(node_id):
            node.emit(SendToPeer(node_id, job.orders_for(node_id)))


def take_orders(node: NodeState, orders: Orders) -> bool:
    """Follow the coordinator's orders. False when that changed nothing."""
    if orders.incarnation != node.incarnation:
        return False
    own = node.orders
    # A ledger keeps only a part of the orders: the coordinator's own copy holds more.
    fresh = orders.newer_than(own.received) or (own.from_ledger and orders.order == own.active.order)
    if fresh:
        own.received, own.from_ledger = orders, False
    newest = own.received
    began = newest is not None and newest.restore is not None and restore.follow_plan(node, newest.restore)
    if began:
        snapshots.take_up_grants(node)
    if newest is None or node.state != SERVING or not (newest.restore is None or newest.restore.begin):
        return fresh
    before, changed = own.active, newest is not own.active
    own.active = newest
    closed = snapshots.close_grants(node)
    if changed:
        _retain(node, before)
    issued = snapshots.issue_grants(node)
    if own.active.ready:
        restore.answer_loaded(node)
        if not before.ready:
            node.emit(effects.DropReplicaCache())
    snapshots.report_outcomes(node, closed, before)
    if own.active.finished and _finished(node):
        node.emit(effects.End("training finished"))
    return changed or issued or bool(closed)


def _retain(node: NodeState, before: Orders) -> None:
    """What is retained may have changed: write it to the ledger, and free the rest."""
    active = node.orders.active
    arenas.note_complete(node, active.complete)
    if before.retain != active.retain or before.protected_by != active.protected_by:
        arenas.drop_replaced(node)
    protection.follow_orders(node)
    if active.audit != before.audit:
        node.orders.audit = None  # the answer to the question before is large, and in every report
        if active.audit is not None:
            node.emit(effects.ReadReplicaDigests(active.audit))
    arenas.write_ledger(node)


# The ledger


def adopt_ledger(node: NodeState, ledger: Ledger) -> None:
    """Take over what an earlier keeper wrote. Numbers only grow: any record may be the newest that is left."""
    newer = arenas.note_ledger(node, ledger)
    if newer and not node.trainers.registered:  # given back late, it changes nothing for an incarnation that has begun
        _adopt_orders(node, ledger)


def _adopt_orders(node: NodeState, ledger: Ledger) -> None:
    """Take over the last orders of an earlier keeper: what is retained, and where a coordinator continues."""
    number, nonce, attempt = ledger.protected_by
    covered = ledger.protected or ledger.base  # base: its parity is kept, though a member of its group is lost
    by = SetKey(covered, Incarnation(number, nonce), attempt) if covered is not None and number else None
    outcomes = (GrantOutcome(ledger.settled, None),) if ledger.settled else ()
    active = Orders(
        ledger.incarnation, ledger.epoch, ledger.seq, ledger.attempt, ledger.protected, by, ledger.current,
        ledger.target, ledger.base, outcomes=outcomes,
    )  # fmt: skip
    node.orders.active = active
    node.grants.adopt_resolved(ledger.settled)
    if ledger.epoch:
        node.orders.received, node.orders.from_ledger = active, True
