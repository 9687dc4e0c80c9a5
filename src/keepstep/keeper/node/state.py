"""What a keeper knows of its node, in sections that each have one owner.

    trainers    who is registered, incarnations, the fence       trainers.py
    arenas      the memory of the ranks: slots and the ledger    arenas.py
    grants      what the ranks may write, and how far they are   grants.py
    restore     the plan of this incarnation, and its requests   restore.py
    protection  parity sets and the running exchange             protection.py
    orders      the coordinator and the peers                    orders.py

A module of this package assigns only to its own section; others read it, or call its owner. Small values
(`Slot`, `RegisteredTrainer`, `NodeGrant`) change only by their own methods. What is to be done is emitted as
effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.config import Config
from keepstep.control.messages import (
    EXITED,
    FINISHED,
    Failed,
    Loaded,
    Membership,
    NodeCard,
    Refused,
    Register,
    WantRestore,
)
from keepstep.errors import Error
from keepstep.keeper.coordinator.messages import ExchangeProgress, Failure, Orders, Report, RestoreOrder
from keepstep.keeper.coordinator.state import CoordinatorState, Deadlines
from keepstep.keeper.node.effects import Effect, Log, Send
from keepstep.keeper.node.events import Conn, TrainerRegisters
from keepstep.keeper.node.grants import NodeGrants
from keepstep.layout import SnapshotSize
from keepstep.parity.divergence import ReplicaAudit, ReplicaAuditAnswer
from keepstep.recovery.inventory import Holding, Inventory, ParitySet, SetKey
from keepstep.types import Incarnation, SnapshotInfo, Version

MAX_STEP = 1 << 62  # steps and incarnation numbers stay far below what their 64 bits hold
MAX_PROBLEMS = 20  # shown by `keepstep status`; the log has all of them

FREE, GRANTED, COMMITTED, SEALED, CORRUPT = "free", "granted", "committed", "sealed", "corrupt"
WAITING, FENCING, RESTORING, SERVING = "waiting", "fencing", "restoring", "serving"


class NodeState:
    """One node of one run: its sections, and the effects of the event that is being handled."""

    def __init__(
        self, config: Config, card: NodeCard | None = None, *, sidecar: bool = False, deadlines: Deadlines | None = None
    ) -> None:
        """`sidecar`: started by an administrator before the job; its lease does not run before the first trainer."""
        self.config, self.sidecar = config, sidecar
        self.deadlines = deadlines or Deadlines()
        self.card = card or NodeCard("node", "", "", 0)
        self.state = WAITING
        self.incarnation = Incarnation(0, 0)
        self.now = 0.0
        self.lease_since: float | None = None
        # An input: the step of each rank's last `take`, by local index, refreshed by the caller before `handle`.
        self.progress: dict[int, int] = {}
        # An input, refreshed likewise: arenas whose memory their trainers are still preparing.
        self.preparing: set[str] = set()
        # Sections
        self.trainers = NodeTrainers()
        self.arenas = NodeArenas()
        self.grants = NodeGrants()
        self.restore = NodeRestore()
        self.protection = NodeProtection()
        self.orders = NodeOrders()
        # Output
        self.counters: dict[str, float] = {}
        self.problems: list[str] = []
        self.effects: list[Effect] = []
        self.effects_last: list[Effect] = []

    def enter(self, state: str) -> None:
        self.state = state

    def set_incarnation(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    def begin_incarnation(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.progress.clear()

    @property
    def retain(self) -> set[Version]:
        """Versions whose slots and parity nobody may reuse."""
        return self.orders.active.retain

    @property
    def largest_number(self) -> int:
        """The largest incarnation number known here, including memory that was given back too late to be adopted."""
        opening = self.trainers.opening
        numbers = [self.incarnation.number, opening.incarnation.number if opening is not None else 0]
        numbers += [slot.version.incarnation.number for _, slot in self.arenas.slots() if slot.version]
        return max(numbers)

    def lease_left_s(self) -> float | None:
        return (
            None if self.lease_since is None else max(0.0, self.config.keeper.lease_s - (self.now - self.lease_since))
        )

    def all_loaded(self) -> bool:
        """Every rank of this node has registered, is alive, has its state and has an arena."""
        trainers = self.trainers.registered.values()
        return self.trainers.complete() and all(
            t.alive and t.loaded and t.finished is None and t.arena_id for t in trainers
        )

    def inventory(self) -> Inventory:
        holdings = tuple(
            Holding.of(slot.info, local_index=arena.local_index, arena_id=arena.arena_id, slot=slot.index)
            for arena, slot in self.arenas.slots()
            if slot.state == SEALED and slot.info is not None
        )
        sets = tuple(self.protection.sets.values())
        arenas, protected = self.arenas, self.orders.active.protected
        return Inventory(holdings, arenas.newest_complete, tuple(arenas.damaged), sets, protected)

    # Output

    def begin_event(self) -> None:
        self.effects, self.effects_last = [], []

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def emit_last(self, effect: Effect) -> None:
        self.effects_last.append(effect)

    def reply_error(self, conn: Conn, ticket: int, error: Error) -> None:
        self.emit(Send(conn, Refused(type(error).__name__, error.message, error.hint, ticket)))

    def count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems = [*self.problems[-MAX_PROBLEMS + 1 :], text]
        self.log("error", text)

    def log(self, level: str, text: str, **fields: object) -> None:
        self.emit(Log(level, text, fields))


# Trainers


@dataclass
class RegisteredTrainer:  # A trainer of the current incarnation
    conn: Conn
    pid: int
    register: Register
    alive: bool = True
    loaded: bool = False  # it has the restored state, or needed none
    finished: bool | None = None  # what its last message was; None: it has not ended
    arena_id: str = ""  # the arena that it writes
    failure: Failed | None = None  # the error that its program ended with, as far as it could say so

    @property
    def index(self) -> int:
        return self.register.local_index

    @property
    def rank(self) -> int:
        return self.register.rank

    @property
    def running(self) -> bool:
        return self.alive and self.finished is None

    def move_to(self, arena_id: str) -> None:
        self.arena_id = arena_id

    def set_loaded(self, loaded: bool) -> None:
        self.loaded = loaded

    def fail(self, failure: Failed) -> None:
        self.failure = self.failure or failure  # later ones follow from the first


@dataclass
class OpeningIncarnation:  # It waits until all older trainers are dead; registrations wait for it
    incarnation: Incarnation
    label: str
    deadline: float
    waiting: list[TrainerRegisters] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)  # pids of waiting trainers that have died since

    @property
    def wanted(self) -> bool:
        """One of those that wait for it is alive."""
        return any(event.pid not in self.dead for event in self.waiting)


@dataclass
class NodeTrainers:  # Who is registered, and what must die first. Written by `trainers`
    registered: dict[int, RegisteredTrainer] = field(default_factory=dict)  # by local index
    label: str = ""
    opening: OpeningIncarnation | None = None
    launchers: set[int] = field(default_factory=set)
    # A launcher has given back all it held: from then on this keeper has everything that is left.
    launcher_reported: bool = False
    unregistered: dict[int, Incarnation] = field(default_factory=dict)  # living writers of adopted arenas, by pid
    dying: set[int] = field(default_factory=set)  # pids that were killed and have not ended
    orphaned_since: float | None = None

    def by_conn(self, conn: Conn) -> RegisteredTrainer | None:
        return next((trainer for trainer in self.registered.values() if trainer.conn == conn), None)

    def by_rank(self, rank: int) -> RegisteredTrainer | None:
        return next((trainer for trainer in self.registered.values() if trainer.rank == rank), None)

    def rank_of(self, index: int) -> int:
        return self.registered[index].rank if index in self.registered else -1

    def complete(self) -> bool:
        trainers = self.registered.values()
        return bool(trainers) and len(trainers) == next(iter(trainers)).register.local_world_size

    def last_end(self) -> str:
        """How the incarnation ended, as far as its ranks could report it."""
        trainers = self.registered.values()
        if any(trainer.finished for trainer in trainers):
            return FINISHED
        exited = [trainer.failure is not None and trainer.failure.is_exit for trainer in trainers]
        return EXITED if exited and all(exited) else ""

    def awaits_launcher(self, incarnation: Incarnation, registers: list[Register]) -> bool:
        """Whether a launcher that holds memory of this node has still to give it back to this (new) keeper."""
        holds = any(register.incarnation is not None and not register.no_holder for register in registers)
        return holds and incarnation.number > 1 and not self.launcher_reported


# Arenas


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
    info: SnapshotInfo | None = None  # as in its header, once the keeper has read that
    sealed_at: float | None = None

    def grant(self) -> None:
        assert self.state in (FREE, SEALED, CORRUPT), self
        self._empty(GRANTED)

    def grant_again(self) -> None:
        """Its arena's grant record names it: the rank may be writing it, whatever its header holds."""
        self._empty(GRANTED)

    def commit(self, version: Version) -> None:
        assert self.state == GRANTED, self
        self.state, self.version = COMMITTED, version

    def read_again(self) -> None:
        """Its writer is gone: it may have committed unreported, so it counts as committed until it was read."""
        assert self.state in (FREE, GRANTED), self
        assert self.version is None, self
        self.state = COMMITTED

    def seal(self, info: SnapshotInfo, now: float) -> None:
        assert self.state == COMMITTED, self
        assert self.version in (None, info.version), self
        self._fill(info, now)

    def fetched(self, info: SnapshotInfo, now: float) -> None:
        """A snapshot from elsewhere was written into it, and sealed."""
        assert self.state in (FREE, CORRUPT) or (self.state, self.version) == (SEALED, info.version), self
        self._fill(info, now)

    def mark_corrupt(self) -> None:
        assert self.state == SEALED, self
        self.state = CORRUPT

    def free(self) -> None:
        assert self.state in (GRANTED, COMMITTED, SEALED), self
        self._empty(FREE)

    def _fill(self, info: SnapshotInfo, now: float) -> None:
        self.state, self.version, self.info, self.sealed_at = SEALED, info.version, info, now

    def _empty(self, state: str) -> None:
        self.state, self.version, self.info = state, None, None


