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
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from keepstep.keeper.comparing import Comparison, odd_class
from keepstep.keeper.words import (
    MAX_OUTCOMES,
    Audit,
    Failure,
    GrantOrder,
    GrantSaid,
    GroupOrder,
    Orders,
    Outcome,
    Report,
    RestoreOrder,
)
from keepstep.parity.placement import Place, cut_groups, keep_positions
from keepstep.protocol import NodeCard
from keepstep.recovery.inventory import Inventory, SetKey
from keepstep.recovery.plan import OWN, Piece, Plan, covering, plan, stands
from keepstep.types import Incarnation, Version

GATHERING, RESTORING, SERVING = "gathering", "restoring", "serving"
MAX_LEAD = 64
# What an order may take to reach the last trainer, until a grant has come too late for one.
DELIVERY_S = 0.02
# Grants that wait for each other after one that did not was void: a rank could not keep up, or not in step.
ONE_BY_ONE = 16


@dataclass(frozen=True)
class Terms:
    """Deadlines of the job, in seconds."""

    deadline_s: float = 30.0
    stall_s: float = 60.0
    inventory_s: float = 20.0
    retry_s: float = 2.0
    """before a target that failed at once is tried again"""
    ask_again_s: float = 1.0
    """before a plan counts again on a source that could not be reached"""


@dataclass
class OpenGrant:
    """A grant and which nodes have finished with it."""

    serial: int
    step: int
    said: dict[str, GrantSaid] = field(default_factory=dict)
    sealed: int = 0
    versions: set[Version] = field(default_factory=set)
    void: tuple[int, str] | None = None
    late: bool = False
    ahead: bool = False
    """given before the one before it was committed everywhere"""
    diverged: tuple[str, ...] = ()
    comparison: Comparison | None = None
    """begun when its replicas were found to differ"""

    def hear(self, node_id: str, said: GrantSaid) -> None:
        before = self.said.get(node_id)
        if before == said:
            return
        self.said[node_id] = said
        self.sealed += said.sealed - (before.sealed if before else False)
        self.late = self.late or said.late
        if said.version is None:
            self.void = self.void or (said.rank, said.reason)
        else:
            self.versions.add(said.version)
            if len(self.versions) > 1 and self.void is None:
                steps = sorted(version.step for version in self.versions)
                self.void, self.late = (said.rank, f"ranks captured different steps: {steps}"), True


@dataclass
class View:
    """What the coordinator knows of one node."""

    report: Report | None = None
    heard_at: float = -math.inf
    excluded: set[tuple[Version, int]] = field(default_factory=set)
    """(version, rank or -1 for parity) whose bytes there failed their check"""
    away: set[tuple[Version, int]] = field(default_factory=set)
    """the same, where a plan could not reach it: asked again when nothing else has it"""


