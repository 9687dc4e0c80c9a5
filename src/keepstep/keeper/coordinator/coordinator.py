"""The coordinator: what the keeper of one node decides for the whole job. Pure.

Nodes report, the job orders; both are whole states, said again until they are heard. Rules (numbers of
docs/protocol.md, "Many nodes"):

    grant     the same step for all ranks, ahead of every one of them; with three slots or more the next
              one is given before the last is written, unless that came to nothing lately
    complete  sealed on all ranks of all nodes (wP); void when one rank could not
    target    the one version being protected: the newest complete one when there is none; a newer one
              never takes its place; it ends acknowledged by all nodes (wN), or abandoned
    retain    {wN, wP, target, base}: nothing else keeps a slot or a parity buffer
    exposed   protection stands still and no slot is free: the newest give way, wN never does
    restore   one plan for all; ready on all nodes, then BEGIN; what fails is left out of the next plan

A keeper that takes over starts from the newest orders that any node follows. The cost of a report is
constant, that of an order linear in the number of nodes.

    board        what is known           taking_over  where the keeper before stood     granting    grants
    counting     a report, counted       planning     what is restored, and BEGIN       watermarks  protection
"""

from __future__ import annotations

import msgspec

from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator import counting, grants, protection, restore, takeover
from keepstep.keeper.coordinator.messages import Report
from keepstep.keeper.coordinator.state import GATHERING, RESTORING, SERVING, CoordinatorState


class Coordinator(CoordinatorState):
    """One incarnation, as its coordinator decides it. `hear` and `decide` are the only ways in."""

    def hear(self, report: Report, now: float) -> bool:
        """Take in a report. True when the orders have changed."""
        view = self.views.get(report.node_id) or self.sources.get(report.node_id)
        if view is None:
            return False
        last = view.report
        if last is not None and last.instance == report.instance and report.number < last.number:
            return False
        if report.node_id in self.sources and report.inventory is None:
            return False  # what it tells its own incarnation: only what it holds is wanted here
        view.report, view.heard_at = report, now
        if report.node_id in self.views:
            counting.count(self, report, now)
        return self.decide(now)

    def knows(self, node_id: str) -> bool:
        return node_id in self.views or node_id in self.sources

    def moved_to(self, card: NodeCard) -> None:
        """A keeper is somewhere else than the membership says: its peers must know."""
        self.cards[card.node_id] = card
        self.change(cards=tuple(self.cards.values()))

    def lost(self, node_id: str, now: float) -> bool:
        """A keeper of an incarnation before is known to be dead: nobody waits for it, or counts on it, any longer."""
        self.sources.pop(node_id, None)
        return self.decide(now)

    def decide(self, now: float) -> bool:
        """Move on as far as what is known allows. True when the orders have changed."""
        before = self.orders
        if self.state == GATHERING:
            takeover.gather(self, now)
        if self.state == RESTORING:
            restore.restore(self, now)
        if self.state == SERVING:
            grants.settle(self, now)
            protection.protect(self, now)
            protection.expose(self, now)
            grants.grant(self, now)
            self._finish()
        if self.orders is not before and self.orders.retain != before.retain:
            self.rooms.clear()
            self.orders = msgspec.structs.replace(self.orders, retain_seq=self.orders.seq)
        return self.orders is not before

    def _finish(self) -> None:
        if len(self.finished) == len(self.views):
            self.change(finished=True)
