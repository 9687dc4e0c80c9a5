"""Takeover: go on where the last coordinator stood, or begin with a restore. Pure.

A keeper that takes over starts from the newest orders that any node follows, once all nodes have reported. Groups
never change while an incarnation lasts.
"""

from __future__ import annotations

import msgspec

from keepstep.keeper.coordinator import grants, protection, restore
from keepstep.keeper.coordinator.messages import GroupOrder, Orders, Report, RestoreOrder
from keepstep.keeper.coordinator.state import RESTORING, SERVING, CoordinatorState
from keepstep.parity.placement import NodePlace, cut_groups, keep_positions
from keepstep.recovery.plan import OWN, RankSource
from keepstep.types import Version


def gather(job: CoordinatorState, now: float) -> None:
    """Wait for all nodes; then go on from the newest orders that any of them follows, or plan a restore."""
    if job.reported != job.views.keys():
        return
    reports = job.reports()
    followed = [r.orders for r in reports if r.orders is not None and r.orders.incarnation == job.incarnation]
    # A rank that is not back yet may be writing under a grant that only it can name, or, where there is no other
    # node, hold memory that nobody else has given back.
    if any(not r.whole and (r.state == SERVING or len(job.views) == 1) for r in reports):
        return
    rejoined = any(r.state == SERVING for r in reports)  # none serves before all are ready
    unknown = Orders(job.incarnation, 0, 0) if rejoined else None  # they came back without a ledger
    newest = max(followed, key=lambda orders: orders.order, default=unknown)
    groups = _known_groups(job, followed)
    protection.set_groups(job, groups or _form_groups(job, reports))
    epoch = newest.epoch + 1 if newest is not None else 1
    job.start_orders(Orders(job.incarnation, epoch, 1, every=reports[0].every, cards=tuple(job.cards.values())))
    begun = rejoined or any(o.restore is not None and o.restore.begin for o in followed)
    # Orders that retain something were given after BEGIN, though every node that received BEGIN may have died.
    if newest is not None and (begun or newest.retain):
        back = [r for r in reports if r.state == RESTORING]
        if any(r.inventory is None or not r.whole for r in back):
            return  # its keeper died after BEGIN: what its ranks restore must be found again
        begun = begun or all(len(_held_since(r, newest.complete, 0).pieces) == len(r.ranks) for r in back)
    if newest is None or not begun:
        restore.take_over(job, max((o.restore.number for o in followed if o.restore is not None), default=0), {})
        job.enter(RESTORING)
        return
    _take_over(job, newest, reports)
    if job.orders.target is not None and not groups:
        protection.abandon(job, "its groups are not known any more", now)  # parity of two placements must not mix


def _take_over(job: CoordinatorState, newest: Orders, reports: list[Report]) -> None:
    job.adopt_cards({card.node_id: card for card in newest.cards})
    epoch, cards = job.orders.epoch, tuple(job.cards.values())
    alone = {"group": None, "restore": None, "grants": ()}  # given for single nodes, or again below
    job.start_orders(msgspec.structs.replace(newest, epoch=epoch, seq=1, retain_seq=1, cards=cards, **alone))
    followed = [r.orders for r in reports if r.orders is not None]
    complete = [orders.complete for orders in followed if orders.complete is not None]
    if newest.complete is not None and max(complete, default=newest.complete) > newest.complete:
        job.change(exposed=True)  # a ledger does not say so, but nothing else takes a version back
    plans = [orders.restore.number for orders in followed if orders.restore is not None]
    number, again = max([job.restore.plan_number, *plans]), dict[str, RestoreOrder]()
    for report in reports:  # nodes that have not begun receive it again
        last = report.orders.restore if report.orders is not None else None
        if last is None and report.state == RESTORING:
            last = _held_since(report, newest.complete, number)
        if last is not None:
            again[report.node_id] = msgspec.structs.replace(last, begin=True)
    restore.take_over(job, number, again)
    grants.take_over(job, newest, reports)
    job.enter(SERVING)
    job.change(grants=grants.open_orders(job), serial=job.grants.serial)


def _known_groups(job: CoordinatorState, followed: list[Orders]) -> dict[str, GroupOrder]:
    """The groups of this incarnation, where the nodes know all of them."""
    groups = {node_id: o.group for o in followed if o.group is not None for node_id in o.group.members}
    return groups if groups.keys() == job.views.keys() else {}


def _form_groups(job: CoordinatorState, reports: list[Report]) -> dict[str, GroupOrder]:
    """New groups; members of an earlier group keep their positions where all of them are still here."""
    losses = min(reports[0].losses, len(reports) - 1)
    if losses <= 0:
        return {}
    before = max((s for r in reports if r.inventory for s in r.inventory.sets), key=lambda s: s.key, default=None)
    nodes = list(job.views)
    order = keep_positions(before.members, nodes) if before and set(before.members) <= set(nodes) else nodes
    places = [NodePlace(node_id, job.domains[node_id]) for node_id in order]
    groups: dict[str, GroupOrder] = {}
    for positions in cut_groups(places, reports[0].group_size, losses):
        members = tuple(places[i].node_id for i in positions)
        group = GroupOrder(members, min(losses, len(members) - 1))
        groups |= dict.fromkeys(members, group)
    return groups


def _held_since(report: Report, version: Version | None, number: int) -> RestoreOrder:
    """What the ranks of a node restored before its keeper died: no rank has stepped since, so it is complete still."""
    held = {h.rank: h for h in report.inventory.holdings if h.version == version} if report.inventory else {}
    pieces = tuple(
        RankSource(h.version, rank, OWN, report.node_id, h.size_bytes, h.local_index, h.arena_id, h.slot)
        for rank, h in held.items()
        if rank in report.ranks
    )
    return RestoreOrder(
        number, version, pieces, ("this node's keeper died when all had begun",),
        world_size=report.world_size, local_world_size=len(report.ranks),
    )  # fmt: skip
