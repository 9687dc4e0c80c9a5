"""What the job restores: one plan for all, ready on all nodes, then BEGIN. Pure.

What fails is left out of the next plan: bytes that do not match for good, what could not be reached for a while.
"""

from __future__ import annotations

import msgspec

from keepstep.keeper.coordinator.messages import Failure, RestoreOrder
from keepstep.keeper.coordinator.state import RESTORING, SERVING, CoordinatorState
from keepstep.recovery.inventory import Inventory
from keepstep.recovery.plan import Plan, RankSource, covering, plan, stands
from keepstep.types import Version


def restore(board: CoordinatorState, now: float) -> None:
    if board.plan is None:
        if not _may_plan(board, now):
            return
        _make_plan(board, now)
    if board.plan is None or board.plan.failure:
        return
    if len(board.restored) == len(board.views):
        _begin(board, now)


def _may_plan(board: CoordinatorState, now: float) -> bool:
    members = [view.report for view in board.views.values() if view.report is not None]
    if any(r.inventory is None or not r.whole for r in members):
        return False
    silent = [v for v in board.sources.values() if v.report is None or v.report.inventory is None]
    return not silent or now - board.started_at >= board.terms.inventory_s


def _make_plan(board: CoordinatorState, now: float) -> None:
    inventories, now_there = _inventories(board)
    silent = [node_id for node_id in (*board.views, *board.sources) if node_id not in inventories]
    reports = [view.report for view in board.views.values() if view.report is not None]
    homes = {rank: report.node_id for report in reports for rank in report.ranks}
    alone = len(board.views) == 1
    made = plan(now_there, {} if alone else homes, silent)
    if now_there != inventories:
        best = plan(inventories, {} if alone else homes, silent)
        if best.version != made.version:
            # It is there, only out of reach: that never costs a version. Ask again, in a while.
            if now < board.planned_at + board.terms.ask_again_s:
                return
            if now - board.started_at >= board.terms.inventory_s and _forget_sources(board):
                return
            made = best
            for view in (*board.views.values(), *board.sources.values()):
                view.away.clear()
    board.planned_at = now
    board.found = inventories
    board.covered = covering(inventories, made.version) if made.version is not None else None
    if made.version is not None and not alone and made.world_size != len(homes):
        text = (
            f"{made.version} was saved by {made.world_size} ranks, this job has {len(homes)}: "
            "start with the same number of ranks, or give the state up with keepstep release"
        )
        made = Plan(None, (), made.reasons, text)
    if made.version is not None and made.version.incarnation.number >= board.incarnation.number:
        # What this life saves would count as older. The next one knows better.
        text = (
            f"{made.version} was given back when incarnation {board.incarnation.number} had begun: "
            "the launcher restarts the job"
        )
        made = Plan(None, (), made.reasons, text)
    board.plan, board.plan_number = made, board.plan_number + 1
    board.restored.clear()
    damage = any(i.damaged for i in inventories.values())
    mine: dict[str, list[RankSource]] = {node_id: [] for node_id in board.views}
    for piece in made.pieces:
        mine[next(iter(mine)) if alone else homes[piece.rank]].append(piece)
    for node_id, pieces in mine.items():
        board.pieces[node_id] = RestoreOrder(
            board.plan_number, made.version, tuple(pieces), made.reasons, made.failure, damage,
            world_size=made.world_size, local_world_size=made.local_world_size, holders=made.holders,
        )  # fmt: skip
    _change_restore(board)


def _forget_sources(board: CoordinatorState) -> bool:
    """A keeper of an incarnation before that somebody cannot reach: its time is over. Members are waited for."""
    before = len(board.sources)
    board.sources = {node_id: view for node_id, view in board.sources.items() if not view.away}
    return len(board.sources) < before


def _inventories(board: CoordinatorState) -> tuple[dict[str, Inventory], dict[str, Inventory]]:
    """What is held and sound, and of that what could be reached so far."""
    found: dict[str, Inventory] = {}
    reached: dict[str, Inventory] = {}
    for node_id, view in {**board.views, **board.sources}.items():
        if view.report is not None and view.report.inventory is not None:
            found[node_id] = _without(view.report.inventory, view.excluded)
            reached[node_id] = _without(found[node_id], view.away)
    return found, reached


def _change_restore(board: CoordinatorState) -> None:
    board.orders = msgspec.structs.replace(board.orders, seq=board.orders.seq + 1)


def _begin(board: CoordinatorState, now: float) -> None:
    assert board.plan is not None
    board.pieces = {n: msgspec.structs.replace(order, begin=True) for n, order in board.pieces.items()}
    version = board.plan.version
    _change_restore(board)
    board.change(base=version, complete=version)
    covered = board.covered
    # What survives a node goes on to do so until this incarnation has something newer that does.
    if covered is not None and board.groups:
        board.change(protected_by=covered)
        if covered.version != version or stands({n: i for n, i in board.found.items() if n in board.views}, covered):
            board.change(protected=covered.version)
    board.state, board.moved_at, board.advanced_at = SERVING, now, now


def exclude(board: CoordinatorState, failure: Failure) -> None:
    view = board.views.get(failure.node_id) or board.sources.get(failure.node_id)
    if view is not None:
        left_out = view.excluded if failure.damaged else view.away
        if (failure.version, failure.rank) in left_out:
            if board.state == RESTORING and board.plan is not None and not board.plan.failure:
                _give_up(board, failure.text)
            return
        left_out.add((failure.version, failure.rank))
    board.faults.append(failure.text)
    if board.state == RESTORING:
        board.plan = None  # plan again, without it


def _give_up(board: CoordinatorState, text: str) -> None:
    """What failed is not a source that a plan can do without: no memory, for one. Better an error than to wait."""
    assert board.plan is not None
    reasons = (*board.plan.reasons, text)
    board.plan = Plan(None, (), reasons, f"{board.plan.version} cannot be brought to where it is needed: {text}")
    board.plan_number += 1
    board.restored.clear()
    for node_id in board.views:
        board.pieces[node_id] = RestoreOrder(board.plan_number, None, (), reasons, board.plan.failure)
    _change_restore(board)


def _without(inventory: Inventory, excluded: set[tuple[Version, int]]) -> Inventory:
    if not excluded:
        return inventory
    return msgspec.structs.replace(
        inventory,
        holdings=tuple(h for h in inventory.holdings if (h.version, h.rank) not in excluded),
        sets=tuple(s for s in inventory.sets if (s.key.version, -1) not in excluded),
    )
