"""What reaches the keeper's core, and what the core wants done. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.arena.records import Grant, Ledger, Progress
from keepstep.control.messages import Membership, NodeCard, Register
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
from keepstep.recovery.plan import RankSource
from keepstep.types import Version

Conn = int
"""a connection, by its number"""


@dataclass(frozen=True)
class SlotFound:
    """A slot of an arena that came from elsewhere, as its headers describe it."""

    index: int
    state: str
    version: Version | None
    rank: int
    world_size: int
    local_world_size: int
    size_bytes: int
    age_s: float = 0.0
    """since it was sealed"""


# Events


@dataclass(frozen=True)
class TrainerRegisters:
    conn: Conn
    pid: int
    alive: bool
    register: Register
    nonce: int
    """for a new incarnation, drawn by the runtime: the core draws nothing"""


@dataclass(frozen=True)
class LauncherSeen:
    """A launcher has connected, and has given back all it held."""

    pid: int
    alive: bool = True
    """False where its process cannot be watched (another pid namespace): it counts as heard, not as living"""


@dataclass(frozen=True)
class ProcessDied:
    pid: int


@dataclass(frozen=True)
class ArenaWanted:
    conn: Conn
    ticket: int
    need: SnapshotSize
    slots: int
    memory_limit_bytes: int


@dataclass(frozen=True)
class ArenaAdded:
    """Created for a request, or adopted from a holder."""

    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    capacity: SnapshotSize
    slots: tuple[SlotFound, ...]
    ledger: Ledger | None
    grant: Grant | None
    writer: Progress | None = None
    """the living process that may still write into it, for all that its headers say"""


@dataclass(frozen=True)
class ArenaRefused:
    """Somebody held it for this run, and it cannot be adopted: whatever was in it is lost."""

    arena_id: str
    problem: str


@dataclass(frozen=True)
class SnapshotCommitted:
    conn: Conn
    arena_id: str
    slot: int
    version: Version


@dataclass(frozen=True)
class GrantVoid:
    conn: Conn
    arena_id: str
    slot: int
    version: Version
    reason: str


@dataclass(frozen=True)
class SlotSealed:
    """The work on a slot ended; `problem` is empty when it is sealed."""

    arena_id: str
    slot: int
    version: Version | None
    rank: int
    world_size: int
    local_world_size: int
    size_bytes: int
    problem: str = ""
    shares: tuple[ReplicaSetDigest, ...] = ()
    """(class, digest) of what the slot holds of state that other nodes hold too"""
    took_s: float = 0.0


@dataclass(frozen=True)
class SlotVerified:
    arena_id: str
    slot: int
    version: Version
    problem: str = ""


@dataclass(frozen=True)
class RestoreWanted:
    conn: Conn
    ticket: int


@dataclass(frozen=True)
class RankLoaded:
    conn: Conn
    ticket: int
    step: int | None


@dataclass(frozen=True)
class TrainerLeaves:
    conn: Conn
    finished: bool


@dataclass(frozen=True)
class MembershipSet:
    """The launcher says which nodes the next incarnation has."""

    membership: Membership


@dataclass(frozen=True)
class PeerMessage:
    """A word of an authenticated peer."""

    node_id: str
    word: Report | Orders


@dataclass(frozen=True)
class PeerLink:
    node_id: str
    up: bool
    reason: str = ""


@dataclass(frozen=True)
class SnapshotFetched:
    """The bytes of a rank were fetched or rebuilt into a slot of this node, or could not be."""

    plan: int
    rank: int
    arena_id: str
    slot: int
    sealed: SlotSealed | None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class ParityPlaced:
    """This node's parity of a version is encoded, checked and held; or it was given back by a holder."""

    found: ParitySet
    moved_bytes: int = 0


@dataclass(frozen=True)
class ExchangeAdvanced:
    """An exchange goes on, or cannot (`problem`)."""

    key: SetKey
    moved_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class ReplicaDigestsRead:
    """What this node holds of a replica class."""

    audit: ReplicaAudit
    answer: ReplicaAuditAnswer


@dataclass(frozen=True)
class Tick:
    pass


# Effects


@dataclass(frozen=True)
class Send:
    """Send a message; `arena_id` names the arena whose descriptor goes with it."""

    conn: Conn
    message: Any
    arena_id: str = ""


@dataclass(frozen=True)
class WriteGrant:
    arena_id: str
    grant: Grant


@dataclass(frozen=True)
class WriteLedger:
    ledger: Ledger


@dataclass(frozen=True)
class SealSlot:
    """Seal what was committed; None: whatever the slot holds, if its writer finished it.

    A version that is not newer than `newer_than` was sealed once: if its seal is gone it is not trusted.
    """

    arena_id: str
    slot: int
    version: Version | None
    newer_than: Version | None


@dataclass(frozen=True)
class VerifySlot:
    arena_id: str
    slot: int
    version: Version


@dataclass(frozen=True)
class SendToPeer:
    """Send a word to a peer. Lost ones are said again."""

    node_id: str
    word: Report | Orders


@dataclass(frozen=True)
class SetPeers:
    """These are the peers of the incarnation, and the secret that proves it."""

    cards: tuple[NodeCard, ...]
    secret: bytes


@dataclass(frozen=True)
class FetchSnapshot:
    """Fetch or rebuild a rank's snapshot into memory of this node."""

    plan: int
    piece: RankSource
    local_index: int
    local_world_size: int
    slots: int
    generation: int
    arena_id: str
    slot: int
    """where it goes if it fits there; "": into a new arena"""
    holders: tuple[str, ...] = ()
    """nodes that its replicated state may come from"""


@dataclass(frozen=True)
class CancelFetches:
    plan: int


@dataclass(frozen=True)
class StartExchange:
    key: SetKey
    members: tuple[str, ...]
    losses: int


@dataclass(frozen=True)
class StopExchange:
    key: SetKey


@dataclass(frozen=True)
class ReadReplicaDigests:
    audit: ReplicaAudit


@dataclass(frozen=True)
class FreeParity:
    """Nobody needs this parity any more: its memory may be used for the next one."""

    buffer_id: str


@dataclass(frozen=True)
class CreateArena:
    wanted: ArenaWanted
    local_index: int
    generation: int


@dataclass(frozen=True)
class DropArena:
    arena_id: str
    reason: str


@dataclass(frozen=True)
class Kill:
    pid: int
    reason: str


@dataclass(frozen=True)
class End:
    """The keeper's own end: everything it holds goes."""

    reason: str


@dataclass(frozen=True)
class Log:
    level: str
    text: str
    fields: dict[str, Any]


Effect = (
    Send | WriteGrant | WriteLedger | SealSlot | VerifySlot | CreateArena | DropArena | Kill | End | Log
    | SendToPeer | SetPeers | FetchSnapshot | CancelFetches | StartExchange | StopExchange | FreeParity
    | ReadReplicaDigests
)  # fmt: skip
Event = (
    TrainerRegisters | LauncherSeen | ProcessDied | ArenaWanted | ArenaAdded | ArenaRefused | SnapshotCommitted
    | GrantVoid | SlotSealed | SlotVerified | RestoreWanted | RankLoaded | TrainerLeaves | Tick
    | MembershipSet | PeerMessage | PeerLink | SnapshotFetched | ParityPlaced | ExchangeAdvanced | ReplicaDigestsRead
)  # fmt: skip
