"""Every message between a keeper and its trainers, its launcher and the command line of the same node.

A request carries a `ticket`, and the answer repeats it; ticket 0 is a message without an answer. The tags and the
fields of these structs are control protocol 2: other versions of keepstep read them. framing.py puts them on a socket.

Written by control/client.py (trainers, launchers, commands) and keeper/requests.py, each reads what the other writes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.errors import KINDS, Error, KeeperError
from keepstep.layout import SnapshotSize
from keepstep.types import Incarnation, Version

PROTOCOL = 2


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of every connection."""

    protocol: int
    run_id: str
    node_id: str
    role: str  # trainer, launcher or cli
    ticket: int = 0


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: the keeper accepts the connection."""

    instance: str
    keeper_pid: int
    largest_number: int  # The largest incarnation number that this keeper knows of.
    ticket: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request that failed: the error that the requester raises."""

    kind: str
    message: str
    hint: str = ""
    ticket: int = 0

    def error(self) -> Error:
        return KINDS.get(self.kind, KeeperError)(self.message, hint=self.hint)


class Register(msgspec.Struct, frozen=True, tag=True):
    """A trainer joins an incarnation, or rejoins it after the keeper's death."""

    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    incarnation: Incarnation | None  # Agreed by the launcher, or received before a reconnect; None: the keeper decides.
    label: str  # Equal for all trainers of one round under a launcher that agrees on no incarnation.
    launcher_pid: int
    every: int
    slots: int
    progress: int  # Step of the last `take`, or -1.
    rejoin: bool = False
    ticket: int = 0
    arena_id: str = ""  # The arena that a reconnecting trainer writes: not always the newest one of its rank.
    no_holder: bool = False  # True: no launcher of this job holds the node's memory.


class Registered(msgspec.Struct, frozen=True, tag=True):
    """Answer to Register, once every trainer of older incarnations is dead."""

    incarnation: Incarnation
    ticket: int = 0


class LauncherHello(msgspec.Struct, frozen=True, tag=True):
    """A launcher (torchrun's agent) that starts trainers and holds this node's memory."""

    pid: int
    ticket: int = 0


class LauncherNote(msgspec.Struct, frozen=True, tag=True):
    """A sentence of the launcher for the keeper's status; the last one counts, an empty one takes it back."""

    text: str


class NodeCard(msgspec.Struct, frozen=True):
    """Identity of a node's keeper, and the address for its peers."""

    node_id: str
    instance: str  # Of the keeper. A node that returns with empty memory has the same id and another instance.
    address: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    domain: str = ""  # Failure domain, for example the rack.


class WantCard(msgspec.Struct, frozen=True, tag=True):
    """Request this keeper's card: by a launcher, or by a node's first trainer where no launcher agrees on members."""

    ticket: int = 0


class CardIs(msgspec.Struct, frozen=True, tag=True):
    """Answer to WantCard."""

    card: NodeCard
    largest_number: int
    members: list[NodeCard]  # Of the last incarnation that this keeper was a member of, by position; empty: of none.
    members_number: int = 0  # Number of that incarnation.
    holds_state: bool = False
    ticket: int = 0
    secret: bytes = b""  # With which keepers of this run authenticate each other; empty if this keeper has none.


class Membership(msgspec.Struct, frozen=True, tag=True):
    """The nodes of an incarnation by node rank. Answered with Done."""

    incarnation: Incarnation
    nodes: list[NodeCard]
    node_rank: int
    secret: bytes  # With which keepers of this run authenticate each other.
    # Keepers of the previous incarnation without a place in this one: they may still hold state.
    former: list[NodeCard] = []
    ticket: int = 0


class WantArena(msgspec.Struct, frozen=True, tag=True):
    """A rank requests memory for its snapshots."""

    need: SnapshotSize
    slots: int
    memory_limit_bytes: int = 0
    ticket: int = 0


class ArenaGiven(msgspec.Struct, frozen=True, tag=True):
    """The rank's own arena; its descriptor travels beside this message."""

    arena_id: str
    size_bytes: int
    fresh: bool
    ticket: int = 0


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keep the memfds beside this message (in this order) for the node, and close those named in `forget`."""

    arena_ids: list[str]
    forget: list[str]
    ticket: int = 0


class Held(msgspec.Struct, frozen=True, tag=True):
    """What the sender holds for the node."""

    arena_ids: list[str]


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Memfds held for a dead keeper, offered to its replacement."""

    arena_ids: list[str]
    ticket: int = 0


class Adopted(msgspec.Struct, frozen=True, tag=True):
    """Answer to GiveBack: accepted arenas, and refused ones with the reasons."""

    arena_ids: list[str]
    refused: dict[str, str]
    ticket: int = 0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The trainer has finished writing a slot and does not touch it until the slot is granted again."""

    arena_id: str
    slot: int
    version: Version


class Void(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot use its grant: nothing will be written into the slot."""

    arena_id: str
    slot: int
    version: Version
    reason: str


class Complete(msgspec.Struct, frozen=True, tag=True):
    """The version is sealed on all ranks."""

    version: Version
    final: bool = True  # True: no other node could protect it, so no Protected follows.


class Protected(msgspec.Struct, frozen=True, tag=True):
    """The version survives the loss of a node."""

    version: Version


class Voided(msgspec.Struct, frozen=True, tag=True):
    """The version will never be complete."""

    version: Version
    rank: int
    reason: str
    diverged: list[str] = []  # Paths whose replicas differ between nodes: protected per rank from the next layout on.


class WantRestore(msgspec.Struct, frozen=True, tag=True):
    """A rank requests what it restores from. Answered when the restore is decided and every byte verified."""

    ticket: int = 0


