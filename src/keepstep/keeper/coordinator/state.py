"""What a coordinator knows, in sections that each have one owner.

    views, sources   nodes by their reports                     coordinator.py
    grants           open grants and their outcomes             grants.py
    restore          the plan, and which nodes are ready        restore.py
    protection       groups, and the exchange of the target     protection.py

A module of this package assigns only to its own section; the orders that follow from all of them change by
`change` and `renew`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator.messages import (
    EarlierGrantProgress,
    GrantOutcome,
    GroupOrder,
    Orders,
    Report,
    RestoreOrder,
)
from keepstep.parity.divergence import Comparison
from keepstep.recovery.inventory import Inventory, SetKey
from keepstep.recovery.plan import Plan
from keepstep.types import Incarnation, Version

MAX_OUTCOMES = 8  # the newest ones; with four slots three grants are open at once
MAX_WARNINGS = 20  # between two events
PLAN_BITS = 20  # plan numbers start at incarnation << PLAN_BITS, so that those of two incarnations differ

GATHERING, RESTORING, SERVING = "gathering", "restoring", "serving"


@dataclass(frozen=True)
class Deadlines:
    """How long a coordinator waits, in seconds."""

    deadline_s: float = 30.0  # a target for which no byte moved this long is abandoned
    stall_s: float = 60.0  # snapshots go on without protection when none was reached this long and no slot is free
    inventory_s: float = 20.0  # keepers of the last incarnation that do not answer this long are left out of the plan
    retry_s: float = 2.0  # before an abandoned target is replaced
    ask_again_s: float = 1.0  # before a plan counts again on a source that could not be reached


class CoordinatorState:
    """The coordinator's state of one incarnation."""

    def __init__(
        self, incarnation: Incarnation, members: Mapping[str, str], former: tuple[str, ...] = (), *,
        now: float, deadlines: Deadlines,
    ) -> None:  # fmt: skip
        """`members`: node id -> failure domain, in the order of node ranks. `former`: keepers that may hold state."""
        self.incarnation, self.deadlines, self.started_at = incarnation, deadlines, now
        self.domains = dict(members)
        self.views = {node_id: NodeView() for node_id in members}
        self.sources = {node_id: NodeView() for node_id in former if node_id not in members}
        self.cards: dict[str, NodeCard] = {}  # of keepers that replaced others since the incarnation began
        # Counts, not searches: with every report of every node these are compared with the number of members.
        self.reported: set[str] = set()
        self.ready: set[str] = set()
        self.finished: set[str] = set()
        self.nodes_by_slots: dict[int, set[str]] = {2: set(), 3: set(), 4: set()}
        # Sections
        self.grants = JobGrants()
        self.restore = JobRestore(incarnation.number << PLAN_BITS)
        self.protection = JobProtection(moved_at=now, advanced_at=now)
        # Output
        self.state = GATHERING
        self.orders = Orders(incarnation, 0, 0)
        self.warnings: deque[str] = deque(maxlen=MAX_WARNINGS)

    def enter(self, state: str) -> None:
        self.state = state

    def change(self, **fields: object) -> None:
        """Change the orders, where a field is not what it was."""
        changed = {name: value for name, value in fields.items() if getattr(self.orders, name) != value}
        if changed:
            self.renew(**changed)

    def renew(self, **fields: object) -> None:
        """Give new orders, also where only what is added for single nodes has changed."""
        self.orders = msgspec.structs.replace(self.orders, seq=self.orders.seq + 1, **fields)

    def start_orders(self, orders: Orders) -> None:
        self.orders = orders

    def expect_room(self) -> None:
        """What is retained has changed: only reports that have seen it count as having room."""
        self.grants.room.clear()
        self.orders = msgspec.structs.replace(self.orders, retain_seq=self.orders.seq)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def take_warnings(self) -> list[str]:
        warnings = list(self.warnings)
        self.warnings.clear()
        return warnings

    def knows(self, node_id: str) -> bool:
        return node_id in self.views or node_id in self.sources

    def adopt_cards(self, cards: Mapping[str, NodeCard]) -> None:
        """Addresses that an earlier coordinator knew; those that were reported since are newer."""
        self.cards = {**cards, **self.cards}

    def drop_sources(self, *node_ids: str) -> None:
        """These keepers of an earlier incarnation are not waited for, or counted on, any longer."""
        self.sources = {node_id: view for node_id, view in self.sources.items() if node_id not in node_ids}

    def orders_for(self, node_id: str) -> Orders:
        group, restore = self.protection.groups.get(node_id), self.restore.orders.get(node_id)
        if group is None and restore is None:
            return self.orders
        if restore is not None and self.orders.ready:
            restore = restore.when_over()
        return msgspec.structs.replace(self.orders, group=group, restore=restore)

    def reports(self) -> list[Report]:
        return [view.report for view in self.views.values() if view.report is not None]

    @property
    def target_key(self) -> SetKey | None:
        target, attempt = self.orders.target, self.orders.attempt
        return SetKey(target, self.incarnation, attempt) if target is not None else None

    @property
    def slots(self) -> int:
        """Slots per rank: the fewest of any node, since all ranks capture the same steps."""
        return min((slots for slots, nodes in self.nodes_by_slots.items() if nodes), default=2)

    def order_at(self, seq: int) -> tuple[int, int, int]:
        return (self.incarnation.number, self.orders.epoch, seq)


