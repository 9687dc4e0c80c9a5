"""Grants: the same step for all ranks, ahead of every one of them, until all nodes have reported the outcome. Pure.

Owner of `CoordinatorState.grants`.
"""

from __future__ import annotations

import math

from keepstep.keeper.coordinator.messages import GrantOrder, GrantOutcome, Orders, Report
from keepstep.keeper.coordinator.state import CoordinatorState, JobGrant, NodeView
from keepstep.parity.divergence import Comparison, ReplicaAudit, diverged_set
from keepstep.types import Version

MAX_LEAD = 64  # steps: however often grants arrive too late, they are given no further ahead
DELIVERY_S = 0.02  # what an order takes to reach the last trainer, until a grant has arrived too late for one
# After an overlapping grant was void, this many wait for each other: a rank could not keep up, or not in step.
SERIALIZED_GRANTS = 16


def count(job: CoordinatorState, report: Report) -> None:
    seen = report.orders is not None and report.orders.order >= job.order_at(job.orders.retain_seq)
    (job.grants.room.add if report.room and seen else job.grants.room.discard)(report.node_id)
    for progress in report.grants:
        grant = next((g for g in job.grants.open if g.serial == progress.serial), None)
        if grant is not None:
            grant.receive(report.node_id, progress)


def settle(job: CoordinatorState, now: float) -> None:
    """Close what all nodes have finished with, in order."""
    grants, num_nodes = job.grants, len(job.views)
    while grants.open:
        grant = grants.open[0]
        if len(grant.progress) < num_nodes:
            break
        if grant.void is None and (grant.num_sealed < num_nodes or not _replicas_agree(job, grant)):
            break
        grants.open.pop(0)
        if grant.void is None:
            (version,) = grant.versions
            grants.outcomes.append(GrantOutcome(grant.serial, version))
            _complete(job, version, now)
        else:
            rank, reason = grant.void
            if grant.overlaps_previous:
                grants.serialized_until = grants.serial + SERIALIZED_GRANTS
            if grant.late:
                grants.lead = min(2 * grants.lead, MAX_LEAD)
            grants.outcomes.append(GrantOutcome(grant.serial, None, rank, reason, grant.diverged))
        job.change(grants=open_orders(job), outcomes=tuple(grants.outcomes), audit=None)


def _replicas_agree(job: CoordinatorState, grant: JobGrant) -> bool:
    """Replicated state is the same on all nodes that hold it; otherwise the version is void, by path and rank.

    False while the nodes are asked what exactly differs.
    """
    if grant.comparison is None:
        class_id = diverged_set(progress.shares for progress in grant.progress.values())
        if class_id is None:
            return True
        (version,) = grant.versions
        grant.comparison = Comparison(ReplicaAudit(version, class_id))
    divergence = None
    while divergence is None:
        question = grant.comparison.question
        job.change(audit=question)
        answers = [r.audit[1] for r in job.reports() if r.audit is not None and r.audit[0] == question]
        if len(answers) < len(job.views):
            return False
        divergence = grant.comparison.receive(answers)
    grant.diverge(divergence.rank, divergence.reason, divergence.paths)
    return True


def _complete(job: CoordinatorState, version: Version, now: float) -> None:
    if job.orders.complete == job.orders.protected:
        job.protection.start_clock(now)  # there was nothing to protect: its time begins now
    if job.orders.complete is None or version > job.orders.complete:
        job.change(complete=version)
    if not job.protection.groups:  # a version of this incarnation is complete: the restored one may go
        job.change(base=None)
    job.grants.lead = max(1, job.grants.lead - 1)


def grant(job: CoordinatorState, now: float) -> None:
    """Give the next one, as soon as there is room for it everywhere."""
    grants, num_nodes = job.grants, len(job.views)
    if len(job.ready) < num_nodes or job.finished:
        return
    if not job.orders.ready:
        job.change(ready=True)
    unwritten = sum(len(grant.progress) < num_nodes for grant in grants.open)
    # A grant may be given while the one before is not committed everywhere.
    may_overlap = job.slots >= 3 and grants.serial >= grants.serialized_until
    if unwritten > int(may_overlap) or len(grants.open) >= max(2, job.slots) - 1 or len(grants.room) < num_nodes:
        return
    grants.serial += 1
    grants.open.append(JobGrant(grants.serial, _next_step(job, now), overlaps_previous=unwritten > 0))
    job.change(grants=open_orders(job), serial=grants.serial)
    job.expect_room()


def _next_step(job: CoordinatorState, now: float) -> int:
    """Ahead of the furthest rank by what an order takes to arrive, and a multiple of `every`."""
    reports, lead = job.reports(), job.grants.lead
    step_s = max(report.step_s for report in reports)
    furthest = max(_progress_now(view, now) for view in job.views.values())
    if len(job.views) > 1 and step_s > 0:
        lead = max(lead, math.ceil(DELIVERY_S * job.grants.lead / step_s) + 1)
    if job.grants.open:
        lead = max(lead, job.grants.open[-1].step + 1 - furthest)
    every = reports[0].every
    return -(-(furthest + lead) // every) * every


def _progress_now(view: NodeView, now: float) -> int:
    report = view.report
    assert report is not None
    steps = math.floor((now - view.received_at) / report.step_s) if report.step_s > 0 else 0
    return report.progress + steps


def open_orders(job: CoordinatorState) -> tuple[GrantOrder, ...]:
    return tuple(GrantOrder(grant.serial, grant.step) for grant in job.grants.open)


def take_over(job: CoordinatorState, orders: Orders, reports: list[Report]) -> None:
    """Open the grants that ranks may be writing under, and know the outcomes of the others."""
    grants = job.grants
    grants.outcomes.extend(orders.outcomes)
    resolved = max((outcome.serial for outcome in grants.outcomes), default=0)
    grants.serial = max([orders.serial, resolved, *(g.serial for r in reports for g in r.opened)])
    steps = {g.serial: g.step for r in reports for g in (*r.opened, *orders.grants)}
    grants.open += [JobGrant(serial, steps[serial]) for serial in sorted(steps) if serial > resolved]
