"""What the keeper's core wants done. Values only: `process` carries them out, in order."""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.arena.records import Grant, Ledger
from keepstep.control.messages import NodeCard, RestoreFrom, WantArena
from keepstep.keeper.coordinator.messages import Orders, Report
from keepstep.keeper.node.events import Conn
from keepstep.parity.divergence import ReplicaAudit
from keepstep.recovery.inventory import SetKey
from keepstep.recovery.plan import RankSource
from keepstep.types import Version

# To processes of this node


class Send(msgspec.Struct, frozen=True):  # Send a message; `arena_id` names the arena whose descriptor goes with it
    conn: Conn
    message: Any
    arena_id: str = ""


class SendSnapshot(msgspec.Struct, frozen=True):  # Answer a restore request; `holders` may hold the replicated state
    conn: Conn
    answer: RestoreFrom
    holders: tuple[str, ...]


class Kill(msgspec.Struct, frozen=True):  # Kill a watched process
    pid: int
    reason: str


class End(msgspec.Struct, frozen=True):  # End the keeper; everything it holds is freed
    reason: str


class Log(msgspec.Struct, frozen=True):  # Write a log line
    level: str
    text: str
    fields: dict[str, Any]


# Arenas and work on slots


class CreateArena(msgspec.Struct, frozen=True):  # Create an arena for a trainer's request, and answer the request
    conn: Conn
    wanted: WantArena
    local_index: int
    generation: int
    num_ranks: int = 1  # of this node: they share its memory


class DropArena(msgspec.Struct, frozen=True):  # Free an arena
    arena_id: str
    reason: str


class KeepFetchedArena(msgspec.Struct, frozen=True):  # Serve the arena that a snapshot was fetched into, as any other
    arena_id: str


class DiscardFetchedArena(msgspec.Struct, frozen=True):  # Free the new arena of a fetch whose plan no longer counts
    arena_id: str


class WriteGrant(msgspec.Struct, frozen=True):  # Write the grant record of an arena
    arena_id: str
    grant: Grant


class WriteLedger(msgspec.Struct, frozen=True):  # Write the ledger record of every arena
    ledger: Ledger


class SealSlot(msgspec.Struct, frozen=True):
    """Seal what was committed; `version` None: whatever the slot holds, if its writer finished it.

    A version that is not newer than `newer_than` was sealed once: if its seal is gone it is not trusted.
    """

    arena_id: str
    slot: int
    version: Version | None
    newer_than: Version | None


class VerifySlot(msgspec.Struct, frozen=True):  # Verify a sealed slot against its checksums
    arena_id: str
    slot: int
    version: Version


# To other nodes


class SetPeers(msgspec.Struct, frozen=True):  # Set the peers of the incarnation, and the secret that authenticates them
    cards: tuple[NodeCard, ...]
    secret: bytes


class SendToPeer(msgspec.Struct, frozen=True):  # May be lost: every report and all orders are sent again
    node_id: str
    message: Report | Orders


class FetchSnapshot(msgspec.Struct, frozen=True):  # Fetch or rebuild a rank's snapshot into memory of this node
    plan: int
    piece: RankSource
    local_index: int
    local_world_size: int
    slots: int
    generation: int
    arena_id: str
    slot: int  # the target, if the snapshot fits; `arena_id` "": into a new arena
    holders: tuple[str, ...] = ()  # nodes that may hold its replicated state


class CancelFetches(msgspec.Struct, frozen=True):  # Stop fetching for a plan that no longer counts
    plan: int


class DropReplicaCache(msgspec.Struct, frozen=True):
    """Free the replicated state that was fetched for a restore: all ranks have loaded."""


class StartExchange(msgspec.Struct, frozen=True):  # Fetch the data of the group, encode this node's parity
    key: SetKey
    members: tuple[str, ...]
    losses: int


class StopExchange(msgspec.Struct, frozen=True):  # Stop a running exchange
    key: SetKey


class FreeParity(msgspec.Struct, frozen=True):  # Free a parity buffer: its memory may be used for the next one
    buffer_id: str


class ReadReplicaDigests(msgspec.Struct, frozen=True):  # Read this node's part of a replica set, for the comparison
    audit: ReplicaAudit


Effect = (
    Send | SendSnapshot | Kill | End | Log | CreateArena | DropArena | KeepFetchedArena | DiscardFetchedArena
    | WriteGrant | WriteLedger | SealSlot | VerifySlot | SetPeers | SendToPeer | FetchSnapshot | CancelFetches
    | DropReplicaCache | StartExchange | StopExchange | FreeParity | ReadReplicaDigests
)  # fmt: skip
