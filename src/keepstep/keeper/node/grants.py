"""Grants of this node: which slots its ranks may write, and how far each rank is. Pure.

The coordinator gives grants; this node issues them to its ranks and reports when nothing more will be written
under one: committed and sealed on all local ranks, or void. A grant stays open, and no slot it names is granted
again, until the coordinator has reported its outcome on all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.arena.records import Grant
from keepstep.control.messages import Committed, Void
from keepstep.keeper.coordinator.messages import EarlierGrantProgress, GrantOrder
from keepstep.keeper.node.events import Conn
from keepstep.parity.divergence import ReplicaSetDigest, add_shares
from keepstep.types import Incarnation, Version

MAX_UNCLAIMED = 4  # of one rank: more grants than it can have open


@dataclass
class NodeGrant:  # A grant, and the progress of each rank (by local index) with it
    serial: int
    step: int
    slots: dict[int, int]
    arenas: dict[int, str]  # where those slots are: a rank may have moved into a larger arena since
    committed: dict[int, Version] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    shares: dict[int, tuple[ReplicaSetDigest, ...]] = field(default_factory=dict)  # digests of each rank's slot
    void: tuple[int, str] | None = None  # the rank that could not honour it, and why
    voided: set[int] = field(default_factory=set)  # ranks that will not write under it

    def resolved_for(self, index: int) -> bool:
        """Nothing more will be written into this rank's slot under this grant."""
        return index in self.committed or index in self.voided

    @property
    def resolved(self) -> bool:
        return all(self.resolved_for(index) for index in self.slots)

    @property
    def versions(self) -> set[Version]:
        return set(self.committed.values())

    def add_rank(self, index: int, arena_id: str, slot: int) -> None:
        self.slots[index], self.arenas[index] = slot, arena_id

    def add_committed(self, index: int, version: Version, *, sealed: bool) -> None:
        """What the rank's slot held under it when its arena was adopted."""
        self.committed[index] = version
        if sealed:
            self.sealed.add(index)

    def commit(self, index: int, version: Version, rank: int) -> None:
        self.committed[index] = version
        if len(self.versions) > 1 and self.void is None:
            self.void = (rank, f"ranks captured different steps: {sorted(v.step for v in self.versions)}")

    def seal(self, index: int, version: Version, shares: tuple[ReplicaSetDigest, ...]) -> None:
        """A rank's slot is sealed; ignored where it committed another version under this grant, or none."""
        if self.committed.get(index) == version:
            self.sealed.add(index)
            self.shares[index] = shares

    def withdraw(self, index: int, rank: int, reason: str) -> None:
        self.voided.add(index)
        self.fail(rank, reason)

    def fail(self, rank: int, reason: str) -> None:
        self.void = self.void or (rank, reason)

    def progress(self) -> EarlierGrantProgress | None:
        """What is reported of it; None while a rank may still write."""
        if not self.resolved:
            return None
        if self.void is not None or len(self.versions) != 1:  # several: read from the arenas after a keeper's death
            steps = sorted(version.step for version in self.versions)
            why = f"ranks captured different steps: {steps}" if steps else "no rank of this node could take part"
            rank, reason = self.void or (-1, why)
            return EarlierGrantProgress(self.serial, self.step, None, False, rank, reason, late=len(self.versions) > 1)
        (version,), sealed = self.versions, self.slots.keys() <= self.sealed
        return EarlierGrantProgress(self.serial, self.step, version, sealed, shares=add_shares(self.shares.values()))


@dataclass(frozen=True)
class GrantRecord:  # What the grant record of an arena holds
    arena_id: str
    grant: Grant


