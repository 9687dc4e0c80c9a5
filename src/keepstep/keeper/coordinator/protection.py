"""What is protected, what is being protected, and what gives way when that stands still. Pure."""

from __future__ import annotations

from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import CoordinatorState


def protect(board: CoordinatorState, now: float) -> None:
    orders = board.orders
    if not board.groups:
        return
    if orders.target is not None:
        if len(board.placed) == len(board.views):
            key = board.target_key
            board.change(protected=orders.target, protected_by=key, target=None, base=None, exposed=False)
            board.advanced_at = board.protected_at = now
            _new_target(board, now)
        elif now - board.moved_at >= board.terms.deadline_s:
            abandon(board, f"no progress for {board.terms.deadline_s:g} s", now)
    if board.orders.target is None:
        _new_target(board, now)


def _new_target(board: CoordinatorState, now: float) -> None:
    orders = board.orders
    newest = orders.complete
    if newest is None or now < board.retry_at:
        return
    by = orders.protected_by
    if newest == orders.protected and by is not None and by.incarnation == board.incarnation:
        return
    if orders.exposed and _cut_off(board):
        return  # a target would hold a slot that cannot be protected now
    board.change(target=newest, attempt=orders.attempt + 1)
    board.placed.clear()
    board.moved.clear()
    board.moved_at = now


def abandon(board: CoordinatorState, reason: str, now: float) -> None:
    board.faults.append(f"the protection of {board.orders.target} was abandoned: {reason}")
    board.change(target=None, attempt=board.orders.attempt + 1)
    board.retry_at = now + board.terms.retry_s


def _cut_off(board: CoordinatorState) -> bool:
    """Some node cannot reach another one of its group."""
    return bool(board.cut) or len(board.heard) < len(board.views)


def expose(board: CoordinatorState, now: float) -> None:
    """No slot is free and protection stands still: let snapshots go on. What is protected is never given up."""
    given_up = board.orders.exposed and board.orders.target is None and _cut_off(board)
    if not board.groups or (now - board.advanced_at < board.terms.stall_s and not given_up):
        return
    slots = board.slots
    if len(board.orders.retain) < slots or board.open:
        return
    if board.orders.target is not None and now - board.moved_at < min(board.terms.deadline_s, board.terms.stall_s):
        return  # it has only begun: given up again at once it would never end
    if board.orders.target is not None:
        abandon(board, f"unprotected for {board.terms.stall_s:g} s and no slot is free", now)
    if len(board.orders.retain) >= slots and (board.orders.protected or board.orders.base):
        board.change(complete=board.orders.protected or board.orders.base)
        if board.orders.protected is not None:
            board.change(base=None)
    board.change(exposed=True)
    board.advanced_at = now


def check_damage(board: CoordinatorState, report: Report, now: float) -> None:
    """A version whose bytes no longer match on one node is not complete; where it is protected, parity has it."""
    for version in report.damaged:
        if version == board.orders.target:
            abandon(board, f"{report.node_id}: its bytes there are damaged", now)
        orders = board.orders
        if version != orders.complete or version == orders.protected:
            continue
        if orders.protected is not None:  # also of the version that was restored: it cannot be protected any more
            board.change(complete=orders.protected, base=None if orders.base == version else orders.base)
        elif version != orders.base:
            board.change(complete=orders.base)
