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
constant, that of an order linear in the number of nodes. Each module imports only those before it:

    messages < state < grants, restore, protection < takeover < coordinator
"""

from __future__ import annotations

from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator import grants, protection, restore, takeover
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import GATHERING, RESTORING, SERVING, CoordinatorState


class Coordinator(CoordinatorState):
    """One incarnation, as its coordinator decides it. `receive` and `decide` are the only ways in."""

    def receive(self, report: Report, now: float) -> bool:
        """Take in a report. True when the orders have changed."""
        view = self.views.get(report.node_id) or self.sources.get(report.node_id)
        if view is None:
            return False
        last = view.report
        if last is not None and last.instance == report.instance and report.number < last.number:
            return False
        if report.node_id in self.sources and report.inventory is None:
            return False  # for its own incarnation: only what it holds counts here
        view.report, view.received_at = report, now
        if report.node_id in self.views and report.incarnation == self.incarnation:
            self._count(report, now)
        return self.decide(now)

    def _count(self, report: Report, now: float) -> None:
        """Take a member's report into account: counts, since this is done with every report of every node."""
        node_id = report.node_id
        self.reported.add(node_id)
        (self.ready.add if report.ready else self.ready.discard)(node_id)
        (self.finished.add if report.finished else self.finished.discard)(node_id)
        for slots, nodes in self.nodes_by_slots.items():
            (nodes.add if slots == report.slots else nodes.discard)(node_id)
        grants.count(self, report)
        restore.count(self, report)
        protection.count(self, report, now)

    def knows(self, node_id: str) -> bool:
        return node_id in self.views or node_id in self.sources

    def set_card(self, card: NodeCard) -> None:
        """A keeper has another address than the membership names: its peers must know."""
        self.cards[card.node_id] = card
        self.change(cards=tuple(self.cards.values()))

    def lose_source(self, node_id: str, now: float) -> bool:
        """A keeper of an earlier incarnation is dead. True when the orders have changed."""
        self.drop_sources(node_id)
        return self.decide(now)

    def take_warnings(self) -> list[str]:
        warnings = list(self.warnings)
        self.warnings.clear()
        return warnings

    def decide(self, now: float) -> bool:
        """Move on as far as what is known allows. True when the orders have changed."""
        before = self.orders
        if self.state == GATHERING:
            takeover.gather(self, now)
            for report in self.reports() if self.state == SERVING else ():  # reports that arrived before the takeover
                if report.incarnation == self.incarnation:
                    self._count(report, now)
        if self.state == RESTORING:
            restore.restore(self, now)
        if self.state == SERVING:
            grants.settle(self, now)
            protection.protect(self, now)
            protection.expose(self, now)
            grants.grant(self, now)
            if len(self.finished) == len(self.views):
                self.change(finished=True)
        if self.orders is not before and self.orders.retain != before.retain:
            self.expect_room()
        return self.orders is not before
