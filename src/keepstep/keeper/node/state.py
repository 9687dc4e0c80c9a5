"""What a keeper knows: its trainers, their arenas, the incarnation, and what is to be done next.

The state of the core and nothing else. Those who change it are `members`, `arenas`, `snapshots`,
`restoring`, `protecting` and `following`; each says what is to be done by `do`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.arena.records import Grant, Ledger
from keepstep.control.messages import Committed, Loaded, Membership, NodeCard, Refused, Register, Void, WantRestore
from keepstep.errors import Error
from keepstep.keeper.coordinator.coordinator import Coordinator
from keepstep.keeper.coordinator.messages import (
    ExchangeProgress,
    Failure,
    Orders,
    ReplicaAudit,
    ReplicaAuditAnswer,
    RestoreOrder,
)
from keepstep.keeper.node.effects import Effect, Log, Send, WriteLedger
from keepstep.keeper.node.events import Conn, TrainerRegisters
from keepstep.keeper.node.grants import Grants
from keepstep.layout import SnapshotSize
from keepstep.recovery.inventory import Holding, Inventory, ParitySet, SetKey
from keepstep.types import Incarnation, SnapshotInfo, Version

# Steps and incarnation numbers stay far below what their 64 bits hold.
MAX_STEP = 1 << 62
MAX_DAMAGED = 64
FREE, GRANTED, COMMITTED, SEALED, CORRUPT = "free", "granted", "committed", "sealed", "corrupt"
WAITING, FENCING, RESTORING, SERVING = "waiting", "fencing", "restoring", "serving"


@dataclass(frozen=True)
class Limits:
    """Deadlines of the core, in seconds, and how much protection is wanted."""

    lease_s: float = 600.0
    fence_s: float = 10.0
    orphan_s: float = 300.0
    sidecar: bool = False
    """started by an administrator before the job: it waits for its first trainer without a limit"""
    losses: int = 1
    group_size: int = 8
    deadline_s: float = 30.0
    stall_s: float = 60.0
    inventory_s: float = 20.0
    dead_s: float = 3.0


@dataclass
class Slot:
    """A slot of an arena: who may write it, and what it holds.

    FREE ──grant──▶ GRANTED ──commit──▶ COMMITTED ──seal──▶ SEALED ──mark_corrupt──▶ CORRUPT
     ▲                 │                    │                 │
     └──────free───────┴────────────────────┴─────────────────┘       a sealed or corrupt slot may be granted again
    """

    index: int
    state: str = FREE
    version: Version | None = None  # set from COMMITTED on, and known before `info` is
    info: SnapshotInfo | None = None  # what the header says, once the keeper has read it
    sealed_at: float | None = None

    def grant(self) -> None:
        """The rank may write it now."""
        assert self.state in (FREE, SEALED, CORRUPT), self
        self._empty(GRANTED)

    def grant_again(self) -> None:
        """Its arena's grant record names it: the rank may be writing it, whatever its header says."""
        self._empty(GRANTED)

    def commit(self, version: Version) -> None:
        """The rank has finished writing it."""
        assert self.state == GRANTED, self
        self.state, self.version = COMMITTED, version

    def read_again(self) -> None:
        """Its writer is gone: it may have committed unreported, so it counts as committed until it was read."""
        assert self.state in (FREE, GRANTED), self
        assert self.version is None, self
        self.state = COMMITTED

    def seal(self, info: SnapshotInfo, now: float) -> None:
        """Its checksums are written."""
        assert self.state == COMMITTED, self
        assert self.version in (None, info.version), self
        self._fill(info, now)

    def fetched(self, info: SnapshotInfo, now: float) -> None:
        """A snapshot from elsewhere was written into it, and sealed."""
        assert self.state in (FREE, CORRUPT) or (self.state, self.version) == (SEALED, info.version), self
        self._fill(info, now)

    def mark_corrupt(self) -> None:
        """Its bytes no longer match their checksums."""
        assert self.state == SEALED, self
        self.state = CORRUPT

    def free(self) -> None:
        """Nothing in it is needed."""
        assert self.state in (GRANTED, COMMITTED, SEALED), self
        self._empty(FREE)

    def _fill(self, info: SnapshotInfo, now: float) -> None:
        self.state, self.version, self.info, self.sealed_at = SEALED, info.version, info, now

    def _empty(self, state: str) -> None:
        self.state, self.version, self.info = state, None, None