@dataclass
class NodeGrants:
    """The section of `NodeState`: changed by its own methods only."""

    open: list[NodeGrant] = field(default_factory=list)  # oldest first
    serial: int = 0  # of the newest one that was issued
    last_resolved_serial: int = 0  # of the newest one whose outcome on all nodes is known
    records: dict[int, GrantRecord] = field(default_factory=dict)  # by local index: the newest one
    # Commits and voids of ranks that came back first, under grants that are taken up only when all are back.
    unclaimed: dict[int, list[tuple[Conn, Committed | Void]]] = field(default_factory=dict)

    def begin_incarnation(self) -> None:
        self.open, self.serial, self.last_resolved_serial = [], 0, 0
        self.records.clear()
        self.unclaimed.clear()

    # Issue

    def issue(self, order: GrantOrder, slots: dict[int, int], arenas: dict[int, str]) -> NodeGrant:
        """Open a grant: `slots` and `arenas` name where each rank will write."""
        self.serial = order.serial
        issued = NodeGrant(order.serial, order.step, slots, arenas)
        self.open.append(issued)
        return issued

    def refuse(self, order: GrantOrder, rank: int, reason: str) -> None:
        """This node cannot take part: the grant is void here before a rank has seen it."""
        self.issue(order, {}, {}).fail(rank, reason)

    def void_lost(self, order: GrantOrder, rank: int) -> None:
        """Issued by a keeper that has since died; its outcome is unknown, so it is voided."""
        void = (rank, "its keeper died before the version was complete")
        self.open.insert(0, NodeGrant(order.serial, order.step, {}, {}, void=void))

    def adopt(self, grant: NodeGrant) -> None:
        self.serial = grant.serial
        if grant.slots:
            self.open.append(grant)

    def record(self, index: int, arena_id: str, grant: Grant) -> None:
        self.records[index] = GrantRecord(arena_id, grant)

    def adopt_record(self, index: int, arena_id: str, grant: Grant) -> None:
        """Remember the grant record of an adopted arena, if it is the newest one of its rank."""
        own = self.records.get(index)
        if own is None or (own.grant.incarnation, own.grant.serial) < (grant.incarnation, grant.serial):
            self.record(index, arena_id, grant)

    def usable_record(self, index: int) -> GrantRecord | None:
        """The record that must stand in the rank's arena now: it names a grant that the rank may still use."""
        own = self.records.get(index)
        serials = {grant.serial for grant in own.grant.both} if own is not None else set()
        usable = any(grant.serial in serials and not grant.resolved_for(index) for grant in self.open)
        return own if usable else None

    def earlier(self, index: int, issued: NodeGrant, incarnation: Incarnation) -> Grant | None:
        """The other grant that the rank's new record must name, so that a later keeper takes it over.

        It is the grant that the rank may still use or write under; there is at most one, or `issued` would not
        have been given. Otherwise it is the last grant that the rank has committed.
        """
        arena_id = issued.arenas[index]
        others = [grant for grant in self.open if grant is not issued and grant.arenas.get(index) == arena_id]
        waiting = [grant for grant in others if not grant.resolved_for(index)]
        done = [grant for grant in others if index in grant.committed]
        if not waiting and not done:
            return None
        last = waiting[0] if waiting else done[-1]
        return Grant(incarnation, last.step, last.serial, last.slots[index])

    # Progress

    def find(self, index: int, arena_id: str, slot: int) -> NodeGrant | None:
        """The open grant under which rank `index` writes `slot` of that arena."""
        own = (grant for grant in self.open if grant.arenas.get(index) == arena_id)
        return next((grant for grant in own if grant.slots[index] == slot), None)

    def slots_in_use(self, index: int, arena_id: str) -> set[int]:
        return {grant.slots[index] for grant in self.open if grant.arenas.get(index) == arena_id}

    def commit(self, index: int, message: Committed, rank: int) -> bool:
        """False: a repeated report of a grant that is closed. Grants name steps that no rank has reached."""
        grant = self.find(index, message.arena_id, message.slot)
        if grant is None or message.version.step < grant.step:
            return False
        grant.commit(index, message.version, rank)
        return True

    def void(self, index: int, message: Void, rank: int) -> bool:
        """Rank `index` could not honour its grant. False: a repeated report of a grant that is closed."""
        grant = self.find(index, message.arena_id, message.slot)
        if grant is None or message.version.step < grant.step or grant.resolved_for(index):
            return False
        grant.withdraw(index, rank, message.reason)
        return True

    def withdraw(self, index: int, rank: int, reason: str) -> None:
        """Rank `index` will not write under any grant that it has not resolved."""
        for grant in self.open:
            if index in grant.slots and not grant.resolved_for(index):
                grant.withdraw(index, rank, reason)

    def note_resolved(self, serial: int) -> None:
        self.last_resolved_serial = max(self.last_resolved_serial, serial)

    def adopt_resolved(self, serial: int) -> None:
        self.last_resolved_serial = serial

    def close(self, serial: int) -> NodeGrant | None:
        """The outcome on all nodes is known. None while a rank of this node may still write under it."""
        grant = next((grant for grant in self.open if grant.serial == serial), None)
        if grant is None or not grant.resolved:
            return None
        self.open.remove(grant)
        return grant

    # After a keeper's death

    def awaits_takeover(self, index: int, incarnation: Incarnation) -> bool:
        """The rank's record names a grant that this keeper has not taken up yet."""
        own = self.records.get(index)
        return own is not None and own.grant.incarnation == incarnation and own.grant.serial > self.serial

    def keep_unclaimed(self, index: int, conn: Conn, message: Committed | Void) -> None:
        self.unclaimed[index] = [*self.unclaimed.get(index, []), (conn, message)][-MAX_UNCLAIMED:]

    def take_unclaimed(self) -> list[tuple[Conn, Committed | Void]]:
        unclaimed, self.unclaimed = self.unclaimed, {}
        return [report for reports in unclaimed.values() for report in reports]

    def recorded(self, incarnation: Incarnation) -> dict[int, dict[int, GrantRecord]]:
        """Grants in the arenas that this keeper has not taken up: by serial, then by local index."""
        newest = max(self.serial, self.last_resolved_serial)
        recorded: dict[int, dict[int, GrantRecord]] = {}
        for index, record in self.records.items():
            for grant in record.grant.both:
                if grant.incarnation == incarnation and grant.serial > newest:
                    recorded.setdefault(grant.serial, {})[index] = GrantRecord(record.arena_id, grant)
        return recorded
