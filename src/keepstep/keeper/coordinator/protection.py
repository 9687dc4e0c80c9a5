"""Protection: the target, the protected version, and what gives way when the target makes no progress. Pure.

Owner of `CoordinatorState.protection`.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.keeper.coordinator.messages import GroupOrder, Report
from keepstep.keeper.coordinator.state import CoordinatorState


def count(job: CoordinatorState, report: Report, now: float) -> None:
    node_id, protection = report.node_id, job.protection
    (protection.unlinked.add if report.unreachable else protection.unlinked.discard)(node_id)
    key, exchange = job.target_key, report.exchange
    if key is not None:
        (protection.placed.add if key in report.placed else protection.placed.discard)(node_id)
        if exchange is not None and exchange.key == key:
            before = protection.moved_bytes.get(node_id, -1)
            if exchange.moved_bytes > before:
                protection.moved_at = now
                if exchange.moved_bytes > max(before, 0):
                    protection.advanced_at = now  # slow, but it moves: snapshots do not go on without it
                protection.moved_bytes[node_id] = exchange.moved_bytes
            if exchange.problem and node_id not in protection.placed:
                abandon(job, f"{node_id}: {exchange.problem}", now)
    _check_damage(job, report, now)


def protect(job: CoordinatorState, now: float) -> None:
    """End the target when all nodes hold their parity of it, or none has moved a byte for too long; set the next."""
    orders, protection, deadline_s = job.orders, job.protection, job.deadlines.deadline_s
    if not protection.groups:
        return
    if orders.target is not None:
        if len(protection.placed) == len(job.views):
            key = job.target_key
            job.change(protected=orders.target, protected_by=key, target=None, base=None, exposed=False)
            protection.advanced_at = now
            _set_target(job, now)
        elif now - protection.moved_at >= deadline_s:
            abandon(job, f"no progress for {deadline_s:g} s", now)
    if job.orders.target is None:
        _set_target(job, now)


def _set_target(job: CoordinatorState, now: float) -> None:
    orders, protection = job.orders, job.protection
    newest, by = orders.complete, orders.protected_by
    if newest is None or now < protection.retry_at:
        return
    if newest == orders.protected and by is not None and by.incarnation == job.incarnation:
        return
    if orders.exposed and _cut_off(job):
        return  # a target would hold a slot that cannot be protected now
    job.change(target=newest, attempt=orders.attempt + 1)
    protection.placed.clear()
    protection.moved_bytes.clear()
    protection.moved_at = now


def abandon(job: CoordinatorState, reason: str, now: float) -> None:
    """Give the target up: the newest complete version is the next one."""
    job.warn(f"the protection of {job.orders.target} was abandoned: {reason}")
    job.change(target=None, attempt=job.orders.attempt + 1)
    job.protection.retry_at = now + job.deadlines.retry_s


def _cut_off(job: CoordinatorState) -> bool:
    return bool(job.protection.unlinked) or len(job.reported) < len(job.views)


def expose(job: CoordinatorState, now: float) -> None:
    """Let snapshots go on where no slot is free and protection stands still. `protected` is never given up."""
    protection, deadlines = job.protection, job.deadlines
    given_up = job.orders.exposed and job.orders.target is None and _cut_off(job)
    if not protection.groups or (now - protection.advanced_at < deadlines.stall_s and not given_up):
        return
    if len(job.orders.retain) < job.slots or job.grants.open:
        return
    if job.orders.target is not None:
        if now - protection.moved_at < min(deadlines.deadline_s, deadlines.stall_s):
            return  # it has only begun: given up again at once it would never end
        abandon(job, f"unprotected for {deadlines.stall_s:g} s and no slot is free", now)
    fallback = job.orders.protected or job.orders.base
    if len(job.orders.retain) >= job.slots and fallback:
        job.change(complete=fallback)
        if job.orders.protected is not None:
            job.change(base=None)
    job.change(exposed=True)
    protection.advanced_at = now


def _check_damage(job: CoordinatorState, report: Report, now: float) -> None:
    """A version whose bytes no longer match on one node is not complete; where it is protected, parity has it."""
    for version in report.damaged:
        if version == job.orders.target:
            abandon(job, f"{report.node_id}: its bytes there are damaged", now)
        orders = job.orders
        if version != orders.complete or version == orders.protected:
            continue
        if orders.protected is not None:  # also of the version that was restored: it cannot be protected any more
            job.change(complete=orders.protected, base=None if orders.base == version else orders.base)
        elif version != orders.base:
            job.change(complete=orders.base)


def set_groups(job: CoordinatorState, groups: Mapping[str, GroupOrder]) -> None:
    """Groups never change while an incarnation lasts."""
    job.protection.groups = dict(groups)
