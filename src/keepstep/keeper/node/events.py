"""What reaches the keeper's core. Values only: `process` and `requests` make them, `Core.handle` takes them."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.arena.records import Grant, Ledger, Progress
from keepstep.control.messages import (
    Committed,
    Goodbye,
    Loaded,
    Membership,
    Register,
    Void,
    WantArena,
    WantRestore,
)
from keepstep.keeper.coordinator.messages import (
    Failure,
    Orders,
    ReplicaAudit,
    ReplicaAuditAnswer,
    ReplicaSetDigest,
    Report,
)
from keepstep.layout import SnapshotSize
from keepstep.recovery.inventory import ParitySet, SetKey
from keepstep.types import SnapshotInfo, Version

Conn = int  # a connection, by its number
TrainerMessage = WantRestore | WantArena | Loaded | Committed | Void | Goodbye


# From processes of this node


@dataclass(frozen=True)
class TrainerRegisters:
    """A trainer registers; the process behind the connection is watched from now on."""

    conn: Conn
    pid: int
    alive: bool
    register: Register
    nonce: int  # for a new incarnation; drawn by the caller, since the core draws nothing


@dataclass(frozen=True)
class FromTrainer:
    """A message of a trainer, as it came."""

    conn: Conn
    message: TrainerMessage


@dataclass(frozen=True)
class LauncherSeen:
    """A launcher has connected, and has given back all it held."""

    pid: int
    alive: bool = True  # False: in another pid namespace, so its process cannot be watched and does not count as alive


@dataclass(frozen=True)
class ProcessDied:
    """A watched process has ended."""

    pid: int


@dataclass(frozen=True)
class MembershipSet:
    """The launcher's list of the nodes of the next incarnation."""

    membership: Membership


# Arenas and work on slots


@dataclass(frozen=True)
class SlotFound:
    """A slot of an adopted arena, as its headers describe it."""

    index: int
    state: str
    info: SnapshotInfo | None = None  # of what was committed or sealed in it
    age_s: float = 0.0  # since it was sealed


@dataclass(frozen=True)
class ArenaAdded:
    """An arena was created for a request, or adopted from a holder."""

    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    capacity: SnapshotSize
    slots: tuple[SlotFound, ...]
    ledger: Ledger | None
    grant: Grant | None
    writer: Progress | None = None  # the living process that may still write into it, whatever its headers say


@dataclass(frozen=True)
class ArenaRefused:
    """An arena held for this run cannot be adopted; what it contained is lost."""

    arena_id: str
    problem: str


@dataclass(frozen=True)
class SlotSealed:
    """Sealing a slot has ended: `info` is what it holds now, or `problem` says why it is not sealed."""

    arena_id: str
    slot: int
    version: Version | None  # None: no version was asked for, and the slot holds none
    info: SnapshotInfo | None = None
    problem: str = ""
    shares: tuple[ReplicaSetDigest, ...] = ()  # one digest for each replica set in the slot
    took_s: float = 0.0


@dataclass(frozen=True)
class SlotVerified:
    """Verifying a sealed slot has ended; `problem` is empty when its bytes match their checksums."""

    arena_id: str
    slot: int
    version: Version
    problem: str = ""


# From other nodes


@dataclass(frozen=True)
class PeerMessage:
    """A message of an authenticated peer."""

    node_id: str
    message: Report | Orders


@dataclass(frozen=True)
class PeerLink:
    """The control connection to a peer is up, or down with a reason."""

    node_id: str
    up: bool
    reason: str = ""


@dataclass(frozen=True)
class SnapshotFetched:
    """A rank's snapshot was fetched or rebuilt into a slot of this node, or could not be (`info` is None)."""

    plan: int
    rank: int
    arena_id: str
    slot: int
    info: SnapshotInfo | None
    failures: tuple[Failure, ...] = ()
    added: ArenaAdded | None = None  # the new arena that was created for it


@dataclass(frozen=True)
class ParityPlaced:
    """This node's parity of a version is encoded, verified and held; or a holder gave it back."""

    parity_set: ParitySet
    moved_bytes: int = 0


@dataclass(frozen=True)
class ExchangeAdvanced:
    """A parity exchange has moved bytes, or cannot go on (`problem`)."""

    key: SetKey
    moved_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class ReplicaDigestsRead:
    """What this node holds of a replica set, for the coordinator's comparison."""

    audit: ReplicaAudit
    answer: ReplicaAuditAnswer


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    TrainerRegisters | FromTrainer | LauncherSeen | ProcessDied | MembershipSet | ArenaAdded | ArenaRefused
    | SlotSealed | SlotVerified | PeerMessage | PeerLink | SnapshotFetched | ParityPlaced | ExchangeAdvanced
    | ReplicaDigestsRead | Tick
)  # fmt: skip
