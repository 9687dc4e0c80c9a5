"""Messages between keepers: reports to the coordinator, orders from it.

Both are whole small states, sent again with every heartbeat: a lost, late or repeated message changes nothing
that the next one does not correct. A receiver ignores what is older than what it has (`Orders.newer_than`,
`Report.number`). Field names are part of the wire format.
"""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.control.messages import NodeCard
from keepstep.parity.divergence import ReplicaAudit, ReplicaAuditAnswer, ReplicaSetDigest
from keepstep.recovery.inventory import Inventory, SetKey
from keepstep.recovery.plan import RankSource
from keepstep.types import Incarnation, Version

MAX_MESSAGE_BYTES = 8 << 20  # orders for one of 1,000 nodes with 8 ranks each take less than 40 kB


class GrantOrder(msgspec.Struct, frozen=True):
    """All ranks capture at their first `take` at or after this step."""

    serial: int
    step: int


class GrantOutcome(msgspec.Struct, frozen=True):
    """How a grant ended: the version that is complete on all ranks, or None and the rank that failed."""

    serial: int
    version: Version | None
    rank: int = -1
    reason: str = ""
    diverged: tuple[str, ...] = ()  # paths whose replicas differ: protected per rank from now on


class RestoreOrder(msgspec.Struct, frozen=True):
    """What this node must obtain for its ranks, and whether all nodes have done so (`begin`)."""

    number: int
    version: Version | None
    pieces: tuple[RankSource, ...] = ()
    reasons: tuple[str, ...] = ()
    failure: str = ""
    damage: bool = False  # the failure is one of bytes that do not match their checksum
    begin: bool = False
    world_size: int = 0
    local_world_size: int = 0  # of the job that saved it
    holders: tuple[str, ...] = ()  # nodes that may hold its replicated state

    def when_over(self) -> RestoreOrder:
        """The same without pieces, once all ranks have loaded: every report repeats it."""
        return msgspec.structs.replace(self, pieces=(), reasons=(), holders=())


class GroupOrder(msgspec.Struct, frozen=True):
    """The nodes that protect each other, by position."""

    members: tuple[str, ...]
    losses: int


class Orders(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's whole state, for one node."""

    incarnation: Incarnation
    epoch: int  # counts the keepers that have coordinated this incarnation
    seq: int
    attempt: int = 0
    protected: Version | None = None
    protected_by: SetKey | None = None
    complete: Version | None = None
    target: Version | None = None
    base: Version | None = None
    grants: tuple[GrantOrder, ...] = ()
    outcomes: tuple[GrantOutcome, ...] = ()
    serial: int = 0  # of the last grant that was given
    exposed: bool = False
    ready: bool = False  # all ranks of all nodes are loaded
    finished: bool = False
    every: int = 1
    group: GroupOrder | None = None
    restore: RestoreOrder | None = None
    audit: ReplicaAudit | None = None
    cards: tuple[NodeCard, ...] = ()  # of keepers that replaced those the membership names
    retain_seq: int = 0  # the seq at which `retain` last changed: a report that has seen it knows what is free

    @property
    def retain(self) -> set[Version]:
        versions = {self.protected, self.complete, self.target, self.base}
        return {version for version in versions if version is not None}

    def newer_than(self, other: Orders | None) -> bool:
        return other is None or self.order > other.order

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.incarnation.number, self.epoch, self.seq)


class EarlierGrantProgress(msgspec.Struct, frozen=True):
    """How far a node has come with a grant that it cannot write under any more."""

    serial: int
    step: int
    version: Version | None  # what all its ranks committed; None: void
    sealed: bool
    rank: int = -1
    reason: str = ""
    shares: tuple[ReplicaSetDigest, ...] = ()  # of replicated state, of all local ranks together
    late: bool = False  # its ranks captured different steps: the grant came too late for one of them


class ExchangeProgress(msgspec.Struct, frozen=True):
    """How far a node is with its parity of the target."""

    key: SetKey
    moved_bytes: int
    problem: str = ""  # why this node cannot finish it


class Failure(msgspec.Struct, frozen=True):
    """A source that a plan counted on and that cannot be had."""

    plan: int
    node_id: str
    rank: int  # -1: its parity
    version: Version
    damaged: bool  # its own bytes failed their check; otherwise the node could not be reached
    text: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """The state of a node: everything the coordinator decides from."""

    node_id: str
    instance: str
    incarnation: Incarnation
    number: int
    state: str
    card: NodeCard
    whole: bool = False  # all local ranks have registered
    ranks: tuple[int, ...] = ()
    world_size: int = 0
    progress: int = -1
    step_s: float = 0.0
    ready: bool = False
    room: bool = False  # every rank has a slot that may be granted under the orders it has seen
    every: int = 1
    slots: int = 2
    grants: tuple[EarlierGrantProgress, ...] = ()
    opened: tuple[GrantOrder, ...] = ()  # grants that its ranks may be writing under
    placed: tuple[SetKey, ...] = ()
    exchange: ExchangeProgress | None = None
    audit: tuple[ReplicaAudit, ReplicaAuditAnswer] | None = None
    damaged: tuple[Version, ...] = ()
    unreachable: tuple[str, ...] = ()
    finished: bool = False
    losses: int = 0
    group_size: int = 8
    orders: Orders | None = None  # the last ones it follows: what a coordinator that takes over starts from
    inventory: Inventory | None = None
    restored: int = 0  # the plan for which the snapshots of all its ranks are here and verified
    failures: tuple[Failure, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Report | Orders)


def encode(message: Report | Orders) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Report | Orders:
    """Raises msgspec.DecodeError or ValueError for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes")
    message: Report | Orders = _decoder.decode(data)
    return message