class ReplicaSetSource(msgspec.Struct, frozen=True):
    """Where the verified chunks of a replica set are. Chunk lengths follow from the size of the set."""

    class_id: str
    fd_index: list[int]  # Per chunk: index of the descriptor beside the message that holds it.
    offsets: list[int]  # Per chunk: byte offset in that descriptor.


# How the incarnation before ended: some of its ranks had closed as finished, or all exited without an error.
FINISHED, EXITED = "finished", "exited"


class RestoreFrom(msgspec.Struct, frozen=True, tag=True):
    """What this rank restores: a verified slot of its arena, or no snapshot.

    The first descriptor beside it is the rank's arena; the others are what `streams` refers to.
    """

    version: Version | None
    arena_id: str
    slot: int
    size_bytes: int
    plan: list[str]  # Reasons, one sentence each.
    ticket: int = 0
    source: str = "memory"  # memory or parity: where this rank's bytes came from.
    streams: list[ReplicaSetSource] = []
    ended: str = ""  # FINISHED or EXITED; empty: otherwise, or not known.
    had_arenas: bool = False  # This node had arenas of an earlier start.


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """This rank is ready for its first step. Answered with Done when all ranks are."""

    step: int | None
    ticket: int = 0


class Ending(msgspec.Struct, frozen=True, tag=True):
    """The keeper ends on purpose, and no process shall start another one."""

    reason: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Last message of a trainer. `finished`: the training is over and its state may be freed."""

    finished: bool
    ticket: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This trainer's program ends with an error. Posted before Goodbye, by the trainers that can still say so."""

    kind: str  # The class of the error.
    text: str
    restoring: bool = False  # `restore()` raised it, and another attempt cannot cure it.

    @property
    def is_exit(self) -> bool:
        """Whether it is `sys.exit` without an error, or with a code that nobody saw."""
        return self.kind == "SystemExit" and self.text in ("", "0", "None")


class TrainerFailure(msgspec.Struct, frozen=True):
    """The error with which a trainer of this node has ended."""

    pid: int
    failure: Failed


class WantOutcome(msgspec.Struct, frozen=True, tag=True):
    """Request how the last incarnation has gone so far on this node, by its launcher."""

    ticket: int = 0


class OutcomeIs(msgspec.Struct, frozen=True, tag=True):
    """Answer to WantOutcome."""

    complete: Version | None  # The newest version that is complete on all ranks.
    failures: list[TrainerFailure]
    ticket: int = 0


class WantStatus(msgspec.Struct, frozen=True, tag=True):
    """Request the keeper's status."""

    ticket: int = 0


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    """Answer to WantStatus: `types.Status` as JSON."""

    json: bytes
    ticket: int = 0


class WantVerify(msgspec.Struct, frozen=True, tag=True):
    """Request a check of every sealed slot against its checksums."""

    ticket: int = 0


class VerifyResult(msgspec.Struct, frozen=True):
    """Result for one slot. `problem` is empty when the slot is intact."""

    rank: int
    slot: int
    step: int
    size_bytes: int
    problem: str


class Verified(msgspec.Struct, frozen=True, tag=True):
    """Answer to WantVerify."""

    results: list[VerifyResult]
    ticket: int = 0


class WantArenas(msgspec.Struct, frozen=True, tag=True):
    """Request the node's memfds, for the commands `inspect` and `drill`. Answered with Hold."""

    ticket: int = 0


class Release(msgspec.Struct, frozen=True, tag=True):
    """Free the state and end. Refused while trainers live, unless forced."""

    force: bool = False
    ticket: int = 0


class WantPlan(msgspec.Struct, frozen=True, tag=True):
    """Request what a restore would do if these nodes were lost now. Only the job's coordinator answers."""

    lost: list[str]
    ticket: int = 0


class PlannedPiece(msgspec.Struct, frozen=True):
    """Where the ranks of one node would get their state."""

    ranks: list[int]
    node_id: str  # Where they run now.
    source: str
    reason: str


class PlanIs(msgspec.Struct, frozen=True, tag=True):
    """Answer to WantPlan, grouped by node: a plan for thousands of ranks must fit into a frame."""

    step: int | None  # Of the version that would be restored; None: none could be.
    newest_step: int  # The newest step that any rank has done.
    pieces: list[PlannedPiece]
    reasons: list[str]
    failure: str = ""  # Why the state would be lost.
    ticket: int = 0


class WantProcesses(msgspec.Struct, frozen=True, tag=True):
    """Request the processes of this node, for the command `drill`."""

    ticket: int = 0


class ProcessesAre(msgspec.Struct, frozen=True, tag=True):
    """Living processes only, each watched by pidfd: no pid in here belongs to another process."""

    launchers: list[int]
    trainers: list[int]
    ticket: int = 0


class CutLinks(msgspec.Struct, frozen=True, tag=True):
    """A drill: end this keeper's links to all peers for so long."""

    seconds: float
    ticket: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request that succeeded."""

    text: str = ""
    ticket: int = 0


Message = (
    Hello | Welcome | Refused | Register | Registered | LauncherHello | LauncherNote | WantCard | CardIs | Membership
    | WantArena | ArenaGiven | Hold | Held | GiveBack
    | Adopted | Committed | Void | Complete | Protected | Voided | WantRestore | RestoreFrom | Loaded
    | Ending | Goodbye | Failed | WantOutcome | OutcomeIs
    | WantStatus | StatusIs | WantVerify | Verified | WantArenas | Release | Done
    | WantPlan | PlanIs | WantProcesses | ProcessesAre | CutLinks
)  # fmt: skip
