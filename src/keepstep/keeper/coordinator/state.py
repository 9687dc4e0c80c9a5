"""What a coordinator knows: nodes by their reports, open grants, plan, marks, and the orders that follow from them.

The state and nothing else. Those who change it are `counting`, `taking_over`, `planning`, `granting` and `watermarks`;
`job` asks them in turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from keepstep.control.messages import NodeCard
from keepstep.keeper.coordinator.divergence import Comparison
from keepstep.keeper.coordinator.messages import (
    MAX_OUTCOMES,
    EarlierGrantProgress,
    GrantOutcome,
    GroupOrder,
    Orders,
    Report,
    RestoreOrder,
)
from keepstep.recovery.inventory import Inventory, SetKey
from keepstep.recovery.plan import Plan
from keepstep.types import Incarnation, Version

GATHERING, RESTORING, SERVING = "gathering", "restoring", "serving"


@dataclass(frozen=True)
class Terms:
    """Deadlines of the job, in seconds."""

    deadline_s: float = 30.0
    """an exchange that makes no progress for this long is abandoned; the newest version is next"""
    stall_s: float = 60.0
    """unprotected for this long with no slot free: snapshots go on without waiting for protection (`exposed`)"""
    inventory_s: float = 20.0
    """how long a restore waits for a keeper of the last incarnation that does not answer and is not known dead"""
    retry_s: float = 2.0
    """before a target that failed at once is tried again"""
    ask_again_s: float = 1.0
    """before a plan counts again on a source that could not be reached"""


@dataclass
class JobGrant:
    """A grant and which nodes have finished with it."""

    serial: int
    step: int
    said: dict[str, EarlierGrantProgress] = field(default_factory=dict)
    sealed: int = 0
    versions: set[Version] = field(default_factory=set)
    void: tuple[int, str] | None = None
    late: bool = False
    ahead: bool = False
    """given before the one before it was committed everywhere"""
    diverged: tuple[str, ...] = ()
    comparison: Comparison | None = None
    """begun when its replicas were found to differ"""

    def hear(self, node_id: str, said: EarlierGrantProgress) -> None:
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
class NodeView:
    """What the coordinator knows of one node."""

    report: Report | None = None
    heard_at: float = -math.inf
    excluded: set[tuple[Version, int]] = field(default_factory=set)
    """(version, rank or -1 for parity) whose bytes there failed their check"""
    away: set[tuple[Version, int]] = field(default_factory=set)
    """the same, where a plan could not reach it: asked again when nothing else has it"""


class CoordinatorState:
    """One incarnation, as its coordinator sees it."""

    def __init__(
        self, incarnation: Incarnation, members: Mapping[str, str], former: tuple[str, ...], terms: Terms, now: float
    ) -> None:
        """`members`: node id -> failure domain, in the order of node ranks."""
        self.incarnation, self.terms = incarnation, terms
        self.domains = dict(members)
        self.views = {node_id: NodeView() for node_id in members}
        self.sources = {node_id: NodeView() for node_id in former if node_id not in members}
        self.state = GATHERING
        self.orders = Orders(incarnation, 0, 0)
        self.open: list[JobGrant] = []
        self.outcomes: deque[GrantOutcome] = deque(maxlen=MAX_OUTCOMES)
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

    def change(self, **fields: object) -> None:
        changed = {name: value for name, value in fields.items() if getattr(self.orders, name) != value}
        if changed:
            self.orders = msgspec.structs.replace(self.orders, seq=self.orders.seq + 1, **changed)

    def orders_for(self, node_id: str) -> Orders:
        group, restore = self.groups.get(node_id), self.pieces.get(node_id)
        if group is None and restore is None:
            return self.orders
        if restore is not None and self.orders.ready:
            restore = restore.when_over()
        return msgspec.structs.replace(self.orders, group=group, restore=restore)

    @property
    def target_key(self) -> SetKey | None:
        if self.orders.target is None:
            return None
        return SetKey(self.orders.target, self.incarnation, self.orders.attempt)

    @property
    def slots(self) -> int:
        """The same on all nodes."""
        report = next(iter(self.views.values())).report
        return report.slots if report is not None else 2

    def order_at(self, seq: int) -> tuple[int, int, int]:
        return (self.incarnation.number, self.orders.epoch, seq)
