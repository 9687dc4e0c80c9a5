"""Restore: one plan for the job, ready on all nodes, then BEGIN. Pure.

Owner of `CoordinatorState.restore`, and of what the views exclude. What fails is left out of the next plan: bytes
that do not match for good, what could not be reached for a while.
"""

from __future__ import annotations

import msgspec

from keepstep.keeper.coordinator.messages import Failure, Report, RestoreOrder
from keepstep.keeper.coordinator.state import RESTORING, SERVING, CoordinatorState
from keepstep.recovery.inventory import Inventory
from keepstep.recovery.plan import Plan, RankSource, covering, plan, stands
from keepstep.types import Version


def count(job: CoordinatorState, report: Report) -> None:
    ready = report.restored == job.restore.plan_number and job.restore.plan is not None
    (job.restore.ready.add if ready else job.restore.ready.discard)(report.node_id)
    for failure in report.failures:
        if failure.plan == job.restore.plan_number:
            _exclude(job, failure)


def restore(job: CoordinatorState, now: float) -> None:
    """Plan, or begin when all nodes are ready."""
    if job.restore.plan is None and _may_plan(job, now):
        _make_plan(job, now)
    chosen = job.restore.plan
    if chosen is not None and not chosen.failure and len(job.restore.ready) == len(job.views):
        _begin(job, chosen, now)


def _may_plan(job: CoordinatorState, now: float) -> bool:
    """Every member has reported what it holds; keepers of the last incarnation too, or had the time to do so."""
    if any(report.inventory is None or not report.whole for report in job.reports()):
        return False
    silent = [v for v in job.sources.values() if v.report is None or v.report.inventory is None]
    return not silent or now - job.started_at >= job.deadlines.inventory_s


def _make_plan(job: CoordinatorState, now: float) -> None:
    inventories, reachable = _inventories(job)
    silent = [node_id for node_id in (*job.views, *job.sources) if node_id not in inventories]
    homes = {rank: report.node_id for report in job.reports() for rank in report.ranks}
    alone = len(job.views) == 1
    chosen = plan(reachable, {} if alone else homes, silent)
    if reachable != inventories:
        best = plan(inventories, {} if alone else homes, silent)
        if best.version != chosen.version:
            # It is held, only out of reach: that never costs a version. Ask again, in a while.
            if now < job.restore.planned_at + job.deadlines.ask_again_s:
                return
            if now - job.started_at >= job.deadlines.inventory_s and _drop_unreachable_sources(job):
                return
            chosen = best
            for view in (*job.views.values(), *job.sources.values()):
                view.away.clear()
    job.restore.planned_at, job.restore.inventories = now, inventories
    job.restore.covered_by = covering(inventories, chosen.version) if chosen.version is not None else None
    problem = _mismatch(job, chosen, None if alone else len(homes))
    if problem:
        chosen = Plan(None, (), chosen.reasons, problem)
    damage = any(inventory.damaged for inventory in inventories.values())
    _order(job, chosen, {} if alone else homes, damage=damage)


def _mismatch(job: CoordinatorState, chosen: Plan, num_ranks: int | None) -> str:
    """Why this job cannot go on from that version. `num_ranks` None: a node alone compares its own ranks."""
    version = chosen.version
    if version is None:
        return ""
    if num_ranks is not None and chosen.world_size != num_ranks:
        advice = "start with the same number of ranks, or give the state up with keepstep release"
        return f"{version} was saved by {chosen.world_size} ranks, this job has {num_ranks}: {advice}"
    if version.incarnation.number >= job.incarnation.number:
        # What this incarnation saves would count as older. The next one gets a larger number.
        begun = f"incarnation {job.incarnation.number} had begun"
        return f"{version} was given back when {begun}: the launcher restarts the job"
    return ""


