"""Grants: the same step for all ranks, ahead of every one of them, until all nodes have said how it ended. Pure."""

from __future__ import annotations

import math

import msgspec

from keepstep.keeper.coordinator.divergence import Comparison, odd_class
from keepstep.keeper.coordinator.messages import GrantOrder, GrantOutcome, ReplicaAudit
from keepstep.keeper.coordinator.state import CoordinatorState, JobGrant, NodeView
from keepstep.types import Version

MAX_LEAD = 64
# What an order may take to reach the last trainer, until a grant has come too late for one.
DELIVERY_S = 0.02
# Grants that wait for each other after one that did not was void: a rank could not keep up, or not in step.
ONE_BY_ONE = 16


def settle(board: CoordinatorState, now: float) -> None:
    """Close what all nodes have finished with, in order."""
    while board.open:
        grant = board.open[0]
        if len(grant.said) < len(board.views):
            break
        if grant.void is None and grant.sealed < len(board.views):
            break
        if grant.void is None and not _agree(board, grant):
            break
        board.open.pop(0)
        if grant.void is None:
            (version,) = grant.versions
            board.outcomes.append(GrantOutcome(grant.serial, version))
            _completed(board, version, now)
        else:
            rank, reason = grant.void
            if grant.ahead:
                board.one_by_one = ONE_BY_ONE
            if grant.late:
                # The grant came too late for one of them: give the next one more lead.
                board.lead = min(2 * board.lead, MAX_LEAD)
            board.outcomes.append(GrantOutcome(grant.serial, None, rank, reason, grant.diverged))
        left = tuple(GrantOrder(g.serial, g.step) for g in board.open)
        board.change(grants=left, outcomes=tuple(board.outcomes), audit=None)


def _agree(board: CoordinatorState, grant: JobGrant) -> bool:
    """Replicated state is the same on all nodes that hold it; otherwise the version is void, by path and rank.

    False while the nodes are asked what exactly differs.
    """
    if grant.comparison is None:
        odd = odd_class(said.shares for said in grant.said.values())
        if odd is None:
            return True
        (version,) = grant.versions
        grant.comparison = Comparison(ReplicaAudit(version, odd))
    verdict = None
    while verdict is None:
        asked = grant.comparison.asked
        board.change(audit=asked)
        reports = [view.report for view in board.views.values() if view.report is not None]
        answers = [report.audit[1] for report in reports if report.audit is not None and report.audit[0] == asked]
        if len(answers) < len(board.views):
            return False
        verdict = grant.comparison.hear(answers)
    grant.void, grant.diverged = (verdict.rank, verdict.reason), verdict.paths
    return True


def _completed(board: CoordinatorState, version: Version, now: float) -> None:
    if board.orders.complete == board.orders.protected:
        board.advanced_at = now  # there was nothing to protect: its time begins now
    if board.orders.complete is None or version > board.orders.complete:
        board.change(complete=version)
    if not board.groups:  # a version of this incarnation stands: the one it was restored from may go
        board.change(base=None)
    board.lead = max(1, board.lead - 1)


def grant(board: CoordinatorState, now: float) -> None:
    """Give the next one, as soon as there is room for it everywhere."""
    # Counts, not sets: this is asked with every report of every node.
    if len(board.ready) < len(board.views) or board.finished:
        return
    if not board.orders.ready:
        board.change(ready=True)
    written = sum(len(grant.said) < len(board.views) for grant in board.open)
    if written > _may_be_ahead(board) or len(board.open) >= max(2, board.slots) - 1:
        return
    if len(board.rooms) < len(board.views):
        return
    reports = [view.report for view in board.views.values() if view.report is not None]
    step_s = max(report.step_s for report in reports)
    ahead = max(_progress_now(view, now) for view in board.views.values())
    lead = board.lead
    if len(board.views) > 1 and step_s > 0:
        lead = max(lead, math.ceil(DELIVERY_S * board.lead / step_s) + 1)
    if board.open:
        lead = max(lead, board.open[-1].step + 1 - ahead)
    every = reports[0].every
    step = -(-(ahead + lead) // every) * every
    board.serial += 1
    board.one_by_one = max(0, board.one_by_one - 1)
    board.open.append(JobGrant(board.serial, step, ahead=written > 0))
    board.rooms.clear()
    board.change(grants=tuple(GrantOrder(g.serial, g.step) for g in board.open), serial=board.serial)
    board.orders = msgspec.structs.replace(board.orders, retain_seq=board.orders.seq)


def _may_be_ahead(board: CoordinatorState) -> int:
    """Grants that may be given while the one before is not committed everywhere."""
    return int(board.slots >= 3 and not board.one_by_one)


def _progress_now(view: NodeView, now: float) -> int:
    report = view.report
    assert report is not None
    if report.step_s <= 0:
        return report.progress
    return report.progress + math.floor((now - view.heard_at) / report.step_s)
