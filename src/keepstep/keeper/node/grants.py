"""The grants that this node's ranks may be writing under, and how far each rank has come. Pure.

The coordinator gives grants (`job`), this node hands them to its ranks and says when nothing more will
be written under one: sealed on all local ranks, or void. A grant stays open, and its slots are given to
nobody, until the coordinator has said how it ended on all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.keeper.coordinator.messages import EarlierGrantProgress, GrantOrder, ReplicaSetDigest
from keepstep.parity.galois import add
from keepstep.types import Version


@dataclass
class NodeGrant:
    """A grant and how far each rank (by local index) has come with it."""

    serial: int
    step: int
    slots: dict[int, int]
    arenas: dict[int, str]
    """where those slots are: a rank may have moved into a larger arena since"""
    committed: dict[int, Version] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    shares: dict[int, tuple[ReplicaSetDigest, ...]] = field(default_factory=dict)
    """by rank: the digest of what its slot holds of each replica class"""
    void: tuple[int, str] | None = None
    """the rank that could not honour it, and why"""
    voided: set[int] = field(default_factory=set)

    def resolved_for(self, index: int) -> bool:
        """Nothing more will be written into this rank's slot under this grant."""
        return index in self.committed or index in self.voided

    @property
    def resolved(self) -> bool:
        return all(self.resolved_for(index) for index in self.slots)

    @property
    def versions(self) -> set[Version]:
        return set(self.committed.values())

    def said(self) -> EarlierGrantProgress | None:
        """What the coordinator is told of it; None while somebody may still write."""
        if not self.resolved:
            return None
        if self.void is not None or len(self.versions) != 1:  # several: found so after the keeper's own death
            steps = sorted(version.step for version in self.versions)
            why = f"ranks captured different steps: {steps}" if steps else "no rank of this node could take part"
            rank, reason = self.void or (-1, why)
            return EarlierGrantProgress(self.serial, self.step, None, False, rank, reason, late=len(self.versions) > 1)
        (version,) = self.versions
        return EarlierGrantProgress(
            self.serial, self.step, version, self.slots.keys() <= self.sealed, shares=self._shares()
        )

    def _shares(self) -> tuple[ReplicaSetDigest, ...]:
        """Local ranks hold different chunks of a class; digests add up in any order."""
        total: dict[str, ReplicaSetDigest] = {}
        for found in self.shares.values():
            for one in found:
                before = total.get(one.class_id)
                digest = one.digest if before is None else add(before.digest, one.digest)
                total[one.class_id] = ReplicaSetDigest(one.class_id, digest, one.shared_by)
        return tuple(total[class_id] for class_id in sorted(total))


@dataclass
class Grants:
    """Open grants of this node, oldest first; `serial` is the newest one it has handed out."""

    open: list[NodeGrant] = field(default_factory=list)
    serial: int = 0

    def begin(self, order: GrantOrder, slots: dict[int, int], arenas: dict[int, str]) -> NodeGrant:
        """Hand the grant out: `slots` and `arenas` say where each rank will write."""
        self.serial = order.serial
        opened = NodeGrant(order.serial, order.step, slots, arenas)
        self.open.append(opened)
        return opened

    def refuse_all(self, order: GrantOrder, rank: int, reason: str) -> None:
        """This node cannot take part: the grant is over here before anybody has seen it."""
        self.begin(order, {}, {}).void = (rank, reason)

    def forget(self, order: GrantOrder, rank: int) -> None:
        """A keeper before this one handed it out, and took what became of it into its grave."""
        void = (rank, "its keeper died before the version was complete")
        self.open.insert(0, NodeGrant(order.serial, order.step, {}, {}, void=void))

    def find(self, index: int, arena_id: str, slot: int) -> NodeGrant | None:
        """The open grant under which rank `index` writes `slot` of that arena."""
        mine = (grant for grant in self.open if grant.arenas.get(index) == arena_id)
        return next((grant for grant in mine if grant.slots[index] == slot), None)

    def commit(self, index: int, arena_id: str, slot: int, version: Version, rank: int) -> NodeGrant | None:
        """None: a word that is said again, of a grant that is over. Grants name steps that nobody has reached."""
        grant = self.find(index, arena_id, slot)
        if grant is None or version.step < grant.step:
            return None
        grant.committed[index] = version
        if len(grant.versions) > 1 and grant.void is None:
            grant.void = (rank, f"ranks captured different steps: {sorted(v.step for v in grant.versions)}")
        return grant

    def refuse(self, index: int, arena_id: str, slot: int, step: int, rank: int, reason: str) -> NodeGrant | None:
        """Rank `index` could not honour its grant at `step`. None: of a grant that is over."""
        grant = self.find(index, arena_id, slot)
        if grant is None or step < grant.step or grant.resolved_for(index):
            return None
        grant.voided.add(index)
        grant.void = grant.void or (rank, reason)
        return grant

    def withdraw(self, index: int, rank: int, reason: str) -> None:
        """Rank `index` will not write under any grant that it has not resolved."""
        for grant in self.open:
            if index in grant.slots and not grant.resolved_for(index):
                grant.voided.add(index)
                grant.void = grant.void or (rank, reason)

    def fail_seal(self, index: int, arena_id: str, slot: int, rank: int, reason: str) -> None:
        grant = self.find(index, arena_id, slot)
        if grant is not None:
            grant.void = grant.void or (rank, reason)

    def settle(self, serial: int) -> NodeGrant | None:
        """The coordinator says that grant is over. None while somebody here may still write under it."""
        grant = next((grant for grant in self.open if grant.serial == serial), None)
        if grant is None or not grant.resolved:
            return None
        self.open.remove(grant)
        return grant