class Job:
    """One incarnation, as its coordinator sees it."""

    def __init__(
        self, incarnation: Incarnation, members: Mapping[str, str], former: tuple[str, ...], terms: Terms, now: float
    ) -> None:
        """`members`: node id -> failure domain, in the order of node ranks."""
        self.incarnation, self.terms = incarnation, terms
        self.domains = dict(members)
        self.views = {node_id: View() for node_id in members}
        self.sources = {node_id: View() for node_id in former if node_id not in members}
        self.state = GATHERING
        self.orders = Orders(incarnation, 0, 0)
        self.open: list[OpenGrant] = []
        self.outcomes: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)
        self.groups: dict[str, GroupOrder] = {}
        self.pieces: dict[str, RestoreOrder] = {}
        self.plan: Plan | None = None
        # Words of a plan that is over must not be taken for those of the next life.
        self.plan_number = incarnation.number << 20
        self.planned_at = -math.inf
        self.found: dict[str, Inventory] = {}
        """what the last plan was made from"""
        self.covered: SetKey | None = None
        """the newest protection that the inventories show: kept until there is one of this incarnation"""
        self.serial = 0
        self.lead = 1
        self.one_by_one = 0
        """so many of the next grants wait until the one before is committed everywhere"""
        self.started_at = now
        self.heard: set[str] = set()
        self.ready: set[str] = set()
        self.restored: set[str] = set()
        self.rooms: set[str] = set()
        self.finished: set[str] = set()
        self.cut: set[str] = set()
        """nodes that miss a link to another one of their group"""
        self.moved: dict[str, int] = {}
        self.placed: set[str] = set()
        self.moved_at = self.advanced_at = now
        self.retry_at = -math.inf
        self.faults: deque[str] = deque(maxlen=20)
        self.cards: dict[str, NodeCard] = {}
        """of keepers that took another one's place since the incarnation began"""
        self.protected_at = now
        self.losses = 0
        """nodes that every group may lose at once, once a version is protected"""

    # What comes in

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
            self._count(report, now)
        return self.decide(now)

    def knows(self, node_id: str) -> bool:
        return node_id in self.views or node_id in self.sources

    def moved_to(self, card: NodeCard) -> None:
        """A keeper is somewhere else than the membership says: its peers must know."""
        self.cards[card.node_id] = card
        self._change(cards=tuple(self.cards.values()))

    def lost(self, node_id: str, now: float) -> bool:
        """A keeper of an incarnation before is known to be dead: nobody waits for it, or counts on it, any longer."""
        self.sources.pop(node_id, None)
        return self.decide(now)

    def _count(self, report: Report, now: float) -> None:
        me, node = report.incarnation == self.incarnation, report.node_id
        if not me:
            return
        self.heard.add(node)
        _keep(self.ready, node, report.ready)
        _keep(self.finished, node, report.finished)
        _keep(self.cut, node, bool(report.unreachable))
        _keep(self.restored, node, report.restored == self.plan_number and self.plan is not None)
        fresh = report.orders is not None and report.orders.order >= self._order(self.orders.retain_seq)
        _keep(self.rooms, node, report.room and fresh)
        for said in report.grants:
            grant = next((g for g in self.open if g.serial == said.serial), None)
            if grant is not None:
                grant.hear(node, said)
        key = self.target_key
        if key is not None:
            _keep(self.placed, node, key in report.placed)
            exchange = report.exchange
            if exchange is not None and exchange.key == key:
                if exchange.moved_bytes > self.moved.get(node, -1):
                    self.moved_at = now
                    if exchange.moved_bytes > self.moved.get(node, 0):
                        self.advanced_at = now  # slow, but it comes: nobody is asked to go on without it
                    self.moved[node] = exchange.moved_bytes
                if exchange.problem and node not in self.placed:
                    self._abandon(f"{node}: {exchange.problem}", now)
        for failure in report.failures:
            if failure.plan == self.plan_number:
                self._exclude(failure)
        self._check_damage(report, now)

    def _order(self, seq: int) -> tuple[int, int, int]:
        return (self.incarnation.number, self.orders.epoch, seq)

    # Deciding

    def decide(self, now: float) -> bool:
        """Move on as far as what is known allows. True when the orders have changed."""
        before = self.orders
        if self.state == GATHERING:
            self._gather(now)
        if self.state == RESTORING:
            self._restore(now)
        if self.state == SERVING:
            self._settle(now)
            self._protect(now)
            self._expose(now)
            self._grant(now)
            self._finish()
        if self.orders is not before and self.orders.retain != before.retain:
            self.rooms.clear()
            self.orders = msgspec.structs.replace(self.orders, retain_seq=self.orders.seq)
        return self.orders is not before

    def _change(self, **fields: object) -> None:
        changed = {name: value for name, value in fields.items() if getattr(self.orders, name) != value}
        if changed:
            self.orders = msgspec.structs.replace(self.orders, seq=self.orders.seq + 1, **changed)

    def orders_for(self, node_id: str) -> Orders:
        group, restore = self.groups.get(node_id), self.pieces.get(node_id)
        if group is None and restore is None:
            return self.orders
        return msgspec.structs.replace(self.orders, group=group, restore=restore)

    @property
    def target_key(self) -> SetKey | None:
        if self.orders.target is None:
            return None
        return SetKey(self.orders.target, self.incarnation, self.orders.attempt)

    # Taking over, or beginning

    def _gather(self, now: float) -> None:
        """Wait for all nodes; then go on from the newest orders that any of them follows, or plan a restore."""
        if self.heard != self.views.keys():
            return
        reports = [view.report for view in self.views.values() if view.report is not None]
        followed = [r.orders for r in reports if r.orders is not None and r.orders.incarnation == self.incarnation]
        # A rank that is not there yet may be writing under a grant that only it can name, or, where there is no other
        # node, hold memory that nobody else has given back.
        if any(not r.whole and (r.state == SERVING or len(self.views) == 1) for r in reports):
            return
        rejoined = any(r.state == SERVING for r in reports)  # none serves before all are ready
        unknown = Orders(self.incarnation, 0, 0) if rejoined else None  # they came back without a ledger
        newest = max(followed, key=lambda orders: orders.order, default=unknown)
        stood = self._keep_groups(followed)
        if not stood:
            self._form_groups(reports)
        epoch = newest.epoch + 1 if newest is not None else 1
        self.orders = Orders(self.incarnation, epoch, 1, every=reports[0].every, cards=tuple(self.cards.values()))
        begun = rejoined or any(o.restore is not None and o.restore.begin for o in followed)
        back = [r for r in reports if r.state == RESTORING]
        # Orders that keep something were given after BEGIN, though nobody may have heard it but one that died.
        if newest is not None and (begun or newest.retain):
            if any(r.inventory is None or not r.whole for r in back):
                return  # its keeper died after BEGIN: what its ranks restore must be found again
            begun = begun or all(len(_lying_there(r, newest.complete, 0).pieces) == len(r.ranks) for r in back)
        if newest is None or not begun:
            numbers = [o.restore.number for o in followed if o.restore is not None]
            self.plan_number = max([self.plan_number, *numbers])
            self.state = RESTORING
            return
        self._take_over(newest, reports, now)
        if self.orders.target is not None and not stood:
            self._abandon("its groups are not known any more", now)  # parity of two placements must not mix

    def _take_over(self, newest: Orders, reports: list[Report], now: float) -> None:
        self.cards = {card.node_id: card for card in newest.cards} | self.cards
        self.orders = msgspec.structs.replace(
            newest, epoch=self.orders.epoch, seq=1, group=None, restore=None, retain_seq=1, grants=(),
            cards=tuple(self.cards.values()),
        )  # fmt: skip
        self.outcomes.extend(newest.outcomes)
        told = [r.orders.complete for r in reports if r.orders is not None and r.orders.complete is not None]
        if newest.complete is not None and max(told, default=newest.complete) > newest.complete:
            self._change(exposed=True)  # a ledger does not say it, but nothing else takes a version back
        plans = [r.orders.restore for r in reports if r.orders is not None and r.orders.restore is not None]
        self.plan_number = max([self.plan_number, *(plan.number for plan in plans)])
        for report in reports:  # nodes that have not begun hear it again
            last = report.orders.restore if report.orders is not None else None
            if last is None and report.state == RESTORING:
                last = _lying_there(report, newest.complete, self.plan_number)
            if last is not None:
                self.pieces[report.node_id] = msgspec.structs.replace(last, begin=True)
        settled = max((outcome.serial for outcome in self.outcomes), default=0)
        self.serial = max([newest.serial, settled, *(g.serial for r in reports for g in r.opened)])
        steps = {g.serial: g.step for r in reports for g in (*r.opened, *newest.grants)}
        for serial in sorted(steps):
            if serial > settled:
                self.open.append(OpenGrant(serial, steps[serial]))
        for report in reports:
            self._count(report, now)
        self.state = SERVING
        self._change(grants=tuple(GrantOrder(g.serial, g.step) for g in self.open), serial=self.serial)

    def _keep_groups(self, followed: list[Orders]) -> bool:
        """The groups of this incarnation, where somebody knows them all: they never change while it lasts."""
        known = {node_id: o.group for o in followed if o.group is not None for node_id in o.group.members}
        if known.keys() != self.views.keys():
            return False
        self.groups, self.losses = known, min(group.losses for group in known.values())
        return True

    def _form_groups(self, reports: list[Report]) -> None:
        losses = min(reports[0].losses, len(reports) - 1)
        if losses <= 0:
            return
        before = max((s for r in reports if r.inventory for s in r.inventory.sets), key=lambda s: s.key, default=None)
        nodes = list(self.views)
        order = keep_positions(before.members, nodes) if before and set(before.members) <= set(nodes) else nodes
        places = [Place(node_id, self.domains[node_id]) for node_id in order]
        for group in cut_groups(places, reports[0].group_size, losses):
            made = GroupOrder(tuple(places[i].node_id for i in group), min(losses, len(group) - 1))
            for node_id in made.members:
                self.groups[node_id] = made
        self.losses = min(group.losses for group in self.groups.values())

    # Restoring

    def _restore(self, now: float) -> None:
        if self.plan is None:
            if not self._may_plan(now):
                return
            self._make_plan(now)
        if self.plan is None or self.plan.failure:
            return
        if len(self.restored) == len(self.views):
            self._begin(now)

    def _may_plan(self, now: float) -> bool:
        members = [view.report for view in self.views.values() if view.report is not None]
        if any(r.inventory is None or not r.whole for r in members):
            return False
        silent = [v for v in self.sources.values() if v.report is None or v.report.inventory is None]
        return not silent or now - self.started_at >= self.terms.inventory_s

    def _make_plan(self, now: float) -> None:
        inventories, now_there = self._inventories()
        silent = [node_id for node_id in (*self.views, *self.sources) if node_id not in inventories]
        reports = [view.report for view in self.views.values() if view.report is not None]
        homes = {rank: report.node_id for report in reports for rank in report.ranks}
        alone = len(self.views) == 1
        made = plan(now_there, {} if alone else homes, silent)
        if now_there != inventories:
            best = plan(inventories, {} if alone else homes, silent)
            if best.version != made.version:
                # It is there, only out of reach: that never costs a version. Ask again, in a while.
                if now < self.planned_at + self.terms.ask_again_s:
                    return
                if now - self.started_at >= self.terms.inventory_s and self._forget_sources():
                    return
                made = best
                for view in (*self.views.values(), *self.sources.values()):
                    view.away.clear()
        self.planned_at = now
        self.found = inventories
        self.covered = covering(inventories, made.version) if made.version is not None else None
        if made.version is not None and not alone and made.world_size != len(homes):
            text = (
                f"{made.version} was saved by {made.world_size} ranks, this job has {len(homes)}: "
                "start with the same number of ranks, or give the state up with keepstep release"
            )
            made = Plan(None, (), made.reasons, text)
        if made.version is not None and made.version.incarnation.number >= self.incarnation.number:
            # What this life saves would count as older. The next one knows better.
            text = (
                f"{made.version} was given back when incarnation {self.incarnation.number} had begun: "
                "the launcher restarts the job"
            )
            made = Plan(None, (), made.reasons, text)
        self.plan, self.plan_number = made, self.plan_number + 1
        self.restored.clear()
        damage = any(i.damaged for i in inventories.values())
        for node_id in self.views:
            mine = tuple(p for p in made.pieces if alone or homes[p.rank] == node_id)
            self.pieces[node_id] = RestoreOrder(
                self.plan_number, made.version, mine, made.reasons, made.failure, damage,
                world_size=made.world_size, local_world_size=made.local_world_size,
            )  # fmt: skip
        self._change_restore()

    def _forget_sources(self) -> bool:
        """A keeper of an incarnation before that somebody cannot reach: its time is over. Members are waited for."""
        before = len(self.sources)
        self.sources = {node_id: view for node_id, view in self.sources.items() if not view.away}
        return len(self.sources) < before

    def _inventories(self) -> tuple[dict[str, Inventory], dict[str, Inventory]]:
        """What is held and sound, and of that what could be reached so far."""
        found: dict[str, Inventory] = {}
        reached: dict[str, Inventory] = {}
        for node_id, view in {**self.views, **self.sources}.items():
            if view.report is not None and view.report.inventory is not None:
                found[node_id] = _without(view.report.inventory, view.excluded)
                reached[node_id] = _without(found[node_id], view.away)
        return found, reached

    def _change_restore(self) -> None:
        self.orders = msgspec.structs.replace(self.orders, seq=self.orders.seq + 1)

    def _begin(self, now: float) -> None:
        assert self.plan is not None
        self.pieces = {n: msgspec.structs.replace(order, begin=True) for n, order in self.pieces.items()}
        version = self.plan.version
        self._change_restore()
        self._change(base=version, complete=version)
        covered = self.covered
        # What survives a node goes on to do so until this incarnation has something newer that does.
        if covered is not None and self.groups:
            self._change(protected_by=covered)
            if covered.version != version or stands({n: i for n, i in self.found.items() if n in self.views}, covered):
                self._change(protected=covered.version)
        self.state, self.moved_at, self.advanced_at = SERVING, now, now

    def _exclude(self, failure: Failure) -> None:
        view = self.views.get(failure.node_id) or self.sources.get(failure.node_id)
        if view is not None:
            left_out = view.excluded if failure.damaged else view.away
            if (failure.version, failure.rank) in left_out:
                if self.state == RESTORING and self.plan is not None and not self.plan.failure:
                    self._give_up(failure.text)
                return
            left_out.add((failure.version, failure.rank))
        self.faults.append(failure.text)
        if self.state == RESTORING:
            self.plan = None  # plan again, without it

    def _give_up(self, text: str) -> None:
        """What failed is not a source that a plan can do without: no memory, for one. Better an error than to wait."""
        assert self.plan is not None
        reasons = (*self.plan.reasons, text)
        self.plan = Plan(None, (), reasons, f"{self.plan.version} cannot be brought to where it is needed: {text}")
        self.plan_number += 1
        self.restored.clear()
        for node_id in self.views:
            self.pieces[node_id] = RestoreOrder(self.plan_number, None, (), reasons, self.plan.failure)
        self._change_restore()

    # Serving: grants

    def _settle(self, now: float) -> None:
        while self.open:
            grant = self.open[0]
            if len(grant.said) < len(self.views):
                break
            if grant.void is None and grant.sealed < len(self.views):
                break
            if grant.void is None and not self._agree(grant):
                break
            self.open.pop(0)
            if grant.void is None:
                (version,) = grant.versions
                self.outcomes.append(Outcome(grant.serial, version))
                self._completed(version, now)
            else:
                rank, reason = grant.void
                if grant.ahead:
                    self.one_by_one = ONE_BY_ONE
                if grant.late:
                    # The grant came too late for one of them: give the next one more lead.
                    self.lead = min(2 * self.lead, MAX_LEAD)
                self.outcomes.append(Outcome(grant.serial, None, rank, reason, grant.diverged))
            left = tuple(GrantOrder(g.serial, g.step) for g in self.open)
            self._change(grants=left, outcomes=tuple(self.outcomes), audit=None)

    def _agree(self, grant: OpenGrant) -> bool:
        """Replicated state is the same on all nodes that hold it; otherwise the version is void, by path and rank.

        False while the nodes are asked what exactly differs.
        """
        if grant.comparison is None:
            odd = odd_class(said.shares for said in grant.said.values())
            if odd is None:
                return True
            (version,) = grant.versions
            grant.comparison = Comparison(Audit(version, odd))
        verdict = None
        while verdict is None:
            asked = grant.comparison.asked
            self._change(audit=asked)
            reports = [view.report for view in self.views.values() if view.report is not None]
            answers = [report.audit[1] for report in reports if report.audit is not None and report.audit[0] == asked]
            if len(answers) < len(self.views):
                return False
            verdict = grant.comparison.hear(answers)
        grant.void, grant.diverged = (verdict.rank, verdict.reason), verdict.paths
        return True

    def _completed(self, version: Version, now: float) -> None:
        if self.orders.complete == self.orders.protected:
            self.advanced_at = now  # there was nothing to protect: its time begins now
        if self.orders.complete is None or version > self.orders.complete:
            self._change(complete=version)
        if not self.groups:  # a version of this incarnation stands: the one it was restored from may go
            self._change(base=None)
        self.lead = max(1, self.lead - 1)

    def _grant(self, now: float) -> None:
        # Counts, not sets: this is asked with every report of every node.
        if len(self.ready) < len(self.views) or self.finished:
            return
        if not self.orders.ready:
            self._change(ready=True)
        written = sum(len(grant.said) < len(self.views) for grant in self.open)
        if written > self._may_be_ahead or len(self.open) >= max(2, self._slots) - 1:
            return
        if len(self.rooms) < len(self.views):
            return
        reports = [view.report for view in self.views.values() if view.report is not None]
        step_s = max(report.step_s for report in reports)
        ahead = max(_progress_now(view, now) for view in self.views.values())
        lead = self.lead
        if len(self.views) > 1 and step_s > 0:
            lead = max(lead, math.ceil(DELIVERY_S * self.lead / step_s) + 1)
        if self.open:
            lead = max(lead, self.open[-1].step + 1 - ahead)
        every = reports[0].every
        step = -(-(ahead + lead) // every) * every
        self.serial += 1
        self.one_by_one = max(0, self.one_by_one - 1)
        self.open.append(OpenGrant(self.serial, step, ahead=written > 0))
        self.rooms.clear()
        self._change(grants=tuple(GrantOrder(g.serial, g.step) for g in self.open), serial=self.serial)
        self.orders = msgspec.structs.replace(self.orders, retain_seq=self.orders.seq)

    @property
    def _may_be_ahead(self) -> int:
        """Grants that may be given while the one before is not committed everywhere."""
        return int(self._slots >= 3 and not self.one_by_one)

    @property
    def _slots(self) -> int:
        """The same on all nodes."""
        report = next(iter(self.views.values())).report
        return report.slots if report is not None else 2

    def _finish(self) -> None:
        if len(self.finished) == len(self.views):
            self._change(finished=True)

    # Serving: protection

    def _protect(self, now: float) -> None:
        orders = self.orders
        if not self.groups:
            return
        if orders.target is not None:
            if len(self.placed) == len(self.views):
                key = self.target_key
                self._change(protected=orders.target, protected_by=key, target=None, base=None, exposed=False)
                self.advanced_at = self.protected_at = now
                self._new_target(now)
            elif now - self.moved_at >= self.terms.deadline_s:
                self._abandon(f"no progress for {self.terms.deadline_s:g} s", now)
        if self.orders.target is None:
            self._new_target(now)

    def _new_target(self, now: float) -> None:
        orders = self.orders
        newest = orders.complete
        if newest is None or now < self.retry_at:
            return
        by = orders.protected_by
        if newest == orders.protected and by is not None and by.incarnation == self.incarnation:
            return
        if orders.exposed and self._cut_off():
            return  # a target would hold a slot that cannot be protected now
        self._change(target=newest, attempt=orders.attempt + 1)
        self.placed.clear()
        self.moved.clear()
        self.moved_at = now

    def _abandon(self, reason: str, now: float) -> None:
        self.faults.append(f"the protection of {self.orders.target} was abandoned: {reason}")
        self._change(target=None, attempt=self.orders.attempt + 1)
        self.retry_at = now + self.terms.retry_s

    def _cut_off(self) -> bool:
        """Some node cannot reach another one of its group."""
        return bool(self.cut) or len(self.heard) < len(self.views)

    def _expose(self, now: float) -> None:
        """No slot is free and protection stands still: let snapshots go on. What is protected is never given up."""
        given_up = self.orders.exposed and self.orders.target is None and self._cut_off()
        if not self.groups or (now - self.advanced_at < self.terms.stall_s and not given_up):
            return
        slots = self._slots
        if len(self.orders.retain) < slots or self.open:
            return
        if self.orders.target is not None and now - self.moved_at < min(self.terms.deadline_s, self.terms.stall_s):
            return  # it has only begun: given up again at once it would never end
        if self.orders.target is not None:
            self._abandon(f"unprotected for {self.terms.stall_s:g} s and no slot is free", now)
        if len(self.orders.retain) >= slots and (self.orders.protected or self.orders.base):
            self._change(complete=self.orders.protected or self.orders.base)
            if self.orders.protected is not None:
                self._change(base=None)
        self._change(exposed=True)
        self.advanced_at = now

    def _check_damage(self, report: Report, now: float) -> None:
        """A version whose bytes no longer match on one node is not complete; where it is protected, parity has it."""
        for version in report.damaged:
            if version == self.orders.target:
                self._abandon(f"{report.node_id}: its bytes there are damaged", now)
            orders = self.orders
            if version != orders.complete or version == orders.protected:
                continue
            if orders.protected is not None:  # also of the version that was restored: it cannot be protected any more
                self._change(complete=orders.protected, base=None if orders.base == version else orders.base)
            elif version != orders.base:
                self._change(complete=orders.base)


def _keep(found: set[str], node_id: str, belongs: bool) -> None:
    (found.add if belongs else found.discard)(node_id)


def _lying_there(report: Report, version: Version | None, number: int) -> RestoreOrder:
    """What the ranks of a node restored before its keeper died: no rank has stepped since, so it is complete still."""
    held = {h.rank: h for h in report.inventory.holdings if h.version == version} if report.inventory else {}
    pieces = tuple(
        Piece(h.version, rank, OWN, report.node_id, h.size_bytes, h.local_index, h.arena_id, h.slot)
        for rank, h in held.items()
        if rank in report.ranks
    )
    sizes = (report.world_size, len(report.ranks))
    why = ("this node's keeper died when all had begun",)
    return RestoreOrder(number, version, pieces, why, world_size=sizes[0], local_world_size=sizes[1])


def _progress_now(view: View, now: float) -> int:
    report = view.report
    assert report is not None
    if report.step_s <= 0:
        return report.progress
    return report.progress + math.floor((now - view.heard_at) / report.step_s)


def _without(inventory: Inventory, excluded: set[tuple[Version, int]]) -> Inventory:
    if not excluded:
        return inventory
    return msgspec.structs.replace(
        inventory,
        holdings=tuple(h for h in inventory.holdings if (h.version, h.rank) not in excluded),
        sets=tuple(s for s in inventory.sets if (s.key.version, -1) not in excluded),
    )
