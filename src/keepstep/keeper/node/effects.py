"""What the keeper's core wants done. Values only: `process` carries them out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.arena.records import Grant, Ledger
from keepstep.control.messages import NodeCard, RestoreFrom, WantArena
from keepstep.keeper.coordinator.messages import Orders, ReplicaAudit, Report
from keepstep.keeper.node.events import Conn
from keepstep.recovery.inventory import SetKey
from keepstep.recovery.plan import RankSource
from keepstep.types import Version

# To processes of this node


@dataclass(frozen=True)
class Send:
    """Send a message; `arena_id` names the arena whose descriptor goes with it."""

    conn: Conn
    message: Any
    arena_id: str = ""


@dataclass(frozen=True)
class SendSnapshot:
    """Answer a rank's restore request, with the chunks of replicated state it needs, which `holders` may hold."""

    conn: Conn
    answer: RestoreFrom
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """Kill a watched process."""

    pid: int
    reason: str


@dataclass(frozen=True)
class End:
    """End the keeper; everything it holds is freed."""

    reason: str


@dataclass(frozen=True)
class Log:
    """Write a log line."""

    level: str
    text: str
    fields: dict[str, Any]


# Arenas and work on slots


@dataclass(frozen=True)
class CreateArena:
    """Create an arena for a trainer's request, and answer the request."""

    conn: Conn
    wanted: WantArena
    local_index: int
    generation: int
    num_ranks: int = 1  # of this node: they share its memory


@dataclass(frozen=True)
class DropArena:
    """Free an arena."""

    arena_id: str
    reason: str


@dataclass(frozen=True)
class KeepFetchedArena:
    """Serve the new arena that a snapshot was fetched into, as any other."""

    arena_id: str


@dataclass(frozen=True)
class DiscardFetchedArena:
    """Free the new arena of a fetch whose plan no longer counts."""

    arena_id: str


@dataclass(frozen=True)
class WriteGrant:
    """Write the grant record of an arena."""

    arena_id: str
    grant: Grant


@dataclass(frozen=True)
class WriteLedger:
    """Write the ledger record of every arena."""

    ledger: Ledger


@dataclass(frozen=True)
class SealSlot:
    """Seal what was committed; `version` None: whatever the slot holds, if its writer finished it.

    A version that is not newer than `newer_than` was sealed once: if its seal is gone it is not trusted.
    """

    arena_id: str
    slot: int
    version: Version | None
    newer_than: Version | None


@dataclass(frozen=True)
class VerifySlot:
    """Verify a sealed slot against its checksums."""

    arena_id: str
    slot: int
    version: Version


# To other nodes


@dataclass(frozen=True)
class SetPeers:
    """Set the peers of the incarnation, and the secret that authenticates them."""

    cards: tuple[NodeCard, ...]
    secret: bytes


@dataclass(frozen=True)
class SendToPeer:
    """Send a message to a peer. It may be lost: every report and all orders are sent again."""

    node_id: str
    message: Report | Orders


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
    slot: int  # the target, if the snapshot fits; `arena_id` "": into a new arena
    holders: tuple[str, ...] = ()  # nodes that may hold its replicated state


@dataclass(frozen=True)
class CancelFetches:
    """Stop fetching for a plan that no longer counts."""

    plan: int


@dataclass(frozen=True)
class DropReplicaCache:
    """Free the replicated state that was fetched for a restore: all ranks have loaded."""


@dataclass(frozen=True)
class StartExchange:
    """Fetch the data of the group and encode this node's parity of a version."""

    key: SetKey
    members: tuple[str, ...]
    losses: int


@dataclass(frozen=True)
class StopExchange:
    """Stop a running exchange."""

    key: SetKey


@dataclass(frozen=True)
class FreeParity:
    """Free a parity buffer: its memory may be used for the next one."""

    buffer_id: str


@dataclass(frozen=True)
class ReadReplicaDigests:
    """Read what this node holds of a replica set, for the coordinator's comparison."""

    audit: ReplicaAudit


Effect = (
    Send | SendSnapshot | Kill | End | Log | CreateArena | DropArena | KeepFetchedArena | DiscardFetchedArena
    | WriteGrant | WriteLedger | SealSlot | VerifySlot | SetPeers | SendToPeer | FetchSnapshot | CancelFetches
    | DropReplicaCache | StartExchange | StopExchange | FreeParity | ReadReplicaDigests
)  # fmt: skip
