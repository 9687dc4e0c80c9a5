"""What a keeper knows: its trainers, their arenas, the incarnation, and what is to be done next.

The state of the core and nothing else. Those who change it are `members`, `arenas`, `snapshots` and
`restoring`; each says what is to be done by `do`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.arena.header import Grant, Ledger
from keepstep.errors import Error
from keepstep.keeper import events as e
from keepstep.keeper.coordinator import Coordinator
from keepstep.protocol import ArenaNeed, Refused, Register
from keepstep.recovery.inventory import Holding, Inventory
from keepstep.recovery.plan import Plan
from keepstep.types import Incarnation, Version

# Steps and incarnation numbers stay far below what their 64 bits hold.
MAX_STEP = 1 << 62
MAX_DAMAGED = 64
FREE, GRANTED, COMMITTED, SEALED, CORRUPT = "free", "granted", "committed", "sealed", "corrupt"
WAITING, FENCING, RESTORING, SERVING = "waiting", "fencing", "restoring", "serving"


@dataclass(frozen=True)
class Limits:
    """Deadlines of the core, in seconds."""

    lease_s: float = 600.0
    fence_s: float = 10.0
    orphan_s: float = 300.0
    sidecar: bool = False
    """started by an administrator before the job: it waits for its first trainer without a limit"""


@dataclass
class Slot:
    index: int
    state: str = FREE
    version: Version | None = None
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    size_bytes: int = 0
    sealed_at: float | None = None


@dataclass
class ArenaState:
    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    capacity: ArenaNeed
    slots: list[Slot]
    evidence: bool = False
    """a trainer that cannot be killed may still write into it: nothing new goes there"""


@dataclass
class Member:
    """A trainer of the current incarnation."""

    conn: e.Conn
    pid: int
    register: Register
    alive: bool = True
    loaded: bool = False
    finished: bool | None = None
    arena_id: str = ""

    @property
    def index(self) -> int:
        return self.register.local_index


@dataclass
class Opening:
    """An incarnation that waits for the dead, and the registrations that wait for it."""

    incarnation: Incarnation
    label: str
    deadline: float
    waiting: list[e.TrainerRegisters] = field(default_factory=list)


class Node:
    """One node of one run."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = WAITING
        self.incarnation = Incarnation(0, 0)
        self.label = ""
        self.members: dict[int, Member] = {}
        self.arenas: dict[str, ArenaState] = {}
        self.coordinator = Coordinator()
        self.opening: Opening | None = None
        self.launchers: set[int] = set()
        self.strangers: dict[int, Incarnation] = {}
        """living trainers by pid that this keeper knows only from the arenas it adopted"""
        self.zombies: set[int] = set()
        self.remembered: Version | None = None
        """the newest version the ledger calls complete, across incarnations"""
        self.damaged: list[str] = []
        self.decision: Plan | None = None
        self.verifying: set[tuple[str, int]] = set()
        self.restore_requests: list[e.RestoreWanted] = []
        self.loaded_requests: list[e.RankLoaded] = []
        self.early: dict[int, e.SnapshotCommitted | e.GrantVoid] = {}
        """what ranks said of a grant that this keeper has not taken up yet"""
        self.ledger_serial = 0
        self.launcher_reported = False
        """a launcher has given back what it held: from then on an empty inventory means that there is nothing"""
        self.lease_since: float | None = None
        self.orphaned_since: float | None = None
        self.last_grant: dict[int, Grant] = {}
        self.counters: dict[str, float] = {}
        self.problems: list[str] = []
        self.progress: dict[int, int] = {}
        """an input: the step of each rank's last `take`, refreshed by the runtime before `handle`"""
        self.now = 0.0
        self.effects: list[e.Effect] = []

    def member_of(self, conn: e.Conn) -> Member | None:
        return next((member for member in self.members.values() if member.conn == conn), None)

    def arena_of(self, index: int) -> ArenaState | None:
        """The arena that rank writes now: the newest one that is not evidence."""
        mine = [a for a in self.arenas.values() if a.local_index == index and not a.evidence]
        return max(mine, key=lambda a: a.generation, default=None)

    def all_loaded(self) -> bool:
        members = self.members.values()
        if not members:
            return False
        whole = len(self.members) == next(iter(members)).register.local_world_size
        return whole and all(m.alive and m.loaded and m.finished is None and m.arena_id for m in members)

    def inventory(self) -> Inventory:
        holdings = tuple(
            Holding(
                s.version, s.rank, s.world_size, a.local_index, s.local_world_size, a.arena_id, s.index, s.size_bytes
            )
            for a in self.arenas.values()
            for s in a.slots
            if s.state == SEALED and s.version is not None
        )
        return Inventory(holdings, self.remembered, tuple(self.damaged))

    def write_ledger(self) -> None:
        self.ledger_serial += 1
        self.do(e.WriteLedger(Ledger(self.incarnation, self.coordinator.base, self.remembered, self.ledger_serial)))

    def do(self, effect: e.Effect) -> None:
        self.effects.append(effect)

    def refuse(self, conn: e.Conn, ticket: int, error: Error) -> None:
        self.do(e.Send(conn, Refused(type(error).__name__, error.message, error.hint, ticket)))

    def count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems = [*self.problems[-19:], text]
        self.log("error", text)

    def log(self, level: str, text: str, **fields: object) -> None:
        self.do(e.Log(level, text, fields))
