"""A node's report, taken into account: counts, not sets, since this is done with every report of every node. Pure."""

from __future__ import annotations

from keepstep.keeper.coordinator import protection, restore
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import CoordinatorState


def count(board: CoordinatorState, report: Report, now: float) -> None:
    """What a member says of itself; of another incarnation nothing counts."""
    node = report.node_id
    if report.incarnation != board.incarnation:
        return
    board.heard.add(node)
    _keep(board.ready, node, report.ready)
    _keep(board.finished, node, report.finished)
    _keep(board.cut, node, bool(report.unreachable))
    _keep(board.restored, node, report.restored == board.plan_number and board.plan is not None)
    fresh = report.orders is not None and report.orders.order >= board.order_at(board.orders.retain_seq)
    _keep(board.rooms, node, report.room and fresh)
    for said in report.grants:
        grant = next((g for g in board.open if g.serial == said.serial), None)
        if grant is not None:
            grant.hear(node, said)
    key = board.target_key
    if key is not None:
        _keep(board.placed, node, key in report.placed)
        exchange = report.exchange
        if exchange is not None and exchange.key == key:
            if exchange.moved_bytes > board.moved.get(node, -1):
                board.moved_at = now
                if exchange.moved_bytes > board.moved.get(node, 0):
                    board.advanced_at = now  # slow, but it comes: nobody is asked to go on without it
                board.moved[node] = exchange.moved_bytes
            if exchange.problem and node not in board.placed:
                protection.abandon(board, f"{node}: {exchange.problem}", now)
    for failure in report.failures:
        if failure.plan == board.plan_number:
            restore.exclude(board, failure)
    protection.check_damage(board, report, now)


def _keep(found: set[str], node_id: str, belongs: bool) -> None:
    (found.add if belongs else found.discard)(node_id)
