"""The coordinator: what the keeper of one node decides for the whole job. Pure.

Nodes report, the coordinator orders; both are whole states, sent again until they are received. Rules (numbers
of docs/protocol.md, "Several nodes"):

    grant     the same step for all ranks, ahead of every one of them; with three slots or more the next
              one is given before the last is written, unless such a grant was void lately
    complete  sealed on all ranks of all nodes; void when one rank could not
    target    the one version being protected: the newest complete one when there is none; a newer one
              never takes its place; it ends acknowledged by all nodes, or abandoned
    retain    {protected, complete, target, base}: nothing else keeps a slot or a parity buffer
    exposed   protection stands still and no slot is free: the newest give way, `protected` never does
    restore   one plan for all; ready on all nodes, then BEGIN; what fails is left out of the next plan

A keeper that takes over starts from the newest orders that any node follows. The cost of a report is
constant, that of an order linear in the number of nodes. `receive`, `set_card` and `lose_source` are the only ways
in. Each module imports only those before it, and none of grants, restore and protection knows another:

    messages < state < grants, restore, protection < takeover < coordinator
"""

from __future__ import annotations

from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator import grants, protection, restore, takeover
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import GATHERING, RESTORING, SERVING, CoordinatorState


def receive(job: CoordinatorState, report: Report, now: float) -> bool:
    """Take in a report. True when the orders have changed."""
    view = job.views.get(report.node_id) or job.sources.get(report.node_id)
    if view is None:
        return False
    last = view.report
    if last is not None and last.instance == report.instance and report.number < last.number:
        return False
    if report.node_id in job.sources and report.inventory is None:
        return False  # for its own incarnation: only what it holds counts here
    view.report, view.received_at = report, now
    if report.node_id in job.views and report.incarnation == job.incarnation:
        _count(job, report, now)
    return decide(job, now)


def _count(job: CoordinatorState, report: Report, now: float) -> None:
    """Take a member's report into account: counts, since this is done with every report of every node."""
    node_id = report.node_id
    job.reported.add(node_id)
    (job.ready.add if report.ready else job.ready.discard)(node_id)
    (job.finished.add if report.finished else job.finished.discard)(node_id)
    for slots, nodes in job.nodes_by_slots.items():
        (nodes.add if slots == report.slots else nodes.discard)(node_id)
    grants.count(job, report)
    restore.count(job, report)
    protection.count(job, report, now)


def set_card(job: CoordinatorState, card: NodeCard) -> None:
    """A keeper has another address than the membership names: its peers must know."""
    job.cards[card.node_id] = card
    job.change(cards=tuple(job.cards.values()))


def lose_source(job: CoordinatorState, node_id: str, now: float) -> bool:
    """A keeper of an earlier incarnation is dead. True when the orders have changed."""
    job.drop_sources(node_id)
    return decide(job, now)


def decide(job: CoordinatorState, now: float) -> bool:
    """Move on as far as what is known allows. True when the orders have changed."""
    before = job.orders
    if job.state == GATHERING:
        takeover.gather(job, now)
        for report in job.reports() if job.state == SERVING else ():  # reports that arrived before the takeover
            if report.incarnation == job.incarnation:
                _count(job, report, now)
    if job.state == RESTORING:
        restore.restore(job, now)
    if job.state == SERVING:
        grants.settle(job, now)
        protection.protect(job, now)
        protection.expose(job, now)
        grants.grant(job, now)
        if len(job.finished) == len(job.views):
            job.change(finished=True)
    if job.orders is not before and job.orders.retain != before.retain:
        job.expect_room()
    return job.orders is not before