def _order(job: CoordinatorState, chosen: Plan, homes: dict[int, str], *, damage: bool) -> None:
    """Order every node to obtain the snapshots of its ranks. `homes` empty: all ranks are on the only node."""
    job.restore.plan, job.restore.plan_number = chosen, job.restore.plan_number + 1
    job.restore.ready.clear()
    pieces: dict[str, list[RankSource]] = {node_id: [] for node_id in job.views}
    for piece in chosen.pieces:
        pieces[homes[piece.rank] if homes else next(iter(pieces))].append(piece)
    for node_id, own in pieces.items():
        job.restore.orders[node_id] = RestoreOrder(
            job.restore.plan_number, chosen.version, tuple(own), chosen.reasons, chosen.failure, damage,
            world_size=chosen.world_size, local_world_size=chosen.local_world_size, holders=chosen.holders,
        )  # fmt: skip
    job.renew()


def _drop_unreachable_sources(job: CoordinatorState) -> bool:
    """Keepers of an earlier incarnation that a node cannot reach have had their time. Members are waited for."""
    unreachable = [node_id for node_id, view in job.sources.items() if view.away]
    job.drop_sources(*unreachable)
    return bool(unreachable)


def _inventories(job: CoordinatorState) -> tuple[dict[str, Inventory], dict[str, Inventory]]:
    views = {**job.views, **job.sources}
    held = {n: v.report.inventory for n, v in views.items() if v.report is not None and v.report.inventory is not None}
    sound = {node_id: _without(inventory, views[node_id].excluded) for node_id, inventory in held.items()}
    return sound, {node_id: _without(inventory, views[node_id].away) for node_id, inventory in sound.items()}


def _begin(job: CoordinatorState, chosen: Plan, now: float) -> None:
    for node_id, order in job.restore.orders.items():
        job.restore.orders[node_id] = msgspec.structs.replace(order, begin=True)
    version = chosen.version
    job.renew()
    job.change(base=version, complete=version)
    covered_by = job.restore.covered_by
    # What survives a node goes on to do so until this incarnation has something newer that does.
    if covered_by is not None and job.protection.groups:
        job.change(protected_by=covered_by)
        members = {n: i for n, i in job.restore.inventories.items() if n in job.views}
        if covered_by.version != version or stands(members, covered_by):
            job.change(protected=covered_by.version)
    job.enter(SERVING)
    job.protection.begin(now)


def _exclude(job: CoordinatorState, failure: Failure) -> None:
    """Leave a source out of the next plan; the same failure again ends the restore."""
    view = job.views.get(failure.node_id) or job.sources.get(failure.node_id)
    if view is not None:
        left_out = view.excluded if failure.damaged else view.away
        if (failure.version, failure.rank) in left_out:
            chosen = job.restore.plan
            if job.state == RESTORING and chosen is not None and not chosen.failure:
                _fail(job, chosen, failure.text)
            return
        left_out.add((failure.version, failure.rank))
    job.warn(failure.text)
    if job.state == RESTORING:
        job.restore.plan = None


def _fail(job: CoordinatorState, chosen: Plan, text: str) -> None:
    """The target failed, not a source (it has no memory, for example): an error instead of planning for ever."""
    problem = f"{chosen.version} cannot be brought to where it is needed: {text}"
    _order(job, Plan(None, (), (*chosen.reasons, text), problem), {}, damage=False)


def _without(inventory: Inventory, excluded: set[tuple[Version, int]]) -> Inventory:
    if not excluded:
        return inventory
    holdings = tuple(h for h in inventory.holdings if (h.version, h.rank) not in excluded)
    sets = tuple(s for s in inventory.sets if (s.key.version, -1) not in excluded)
    return msgspec.structs.replace(inventory, holdings=holdings, sets=sets)


def take_over(job: CoordinatorState, number: int, orders: dict[str, RestoreOrder]) -> None:
    """Count plans on from this number; nodes that have not begun receive these orders again."""
    job.restore.plan_number = max(job.restore.plan_number, number)
    job.restore.orders.update(orders)