@dataclass
class ArenaState:  # One rank's arena
    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    capacity: SnapshotSize
    slots: list[Slot]
    quarantined: bool = False  # a trainer that cannot be killed may still write into it: nothing new goes there
    writer_pid: int = -1  # of the living trainer that was writing it when it was adopted


@dataclass
class NodeArenas:  # The memory of the ranks. Written by `arenas`
    by_id: dict[str, ArenaState] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)  # what failed verification, one sentence each
    ledger_serial: int = 0  # of the ledger record that was written last, into every arena
    newest_complete: Version | None = None  # of all incarnations, as the ledger remembers it

    def slots(self) -> Iterator[tuple[ArenaState, Slot]]:
        return ((arena, slot) for arena in self.by_id.values() for slot in arena.slots)

    def slot(self, arena_id: str, index: int) -> Slot | None:
        arena = self.by_id.get(arena_id)
        return arena.slots[index] if arena is not None and 0 <= index < len(arena.slots) else None

    def of(self, index: int) -> ArenaState | None:
        """The newest arena of that rank that is not quarantined."""
        own = [a for a in self.by_id.values() if a.local_index == index and not a.quarantined]
        return max(own, key=lambda a: a.generation, default=None)

    def next_generation(self, index: int) -> int:
        return 1 + max((a.generation for a in self.by_id.values() if a.local_index == index), default=0)

    def any_committed(self) -> bool:
        return any(slot.state == COMMITTED for _, slot in self.slots())


