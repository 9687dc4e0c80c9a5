"""What reaches the keeper's core. Values only: `process` and `requests` make them, `Core.handle` takes them."""

from __future__ import annotations

import msgspec

from keepstep.arena.records import Grant, Ledger, Progress
from keepstep.control.messages import (
    Committed,
    Failed,
    Goodbye,
    Loaded,
    Membership,
    Register,
    Void,
    WantArena,
    WantRestore,
)
from keepstep.keeper.coordinator.messages import Failure, Orders, Report
from keepstep.layout import SnapshotSize
from keepstep.parity.divergence import ReplicaAudit, ReplicaAuditAnswer, ReplicaSetDigest
from keepstep.recovery.inventory import ParitySet, SetKey
from keepstep.types import SnapshotInfo, Version

Conn = int  # a connection, by its number
TrainerMessage = WantRestore | WantArena | Loaded | Committed | Void | Failed | Goodbye


# From processes of this node


class TrainerRegisters(msgspec.Struct, frozen=True):  # The process behind the connection is watched from now on
    conn: Conn
    pid: int
    alive: bool
    register: Register
    nonce: int  # for a new incarnation; drawn by the caller, since the core draws nothing


class FromTrainer(msgspec.Struct, frozen=True):  # A message of a trainer, as it came
    conn: Conn
    message: TrainerMessage


class LauncherSeen(msgspec.Struct, frozen=True):  # A launcher has connected, and has given back all it held
    pid: int
    alive: bool = True  # False: in another pid namespace, so its process cannot be watched and does not count as alive


class ProcessDied(msgspec.Struct, frozen=True):  # A watched process has ended
    pid: int


class MembershipSet(msgspec.Struct, frozen=True):  # The launcher's list of the nodes of the next incarnation
    membership: Membership


# Arenas and work on slots


class SlotFound(msgspec.Struct, frozen=True):  # A slot of an adopted arena, as its headers describe it
    index: int
    state: str
    info: SnapshotInfo | None = None  # of what was committed or sealed in it
    age_s: float = 0.0  # since it was sealed


class ArenaAdded(msgspec.Struct, frozen=True):  # An arena was created for a request, or adopted from a holder
    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    capacity: SnapshotSize
    slots: tuple[SlotFound, ...]
    ledger: Ledger | None
    grant: Grant | None
    writer: Progress | None = None  # the living process that may still write into it, whatever its headers say


class ArenaRefused(msgspec.Struct, frozen=True):  # It cannot be adopted; what it contained is lost
    arena_id: str
    problem: str


class SlotSealed(msgspec.Struct, frozen=True):  # `info`: what it holds now, or `problem`: why it is not sealed
    arena_id: str
    slot: int
    version: Version | None  # None: no version was asked for, and the slot holds none
    info: SnapshotInfo | None = None
    problem: str = ""
    shares: tuple[ReplicaSetDigest, ...] = ()  # one digest for each replica set in the slot
    took_s: float = 0.0


class SlotVerified(msgspec.Struct, frozen=True):  # `problem` is empty when its bytes match their checksums
    arena_id: str
    slot: int
    version: Version
    problem: str = ""


# From other nodes


class PeerMessage(msgspec.Struct, frozen=True):  # A message of an authenticated peer
    node_id: str
    message: Report | Orders
    instance: str  # of its handshake


class PeerLink(msgspec.Struct, frozen=True):  # The control connection to a peer is up, or down with a reason
    node_id: str
    up: bool
    reason: str = ""


class SnapshotFetched(msgspec.Struct, frozen=True):
    """A rank's snapshot was fetched or rebuilt into a slot of this node, or could not be (`info` is None)."""

    plan: int
    rank: int
    arena_id: str
    slot: int
    info: SnapshotInfo | None
    failures: tuple[Failure, ...] = ()
    added: ArenaAdded | None = None  # the new arena that was created for it


class ParityPlaced(msgspec.Struct, frozen=True):  # Encoded, verified and held here; or a holder gave it back
    parity_set: ParitySet
    moved_bytes: int = 0


class ExchangeAdvanced(msgspec.Struct, frozen=True):  # A parity exchange has moved bytes, or cannot go on (`problem`)
    key: SetKey
    moved_bytes: int
    problem: str = ""


class ReplicaDigestsRead(msgspec.Struct, frozen=True):  # This node's part of a replica set, for the comparison
    audit: ReplicaAudit
    answer: ReplicaAuditAnswer


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    TrainerRegisters | FromTrainer | LauncherSeen | ProcessDied | MembershipSet | ArenaAdded | ArenaRefused
    | SlotSealed | SlotVerified | PeerMessage | PeerLink | SnapshotFetched | ParityPlaced | ExchangeAdvanced
    | ReplicaDigestsRead | Tick
)  # fmt: skip
