"""Types that every package shares: versions, what a version survives, and the status contract.

There is no behaviour here. Structures are frozen; those that cross the socket or are printed by
`keepstep status --json` are msgspec structs, whose fields are only ever added, never renamed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec


class Survives(enum.IntEnum):
    """The failure that a version survives."""

    NOTHING = 0
    PROCESS = 1
    NODE = 2
    CLUSTER = 3


class Source(enum.Enum):
    """Where restored bytes came from."""

    MEMORY = "memory"
    PARITY = "parity"
    DISK = "disk"


@runtime_checkable
class Stateful(Protocol):
    """Any object with `state_dict` and `load_state_dict`, as in torch.distributed.checkpoint."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Incarnation(msgspec.Struct, frozen=True, order=True):
    """One start of the job, until the next restart.

    Numbers only grow. The nonce distinguishes two incarnations that chose the same number in two halves
    of a split cluster, so that their versions never mix.
    """

    number: int
    nonce: int

    def __str__(self) -> str:
        return f"{self.number}:{self.nonce:016x}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        number, _, nonce = text.partition(":")
        return cls(int(number), int(nonce, 16))


class Version(msgspec.Struct, frozen=True, order=True):
    """One consistent state of the whole job: ordered by incarnation, then by step."""

    incarnation: Incarnation
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation.number})"


class SnapshotInfo(msgspec.Struct, frozen=True):
    """Owner and size of a snapshot: its version, and the rank and world that saved it."""

    version: Version
    rank: int
    world_size: int
    local_world_size: int
    size_bytes: int


class SlotStatus(msgspec.Struct, frozen=True):
    """State of one slot of a rank's arena."""

    index: int
    state: str
    """free, granted, committed, sealed or corrupt"""
    step: int | None = None
    incarnation: int | None = None
    size_bytes: int = 0


class RankStatus(msgspec.Struct, frozen=True):
    """State of one rank: a line of `keepstep status`."""

    rank: int
    local_index: int
    pid: int
    alive: bool
    progress: int | None
    """the step of the last `take`, captured or not"""
    step: int | None
    """the newest step of this rank that is sealed"""
    age_s: float | None
    """seconds since that snapshot was sealed"""
    survives: str
    """nothing, process, node or cluster: of this rank's newest complete version"""
    arena_bytes: int
    slots: list[SlotStatus]


class PeerStatus(msgspec.Struct, frozen=True):
    """A member of this node's group."""

    node_id: str
    position: int
    up: bool


class KeeperStatus(msgspec.Struct, frozen=True):
    """State of the keeper's own process."""

    pid: int
    instance: str
    version: str
    uptime_s: float
    state: str
    """waiting (for trainers), fencing, restoring, serving, leased or releasing"""
    launcher_alive: bool
    lease_left_s: float | None
    holders: int
    """processes besides the keeper that hold every memfd of this node"""


class Status(msgspec.Struct, frozen=True):
    """What `Snapshotter.status()` returns and `keepstep status --json` prints; `schema` grows with it."""

    run_id: str
    node_id: str
    keeper: KeeperStatus
    incarnation: int
    step: int | None
    """the newest version complete on all ranks, or None"""
    age_s: float | None
    survives: str
    losses_covered: int
    exposed: bool
    base_step: int | None
    ranks: list[RankStatus]
    memory_bytes: int
    counters: dict[str, float]
    problems: list[str]
    """sentences that a person should read; empty when all is well"""
    schema: int = 2
    protected_step: int | None = None
    """the newest version that survives the loss of a node"""
    target_step: int | None = None
    """the version that is being protected now"""
    lag_steps: int | None = None
    """steps that the loss of a node costs beyond those that the loss of a process costs"""
    num_nodes: int = 1
    coordinator: str = ""
    group: list[PeerStatus] = []
    """the nodes that protect each other, by position; empty: this job has one node"""
    parity_bytes: int = 0
    exchange_bytes_s: float = 0.0
    min_node_period_s: float | None = None
    """seconds of this node's last exchange: versions cannot be protected more often"""
    slots: int = 0
    """snapshots that the memory of each rank holds; 0 before it is there"""
    slots_reason: str = ""
    """why so many: the setting, or what `auto` found"""
    security: str = ""
    """what keeps others out: `open store` (no secret file), `secret file`, and whether there is TLS"""


# Why a `take` captured nothing. The order is that of the counts in the arena: only ever append, at most 8.
SEALING = "sealing"  # The last snapshot is still being sealed.
COPYING = "copying"  # The last snapshot is still being copied.
LATER_STEP = "later_step"  # The next snapshot was granted at a later step.
NO_GRANT = "no_grant"  # The keeper waits for other ranks.
NO_KEEPER = "no_keeper"  # There is no keeper.
NO_MEMORY = "no_memory"  # The arena is being made or replaced.
FAILED = "failed"  # This rank could not capture: the log says why.
SKIP_KINDS = (SEALING, COPYING, LATER_STEP, NO_GRANT, NO_KEEPER, NO_MEMORY, FAILED)


@dataclass(frozen=True)
class TakeCounts:
    """How the takes of one trainer ended. Steps that `every` leaves out are not counted."""

    asked: int = 0
    waited: int = 0  # takes that waited while the device worked
    waited_us: int = 0
    skipped: tuple[int, ...] = (0,) * len(SKIP_KINDS)  # by SKIP_KINDS
