"""The coordinator's first act: go on where the one before it stood, or begin with a restore. Pure.

A keeper that takes over starts from the newest orders that any node follows, once all nodes have reported. Groups never
change while an incarnation lasts.
"""

from __future__ import annotations

import msgspec

from keepstep.keeper.coordinator import counting, protection
from keepstep.keeper.coordinator.messages import GrantOrder, GroupOrder, Orders, Report, RestoreOrder
from keepstep.keeper.coordinator.state import RESTORING, SERVING, CoordinatorState, JobGrant
from keepstep.parity.placement import NodePlace, cut_groups, keep_positions
from keepstep.recovery.plan import OWN, RankSource
from keepstep.types import Version


def gather(board: CoordinatorState, now: float) -> None:
    """Wait for all nodes; then go on from the newest orders that any of them follows, or plan a restore."""
    if board.heard != board.views.keys():
        return
    reports = [view.report for view in board.views.values() if view.report is not None]
    followed = [r.orders for r in reports if r.orders is not None and r.orders.incarnation == board.incarnation]
    # A rank that is not there yet may be writing under a grant that only it can name, or, where there is no other
    # node, hold memory that nobody else has given back.
    if any(not r.whole and (r.state == SERVING or len(board.views) == 1) for r in reports):
        return
    rejoined = any(r.state == SERVING for r in reports)  # none serves before all are ready
    unknown = Orders(board.incarnation, 0, 0) if rejoined else None  # they came back without a ledger
    newest = max(followed, key=lambda orders: orders.order, default=unknown)
    stood = _keep_groups(board, followed)
    if not stood:
        _form_groups(board, reports)
    epoch = newest.epoch + 1 if newest is not None else 1
    board.orders = Orders(board.incarnation, epoch, 1, every=reports[0].every, cards=tuple(board.cards.values()))
    begun = rejoined or any(o.restore is not None and o.restore.begin for o in followed)
    back = [r for r in reports if r.state == RESTORING]
    # Orders that keep something were given after BEGIN, though nobody may have heard it but one that died.
    if newest is not None and (begun or newest.retain):
        if any(r.inventory is None or not r.whole for r in back):
            return  # its keeper died after BEGIN: what its ranks restore must be found again
        begun = begun or all(len(_lying_there(r, newest.complete, 0).pieces) == len(r.ranks) for r in back)
    if newest is None or not begun:
        numbers = [o.restore.number for o in followed if o.restore is not None]
        board.plan_number = max([board.plan_number, *numbers])
        board.state = RESTORING
        return
    _take_over(board, newest, reports, now)
    if board.orders.target is not None and not stood:
        protection.abandon(board, "its groups are not known any more", now)  # parity of two placements must not mix


def _take_over(board: CoordinatorState, newest: Orders, reports: list[Report], now: float) -> None:
    board.cards = {card.node_id: card for card in newest.cards} | board.cards
    board.orders = msgspec.structs.replace(
        newest, epoch=board.orders.epoch, seq=1, group=None, restore=None, retain_seq=1, grants=(),
        cards=tuple(board.cards.values()),
    )  # fmt: skip
    board.outcomes.extend(newest.outcomes)
    told = [r.orders.complete for r in reports if r.orders is not None and r.orders.complete is not None]
    if newest.complete is not None and max(told, default=newest.complete) > newest.complete:
        board.change(exposed=True)  # a ledger does not say it, but nothing else takes a version back
    plans = [r.orders.restore for r in reports if r.orders is not None and r.orders.restore is not None]
    board.plan_number = max([board.plan_number, *(plan.number for plan in plans)])
    for report in reports:  # nodes that have not begun hear it again
        last = report.orders.restore if report.orders is not None else None
        if last is None and report.state == RESTORING:
            last = _lying_there(report, newest.complete, board.plan_number)
        if last is not None:
            board.pieces[report.node_id] = msgspec.structs.replace(last, begin=True)
    settled = max((outcome.serial for outcome in board.outcomes), default=0)
    board.serial = max([newest.serial, settled, *(g.serial for r in reports for g in r.opened)])
    steps = {g.serial: g.step for r in reports for g in (*r.opened, *newest.grants)}
    for serial in sorted(steps):
        if serial > settled:
            board.open.append(JobGrant(serial, steps[serial]))
    for report in reports:
        counting.count(board, report, now)
    board.state = SERVING
    board.change(grants=tuple(GrantOrder(g.serial, g.step) for g in board.open), serial=board.serial)


def _keep_groups(board: CoordinatorState, followed: list[Orders]) -> bool:
    """The groups of this incarnation, where somebody knows them all: they never change while it lasts."""
    known = {node_id: o.group for o in followed if o.group is not None for node_id in o.group.members}
    if known.keys() != board.views.keys():
        return False
    board.groups, board.losses = known, min(group.losses for group in known.values())
    return True


def _form_groups(board: CoordinatorState, reports: list[Report]) -> None:
    losses = min(reports[0].losses, len(reports) - 1)
    if losses <= 0:
        return
    before = max((s for r in reports if r.inventory for s in r.inventory.sets), key=lambda s: s.key, default=None)
    nodes = list(board.views)
    order = keep_positions(before.members, nodes) if before and set(before.members) <= set(nodes) else nodes
    places = [NodePlace(node_id, board.domains[node_id]) for node_id in order]
    for group in cut_groups(places, reports[0].group_size, losses):
        made = GroupOrder(tuple(places[i].node_id for i in group), min(losses, len(group) - 1))
        for node_id in made.members:
            board.groups[node_id] = made
    board.losses = min(group.losses for group in board.groups.values())


def _lying_there(report: Report, version: Version | None, number: int) -> RestoreOrder:
    """What the ranks of a node restored before its keeper died: no rank has stepped since, so it is complete still."""
    held = {h.rank: h for h in report.inventory.holdings if h.version == version} if report.inventory else {}
    pieces = tuple(
        RankSource(h.version, rank, OWN, report.node_id, h.size_bytes, h.local_index, h.arena_id, h.slot)
        for rank, h in held.items()
        if rank in report.ranks
    )
    sizes = (report.world_size, len(report.ranks))
    why = ("this node's keeper died when all had begun",)
    return RestoreOrder(number, version, pieces, why, world_size=sizes[0], local_world_size=sizes[1])