# Restore, protection, orders


@dataclass(frozen=True)
class SnapshotPlace:  # The slot that holds a rank's restored snapshot
    arena_id: str
    slot: int
    size_bytes: int


@dataclass
class NodeRestore:  # What this node restores in this incarnation. Written by `restore`
    requests: list[tuple[Conn, WantRestore]] = field(default_factory=list)
    loaded_requests: list[tuple[Conn, Loaded]] = field(default_factory=list)
    order: RestoreOrder | None = None
    verifying: set[tuple[str, int]] = field(default_factory=set)  # (arena, slot)
    fetching: set[int] = field(default_factory=set)  # ranks whose snapshots are being fetched or rebuilt
    places: dict[int, SnapshotPlace] = field(default_factory=dict)  # by rank
    ready_number: int = 0  # the plan for which all snapshots are here and verified
    failures: list[Failure] = field(default_factory=list)
    ended: str = ""  # how the last incarnation that had its state ended: RestoreFrom.ended
    had_arenas: bool = False  # an earlier incarnation has left arenas, whatever they hold


@dataclass
class NodeProtection:  # Parity that this node holds and encodes. Written by `protection`
    sets: dict[SetKey, ParitySet] = field(default_factory=dict)
    exchange: ExchangeProgress | None = None
    exchange_started: float = 0.0
    exchange_s: float | None = None  # how long the last complete exchange took


@dataclass
class NodeOrders:  # The coordinator and the peers. Written by `orders`
    received: Orders | None = None  # the newest ones of this incarnation
    from_ledger: bool = False  # `received` was read from a ledger, which keeps only a part of the orders
    # The newest ones that retain something: orders of an incarnation that has not begun do not.
    active: Orders = field(default_factory=lambda: Orders(Incarnation(0, 0), 0, 0))
    coordinator: CoordinatorState | None = None  # where this keeper coordinates the incarnation
    # Peers
    membership: Membership | None = None
    links: dict[str, bool] = field(default_factory=dict)
    down_since: dict[str, float] = field(default_factory=dict)
    cards: dict[str, NodeCard] = field(default_factory=dict)
    peers_set_at: float = 0.0
    # Reports that arrived before this keeper became the coordinator: the newest one of each node in `cards`.
    early_reports: dict[str, Report] = field(default_factory=dict)
    # Reports and orders that were sent
    report_number: int = 0
    report_changed: bool = True  # this event may have changed what this node reports
    sent_at: float = -1e9
    sent_key: object = None
    sent_order: tuple[int, int, int] = (0, 0, 0)
    pace: tuple[int, float, float] = (-1, 0.0, 0.0)  # progress, when it was seen, seconds per step
    audit: tuple[ReplicaAudit, ReplicaAuditAnswer] | None = None

    def begin_incarnation(self) -> None:
        """Forget the orders of the last incarnation, except what they retain."""
        self.received, self.coordinator = None, None