@dataclass
class NodeView:  # What the coordinator knows of one node
    report: Report | None = None
    received_at: float = -math.inf
    # (version, rank or -1 for parity) whose bytes there failed their check
    excluded: set[tuple[Version, int]] = field(default_factory=set)
    # the same, where a plan could not reach it: tried again when nothing else has it
    away: set[tuple[Version, int]] = field(default_factory=set)


# Grants


@dataclass
class JobGrant:  # A grant, and which nodes have finished with it
    serial: int
    step: int
    progress: dict[str, EarlierGrantProgress] = field(default_factory=dict)  # by node
    num_sealed: int = 0
    versions: set[Version] = field(default_factory=set)
    void: tuple[int, str] | None = None
    late: bool = False  # it came too late for a rank
    overlaps_previous: bool = False  # given before the one before it was committed everywhere
    diverged: tuple[str, ...] = ()
    comparison: Comparison | None = None  # begun when its replicas were found to differ

    def receive(self, node_id: str, progress: EarlierGrantProgress) -> None:
        before = self.progress.get(node_id)
        if before == progress:
            return
        self.progress[node_id] = progress
        self.num_sealed += progress.sealed - (before.sealed if before else False)
        self.late = self.late or progress.late
        if progress.version is None:
            self.void = self.void or (progress.rank, progress.reason)
        else:
            self.versions.add(progress.version)
            if len(self.versions) > 1 and self.void is None:
                steps = sorted(version.step for version in self.versions)
                self.void, self.late = (progress.rank, f"ranks captured different steps: {steps}"), True

    def diverge(self, rank: int, reason: str, paths: tuple[str, ...]) -> None:
        self.void, self.diverged = (rank, reason), paths


@dataclass
class JobGrants:  # Written by `grants`
    open: list[JobGrant] = field(default_factory=list)  # oldest first
    outcomes: deque[GrantOutcome] = field(default_factory=lambda: deque(maxlen=MAX_OUTCOMES))
    serial: int = 0  # of the last one that was given
    serialized_until: int = 0  # up to this serial, a grant waits until the one before is committed everywhere
    lead: int = 1  # steps, at least, that a grant is ahead of the furthest rank
    room: set[str] = field(default_factory=set)  # nodes whose ranks all have a slot that may be granted


# Restore and protection


@dataclass
class JobRestore:  # Written by `restore`
    plan_number: int
    plan: Plan | None = None
    planned_at: float = -math.inf
    orders: dict[str, RestoreOrder] = field(default_factory=dict)  # by node
    inventories: dict[str, Inventory] = field(default_factory=dict)  # what the last plan was made from
    covered_by: SetKey | None = None  # the newest protection that the inventories show
    ready: set[str] = field(default_factory=set)  # nodes that have and have verified what the plan names


@dataclass
class JobProtection:  # Written by `protection`
    moved_at: float  # when a byte of the target last moved, or it became the target
    advanced_at: float  # when protection last made progress
    retry_at: float = -math.inf
    groups: dict[str, GroupOrder] = field(default_factory=dict)  # by node
    unlinked: set[str] = field(default_factory=set)  # nodes that cannot reach another one of their group
    moved_bytes: dict[str, int] = field(default_factory=dict)  # of the target, by node
    placed: set[str] = field(default_factory=set)  # nodes that hold their parity of the target

    def begin(self, now: float) -> None:
        self.moved_at = self.advanced_at = now

    def start_clock(self, now: float) -> None:
        """There was nothing to protect until now."""
        self.advanced_at = now