@dataclass
class ArenaState:
    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    capacity: SnapshotSize
    slots: list[Slot]
    evidence: bool = False
    """a trainer that cannot be killed may still write into it: nothing new goes there"""
    writer_pid: int = -1
    """of the living trainer that was writing it when it was adopted"""


@dataclass(frozen=True)
class GrantPage:
    """What lies in the grant page of an arena."""

    arena_id: str
    grant: Grant


@dataclass
class RegisteredTrainer:
    """A trainer of the current incarnation."""

    conn: Conn
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
class OpeningIncarnation:
    """An incarnation that waits for the dead, and the registrations that wait for it."""

    incarnation: Incarnation
    label: str
    deadline: float
    waiting: list[TrainerRegisters] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    """who of them has died since, by pid"""

    @property
    def wanted(self) -> bool:
        """One of those who wait for it lives."""
        return any(event.pid not in self.dead for event in self.waiting)


@dataclass(frozen=True)
class SnapshotPlace:
    """Where a rank's restored snapshot lies, verified."""

    arena_id: str
    slot: int
    size_bytes: int


class NodeState:
    """One node of one run."""

    def __init__(self, limits: Limits, card: NodeCard | None = None) -> None:
        self.limits = limits
        self.card = card or NodeCard("node", "", "", 0)
        self.state = WAITING
        self.incarnation = Incarnation(0, 0)
        self.label = ""
        self.members: dict[int, RegisteredTrainer] = {}
        self.arenas: dict[str, ArenaState] = {}
        self.opening: OpeningIncarnation | None = None
        self.launchers: set[int] = set()
        self.strangers: dict[int, Incarnation] = {}
        """living trainers by pid that this keeper knows only from the arenas it adopted"""
        self.zombies: set[int] = set()
        self.remembered: Version | None = None
        """the newest version the ledger calls complete, across incarnations"""
        self.damaged: list[str] = []
        self.early: dict[int, list[tuple[Conn, Committed | Void]]] = {}
        """what ranks said of grants that this keeper has not taken up yet"""
        self.ledger_serial = 0
        self.launcher_reported = False
        """a launcher has given back what it held, if anything: from then on this keeper has all that is left"""
        self.lease_since: float | None = None
        self.orphaned_since: float | None = None
        self.last_grant: dict[int, GrantPage] = {}
        self.counters: dict[str, float] = {}
        self.problems: list[str] = []
        self.progress: dict[int, int] = {}
        """an input: the step of each rank's last `take`, refreshed by the runtime before `handle`"""
        self.now = 0.0
        self.touched = True
        """this event may have changed what this node reports"""
        self.effects: list[Effect] = []
        self.said_last: list[Effect] = []
        """effects that come after all others of an event"""
        # Grants and orders
        self.grants = Grants()
        self.orders: Orders | None = None
        """the last ones of this incarnation"""
        self.orders_from_ledger = False
        self.kept = Orders(Incarnation(0, 0), 0, 0)
        """the last ones that say what is kept: those of a life that has not begun say nothing yet"""
        self.settled = 0
        self.job: Coordinator | None = None
        """this keeper coordinates the incarnation"""
        # Peers
        self.membership: Membership | None = None
        self.links: dict[str, bool] = {}
        self.down_at: dict[str, float] = {}
        """since when a link that was up is down"""
        self.cards: dict[str, NodeCard] = {}
        self.meet_at = 0.0
        self.report_number = 0
        self.said_at = -1e9
        self.said_key: object = None
        self.ordered: tuple[int, int, int] = (0, 0, 0)
        self.pace: tuple[int, float, float] = (-1, 0.0, 0.0)
        """progress, when it was seen, seconds per step"""
        # Restoring
        self.restore_requests: list[tuple[Conn, WantRestore]] = []
        self.loaded_requests: list[tuple[Conn, Loaded]] = []
        self.decision: RestoreOrder | None = None
        self.verifying: set[tuple[str, int]] = set()
        self.bringing: set[int] = set()
        """ranks whose bytes are being fetched or rebuilt"""
        self.places: dict[int, SnapshotPlace] = {}
        self.restored = 0
        self.failures: list[Failure] = []
        # Protecting
        self.sets: dict[SetKey, ParitySet] = {}
        self.exchange: ExchangeProgress | None = None
        self.exchange_began = 0.0
        self.exchange_s: float | None = None
        """how long this node's last finished exchange took"""
        self.audit: tuple[ReplicaAudit, ReplicaAuditAnswer] | None = None

    @property
    def retain(self) -> set[Version]:
        return self.kept.retain

    def member_of(self, conn: Conn) -> RegisteredTrainer | None:
        return next((member for member in self.members.values() if member.conn == conn), None)

    def rank_of(self, index: int) -> int:
        member = self.members.get(index)
        return member.register.rank if member is not None else -1

    def arena_of(self, index: int) -> ArenaState | None:
        """The arena that rank writes now: the newest one that is not evidence."""
        mine = [a for a in self.arenas.values() if a.local_index == index and not a.evidence]
        return max(mine, key=lambda a: a.generation, default=None)

    @property
    def largest_number(self) -> int:
        """Of all incarnations known here, also of those whose memory was given back too late to count."""
        numbers = [self.incarnation.number, self.opening.incarnation.number if self.opening is not None else 0]
        numbers += [s.version.incarnation.number for a in self.arenas.values() for s in a.slots if s.version]
        return max(numbers)

    def awaits_launcher(self, incarnation: Incarnation, trainers: list[Register]) -> bool:
        """This keeper may be a new one, and a launcher that holds all the memory has not given back the last of it."""
        holds = any(register.incarnation is not None and not register.no_holder for register in trainers)
        return holds and incarnation.number > 1 and not self.launcher_reported

    def whole(self) -> bool:
        """All local ranks of this incarnation have registered."""
        members = self.members.values()
        return bool(members) and len(members) == next(iter(members)).register.local_world_size

    def all_loaded(self) -> bool:
        members = self.members.values()
        return self.whole() and all(m.alive and m.loaded and m.finished is None and m.arena_id for m in members)

    def inventory(self) -> Inventory:
        holdings = tuple(
            Holding.of(s.info, local_index=a.local_index, arena_id=a.arena_id, slot=s.index)
            for a in self.arenas.values()
            for s in a.slots
            if s.state == SEALED and s.info is not None
        )
        sets = tuple(self.sets.values())
        return Inventory(holdings, self.remembered, tuple(self.damaged), sets, self.kept.protected)

    def write_ledger(self) -> None:
        self.ledger_serial += 1
        kept = self.kept
        by = kept.protected_by
        same = kept.incarnation == self.incarnation
        self.do(
            WriteLedger(
                Ledger(
                    incarnation=self.incarnation, base=kept.base, complete=self.remembered, serial=self.ledger_serial,
                    current=kept.complete, protected=kept.protected, target=kept.target,
                    protected_by=(by.incarnation.number, by.incarnation.nonce, by.attempt) if by else (0, 0, 0),
                    epoch=kept.epoch if same else 0, seq=kept.seq if same else 0, attempt=kept.attempt,
                    settled=self.settled,
                )
            )
        )  # fmt: skip

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def refuse(self, conn: Conn, ticket: int, error: Error) -> None:
        self.do(Send(conn, Refused(type(error).__name__, error.message, error.hint, ticket)))

    def count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems = [*self.problems[-19:], text]
        self.log("error", text)

    def log(self, level: str, text: str, **fields: object) -> None:
        self.do(Log(level, text, fields))
