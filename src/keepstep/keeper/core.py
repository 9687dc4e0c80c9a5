"""What the keeper knows and decides. Pure: no clock, socket, file or thread; `handle` returns effects.

The life of an incarnation:

    waiting ──register──▶ fencing ──old trainers dead──▶ restoring ──decided──▶ serving
                             ▲                         (seal what was committed,      │
                             └────────── a trainer of the next round registers ◀──────┘
                                                        plan, verify, else re-plan)

Rules (numbers of docs/protocol.md): an incarnation opens only when every trainer of older ones is dead
(10); a committed slot found after a crash is sealed before anything is decided (8); what to restore is
decided once per incarnation, and only failed verification of a version's own bytes counts against it
(12, 16); the lease runs only when neither launcher nor trainer is left (42).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keepstep.arena.header import Grant, Ledger
from keepstep.arena.slots import MAX_SLOTS
from keepstep.errors import Error, IntegrityError, KeeperError, RecoveryError
from keepstep.keeper import events as e
from keepstep.keeper.coordinator import Coordinator, OpenGrant
from keepstep.protocol import ArenaGiven, ArenaNeed, Complete, Done, Refused, Register, Registered, RestoreFrom, Voided
from keepstep.recovery.inventory import Holding, Inventory
from keepstep.recovery.plan import Plan, plan
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


class Core:
    """One node of one run. `handle` is the only way in."""

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
        self._effects: list[e.Effect] = []

    def handle(self, event: e.Event, now: float) -> list[e.Effect]:
        """Take in one event; returns what is to be done, in order."""
        self.now = max(now, self.now)
        self._effects = []
        _DISPATCH[type(event)](self, event)
        self._watch_lease()
        return self._effects

    # Membership and fencing

    def _register(self, event: e.TrainerRegisters) -> None:
        problem = self._registration_problem(event)
        if problem:
            self._refuse(event.conn, event.register.ticket, problem)
            return
        if event.register.launcher_pid:
            self.launchers.add(event.register.launcher_pid)
        wanted = self._incarnation_of(event)
        if self.opening is not None and wanted == self.opening.incarnation:
            self.opening.waiting.append(event)
        elif wanted == self.incarnation:
            self._join(event)
        elif event.register.rejoin and self.incarnation.number == 0:
            # This keeper came back with no ledger: the trainers know better.
            self.incarnation, self.label, self.state = wanted, event.register.label, SERVING
            self._join(event)
        else:
            self._open(wanted, event)

    def _registration_problem(self, event: e.TrainerRegisters) -> Error | None:
        register = event.register
        if not event.alive:
            return KeeperError("the registering process is already dead")
        if not 0 <= register.local_index < register.local_world_size <= register.world_size:
            return KeeperError(f"local rank {register.local_index} of {register.local_world_size} makes no sense")
        if not 0 <= register.rank < register.world_size:
            return KeeperError(f"rank {register.rank} of {register.world_size} makes no sense")
        if not (register.every >= 1 and 2 <= register.slots <= MAX_SLOTS and -1 <= register.progress < MAX_STEP):
            return KeeperError(f"every={register.every}, slots={register.slots}, progress={register.progress}?")
        newest = self.opening.incarnation if self.opening else self.incarnation
        wanted = register.incarnation
        if wanted is not None and not (1 <= wanted.number < MAX_STEP and 0 <= wanted.nonce < 1 << 64):
            return KeeperError(f"incarnation {wanted} makes no sense")
        if wanted is not None and wanted != newest and wanted.number <= newest.number:
            return KeeperError(
                f"incarnation {wanted.number} is over, this node is at {newest.number}",
                hint="this trainer belongs to an older round and should end",
            )
        known = self.members.get(register.local_index)
        if wanted == self.incarnation and self.opening is None and known is not None and known.pid != event.pid:
            return KeeperError(
                f"local rank {register.local_index} of incarnation {wanted.number} is, or was, process {known.pid}",
                hint="a trainer that died is replaced in a new incarnation, with all others",
            )
        rival = self._rival(event)
        if rival is not None:
            return KeeperError(
                f"local rank {register.local_index} of this run is taken by process {rival.pid}, whose launcher lives",
                hint="give the new job a run id of its own, or end the old one",
            )
        others = [m for m in self.members.values() if m.index != register.local_index and self.opening is None]
        if wanted == self.incarnation and others:
            first = others[0].register
            for name in ("world_size", "local_world_size", "every", "slots"):
                if getattr(first, name) != getattr(register, name):
                    return KeeperError(
                        f"rank {register.rank} has {name}={getattr(register, name)}, "
                        f"rank {first.rank} has {getattr(first, name)}",
                        hint="all ranks of a job need the same settings",
                    )
        return None

    def _rival(self, event: e.TrainerRegisters) -> Member | None:
        """A living trainer in the same place, under another living launcher: two jobs with one run id."""
        known = self.members.get(event.register.local_index)
        if known is None or not known.alive or known.finished is not None or known.pid == event.pid:
            return None
        launcher = known.register.launcher_pid
        return known if launcher in self.launchers and launcher != event.register.launcher_pid else None

    def _incarnation_of(self, event: e.TrainerRegisters) -> Incarnation:
        register = event.register
        if register.incarnation is not None:
            return register.incarnation
        if self.opening is not None and self.opening.label == register.label:
            if all(w.register.local_index != register.local_index for w in self.opening.waiting):
                return self.opening.incarnation
        elif self.opening is None and self.label == register.label and self.incarnation.number:
            fresh = all(m.alive and m.finished is None for m in self.members.values())
            if fresh and register.local_index not in self.members:
                return self.incarnation
        largest = self.opening.incarnation.number if self.opening else self.incarnation.number
        return Incarnation(largest + 1, event.nonce)

    def _open(self, incarnation: Incarnation, event: e.TrainerRegisters) -> None:
        """Begin the fence: nothing of the new incarnation happens before the old trainers are dead."""
        stale = self.opening.waiting if self.opening else []
        for waiting in stale:
            self._refuse(waiting.conn, waiting.register.ticket, KeeperError("a newer incarnation has begun"))
        self.opening = Opening(incarnation, event.register.label, self.now + self.limits.fence_s, [event])
        self.state = FENCING
        for member in self.members.values():
            if member.alive and member.finished is None and member.pid != event.pid:
                self.zombies.add(member.pid)
        for pid in sorted(self.zombies):
            self._do(e.Kill(pid, f"incarnation {incarnation.number} begins"))
        self._log("info", "incarnation opens", number=incarnation.number, fenced=sorted(self.zombies))
        self._try_open()

    def _try_open(self) -> None:
        if self.opening is None:
            return
        if self.zombies and self.now < self.opening.deadline:
            return
        if self.zombies:
            self._abandon_arenas()
        opening, self.opening = self.opening, None
        self.incarnation, self.label = opening.incarnation, opening.label
        for request in self.restore_requests:
            self._refuse(request.conn, request.ticket, KeeperError("a newer incarnation has begun"))
        self.members, self.restore_requests, self.loaded_requests = {}, [], []
        self.coordinator.begin(self.coordinator.complete)
        self.decision, self.state = None, RESTORING
        self.verifying.clear()
        self.last_grant.clear()
        self.early.clear()
        self._reclaim_slots()
        for event in opening.waiting:
            self._register(event)
        self._decide()

    def _abandon_arenas(self) -> None:
        stuck = {member.index for member in self.members.values() if member.pid in self.zombies}
        for arena in self.arenas.values():
            if arena.local_index in stuck:
                arena.evidence = True
        self._problem(f"trainers {sorted(self.zombies)} could not be killed: their ranks get new arenas")
        self.zombies.clear()

    def _reclaim_slots(self) -> None:
        """Granted and half-written slots are nobody's any more. Committed ones are sealed before a decision."""
        for arena in self.arenas.values():
            for slot in arena.slots:
                if slot.state in (GRANTED, FREE):
                    # Look again: its writer may have committed without a word, or not have begun.
                    assert slot.version is None
                    self._do(e.SealSlot(arena.arena_id, slot.index, None, self.remembered))
                    slot.state = COMMITTED

    def _join(self, event: e.TrainerRegisters) -> None:
        register = event.register
        member = Member(event.conn, event.pid, register)
        known = self.members.get(register.local_index)
        if known is not None and known.pid == event.pid:
            member.loaded, member.arena_id = known.loaded, known.arena_id
        member.loaded = member.loaded or register.rejoin
        self.members[register.local_index] = member
        self.coordinator.every, self.coordinator.num_slots = register.every, register.slots
        arena = self._arena_of(register.local_index)
        if register.rejoin and arena is not None:
            member.arena_id = arena.arena_id
        self._count("registrations")
        self._do(e.Send(event.conn, Registered(self.incarnation, register.ticket)))
        if register.rejoin:
            self.state = SERVING
            self._advance()
        elif self.state == WAITING:
            # The keeper died while the job was restoring: decide again, from what was given back.
            self.state = RESTORING
            self._decide()

    def _resume(self) -> None:
        """After the keeper's own death, once all ranks are back: take up the grant that stands in the arenas."""
        standing = {i: grant for i, grant in self.last_grant.items() if grant.incarnation == self.incarnation}
        latest = max(standing.values(), key=lambda grant: grant.serial, default=None)
        if latest is not None and latest.serial > self.coordinator.serial:
            self.coordinator.serial = latest.serial
            if self.coordinator.complete is not None and self.coordinator.complete.incarnation == self.incarnation:
                self.coordinator.base = None
            self._take_up({i: grant for i, grant in standing.items() if grant.serial == latest.serial}, latest)
            self._write_ledger()
        words, self.early = self.early, {}
        for word in words.values():
            _DISPATCH[type(word)](self, word)

    def _take_up(self, standing: dict[int, Grant], latest: Grant) -> None:
        """Whoever saw the grant may be writing under it: no slot in it is given out again before it is resolved."""
        grant = OpenGrant(latest.serial, latest.step, {})
        for index, member in self.members.items():
            own = standing.get(index)
            arena = self.arenas.get(member.arena_id)
            if own is None or arena is None or not 0 <= own.slot < len(arena.slots):
                grant.void = (index, "the keeper died before it had granted this to all ranks")
                continue
            grant.slots[index] = own.slot
            slot = arena.slots[own.slot]
            current = slot.version is not None and slot.version.incarnation == self.incarnation
            fresh = current and slot.version is not None and slot.version.step >= latest.step
            if fresh and slot.state in (COMMITTED, SEALED):
                assert slot.version is not None
                grant.committed[index] = slot.version
                if slot.state == SEALED:
                    grant.sealed.add(index)
            else:
                slot.state, slot.version = GRANTED, None
        if grant.slots:
            self.coordinator.open.append(grant)

    def _too_early(self, member: Member, event: e.SnapshotCommitted | e.GrantVoid) -> bool:
        """A rank that came back first may speak of a grant that is taken up only when all are back: keep its word."""
        own = self.last_grant.get(member.index)
        if own is None or own.incarnation != self.incarnation or own.serial <= self.coordinator.serial:
            return False
        self.early[member.index] = event
        return True

    def _member_of(self, conn: e.Conn) -> Member | None:
        return next((member for member in self.members.values() if member.conn == conn), None)

    def _launcher_seen(self, event: e.LauncherSeen) -> None:
        self.launchers.add(event.pid)
        self.launcher_reported = True
        self._decide()

    def _died(self, event: e.ProcessDied) -> None:
        self.launchers.discard(event.pid)
        self.zombies.discard(event.pid)
        for member in self.members.values():
            if member.pid == event.pid and member.alive:
                member.alive = False
                self._count("trainer_deaths", 0 if member.finished else 1)
                self._log("info", "trainer ended", rank=member.register.rank, pid=member.pid)
                self.coordinator.forget(member.index)
                self._fail_loading(_ended_meanwhile(member.register.rank))
        self._try_open()
        self._advance()

    def _fail_loading(self, error: Error) -> None:
        for request in self.loaded_requests:
            self._refuse(request.conn, request.ticket, error)
        self.loaded_requests = []

    def _leaves(self, event: e.TrainerLeaves) -> None:
        member = self._member_of(event.conn)
        if member is None:
            return
        member.finished = event.finished
        self.coordinator.forget(member.index)
        whole = len(self.members) == member.register.local_world_size
        if whole and all(m.finished for m in self.members.values()) and self.opening is None:
            self._do(e.End("training finished"))

    # Arenas

    def _arena_of(self, index: int) -> ArenaState | None:
        """The arena that rank writes now: the newest one that is not evidence."""
        mine = [a for a in self.arenas.values() if a.local_index == index and not a.evidence]
        return max(mine, key=lambda a: a.generation, default=None)

    def _arena_wanted(self, event: e.ArenaWanted) -> None:
        member = self._member_of(event.conn)
        if member is None:
            self._refuse(event.conn, event.ticket, KeeperError("register first"))
            return
        arena = self._arena_of(member.index)
        if arena is not None and len(arena.slots) == event.slots and _fits(event.need, arena.capacity):
            self._move_to(member, arena.arena_id)
            given = ArenaGiven(arena.arena_id, arena.size_bytes, False, event.ticket)
            self._do(e.Send(event.conn, given, arena.arena_id))
            self._advance()
            return
        generation = 1 + max((a.generation for a in self.arenas.values() if a.local_index == member.index), default=0)
        self._do(e.CreateArena(event, member.index, generation))

    def _arena_added(self, event: e.ArenaAdded) -> None:
        slots = [
            Slot(
                s.index, s.state, s.version, s.rank, s.world_size, s.local_world_size, s.size_bytes, self.now - s.age_s
            )
            for s in event.slots
        ]
        self.arenas[event.arena_id] = ArenaState(
            event.arena_id, event.local_index, event.generation, event.size_bytes, event.capacity, slots
        )
        member = self.members.get(event.local_index)
        if member is not None and event.ledger is None:
            self._move_to(member, event.arena_id)
            self._write_ledger()
        self._adopt_ledger(event)
        if event.grant is not None:
            known = self.last_grant.get(event.local_index)
            if known is None or (known.incarnation, known.serial) < (event.grant.incarnation, event.grant.serial):
                self.last_grant[event.local_index] = event.grant
        for slot in slots:
            if slot.state == COMMITTED and slot.version is not None:
                self._do(e.SealSlot(event.arena_id, slot.index, slot.version, self.remembered))
        self._advance()

    def _arena_refused(self, event: e.ArenaRefused) -> None:
        text = f"arena {event.arena_id} was refused: {event.problem}"
        if text not in self.damaged and len(self.damaged) < MAX_DAMAGED:
            self.damaged.append(text)
        self._problem(text)

    def _move_to(self, member: Member, arena_id: str) -> None:
        """The rank writes another arena from now on: a grant that lies in the old one will not be seen any more."""
        if member.arena_id not in ("", arena_id):
            self.coordinator.withdraw(member.index, "its arena was replaced by a larger one")
        member.arena_id = arena_id

    def _adopt_ledger(self, event: e.ArenaAdded) -> None:
        """Take over what the keeper before knew. Numbers only grow: any record may be the newest that is left."""
        ledger = event.ledger
        newer = ledger is not None and ledger.serial > self.ledger_serial
        if ledger is not None:
            self.ledger_serial = max(self.ledger_serial, ledger.serial)
            if ledger.complete is not None:
                self.remembered = max(self.remembered or ledger.complete, ledger.complete)
        if self.members:
            return  # what is given back late changes nothing for a life that has begun
        seen = [slot.version.incarnation for slot in event.slots if slot.version is not None]
        seen += [record.incarnation for record in (ledger, event.grant) if record is not None]
        self.incarnation = max([self.incarnation, *seen])
        if newer and ledger is not None:
            self.coordinator.complete, self.coordinator.base = ledger.complete, ledger.base

    def _drop_old_arenas(self) -> None:
        """An arena that was replaced goes when none of its versions is needed any more."""
        retain = self.coordinator.retain
        for arena in list(self.arenas.values()):
            current = self._arena_of(arena.local_index)
            replaced = arena.evidence or (current is not None and current.arena_id != arena.arena_id)
            busy = any(s.version in retain or s.state in (GRANTED, COMMITTED) for s in arena.slots)
            if replaced and not busy:
                del self.arenas[arena.arena_id]
                self._do(e.DropArena(arena.arena_id, "replaced by a larger one"))

    # Snapshots

    def _committed(self, event: e.SnapshotCommitted) -> None:
        member = self._member_of(event.conn)
        arena = self.arenas.get(event.arena_id)
        if member is None or arena is None or not 0 <= event.slot < len(arena.slots):
            return
        if arena.local_index != member.index or event.version.incarnation != self.incarnation:
            self._problem(f"rank {member.register.rank} committed {event.version}, which is not its own to commit")
            return
        slot = arena.slots[event.slot]
        if self._too_early(member, event):
            return
        if slot.state == SEALED and slot.version == event.version:  # said again after the keeper came back
            if self.coordinator.complete is not None and self.coordinator.complete >= event.version:
                self._do(e.Send(event.conn, Complete(event.version)))
            return
        if slot.state == COMMITTED and slot.version == event.version:
            self.coordinator.commit(member.index, event.slot, event.version)
        elif slot.state == GRANTED and self.coordinator.commit(member.index, event.slot, event.version):
            slot.state, slot.version = COMMITTED, event.version
            self._do(e.SealSlot(event.arena_id, event.slot, event.version, None))
        elif member.alive and slot.state == FREE:
            self._problem(f"rank {member.register.rank} committed slot {event.slot} that it was not granted")
        self._advance()

    def _void(self, event: e.GrantVoid) -> None:
        member = self._member_of(event.conn)
        if member is None:
            return
        if self._too_early(member, event):
            return
        grant = self.coordinator.refuse(member.index, event.version.step, event.reason)
        if grant is not None:
            self._count("voids")
            self._log("warning", "grant void", rank=member.register.rank, step=event.version.step, reason=event.reason)
        self._advance()

    def _sealed(self, event: e.SlotSealed) -> None:
        arena = self.arenas.get(event.arena_id)
        if arena is None or arena.slots[event.slot].state != COMMITTED:
            return
        slot = arena.slots[event.slot]
        if slot.version not in (None, event.version):
            return  # of a version that is not there any more
        if event.problem:
            slot.state, slot.version = FREE, None
            self.coordinator.fail_seal(arena.local_index, event.slot, event.problem)
        else:
            slot.state, slot.version, slot.sealed_at = SEALED, event.version, self.now
            slot.rank, slot.world_size = event.rank, event.world_size
            slot.local_world_size, slot.size_bytes = event.local_world_size, event.size_bytes
            grant = self.coordinator.find(arena.local_index, event.slot)
            if grant is not None and grant.committed.get(arena.local_index) == event.version:
                grant.sealed.add(arena.local_index)
            self._count("sealed_bytes", event.size_bytes)
        self._decide()
        self._advance()

    def _advance(self) -> None:
        """Settle what is over, then grant what may be granted, then tell; in this order, so that a trainer
        that hears of a complete version finds its next grant in place."""
        ready = self.state == SERVING and self.opening is None and self._all_loaded()
        if ready:
            self._resume()
        over = self.coordinator.settle()
        for grant, version in over:
            for index, slot_index in grant.slots.items():
                self._free(index, slot_index, keep=version)
        if over:
            if any(version is not None for _, version in over):
                assert self.coordinator.complete is not None
                self.remembered = max(self.remembered or self.coordinator.complete, self.coordinator.complete)
                self.damaged.clear()  # nothing will fall back behind this version any more
            self._write_ledger()
            self._drop_old_arenas()
        if ready:
            self.coordinator.members = set(self.members)
            self._grant()
            for request in self.loaded_requests:
                self._do(e.Send(request.conn, Done(ticket=request.ticket)))
            self.loaded_requests = []
        for grant, version in over:
            self._tell(grant, version)

    def _free(self, index: int, slot_index: int, *, keep: Version | None) -> None:
        for arena in self.arenas.values():
            if arena.local_index != index or slot_index >= len(arena.slots):
                continue
            slot = arena.slots[slot_index]
            member = self.members.get(index)
            if slot.state == GRANTED and not (member and member.alive):
                continue  # its writer may not have begun: the next incarnation looks at what the slot still holds
            if slot.state == GRANTED or (keep is None and slot.state == SEALED and slot.version not in self._kept()):
                slot.state, slot.version = FREE, None

    def _kept(self) -> set[Version]:
        return self.coordinator.retain

    def _tell(self, grant: OpenGrant, version: Version | None) -> None:
        for index in grant.slots:
            member = self.members.get(index)
            if member is None or not member.alive:
                continue
            if version is not None:
                self._do(e.Send(member.conn, Complete(version)))
            elif index in grant.committed:
                assert grant.void is not None
                by, reason = grant.void
                rank = self.members[by].register.rank if by in self.members else -1
                self._do(e.Send(member.conn, Voided(grant.committed[index], rank, reason)))
        self._count("complete_versions" if version is not None else "void_versions")

    def _grant(self) -> None:
        if self.coordinator.why_no_grant():
            return
        slots: dict[int, int] = {}
        for index, member in self.members.items():
            slot = self._free_slot(member)
            if slot is None:
                return
            slots[index] = slot.index
        progress = max((self.progress.get(index, -1) for index in self.members), default=-1)
        opened = self.coordinator.grant(progress, slots)
        for index, slot_index in slots.items():
            member = self.members[index]
            slot = self.arenas[member.arena_id].slots[slot_index]
            slot.state, slot.version = GRANTED, None
            grant = Grant(self.incarnation, opened.step, opened.serial, slot_index)
            self.last_grant[index] = grant
            self._do(e.WriteGrant(member.arena_id, grant))

    def granted(self, index: int) -> Grant | None:
        """The grant that this rank may use now: what must stand in its arena."""
        latest = self.coordinator.open[-1] if self.coordinator.open else None
        own = self.last_grant.get(index)
        if latest is None or own is None or own.serial != latest.serial or latest.resolved_for(index):
            return None
        return own

    def _free_slot(self, member: Member) -> Slot | None:
        arena = self.arenas.get(member.arena_id)
        if arena is None or arena.evidence:
            return None
        kept = self.coordinator.retain
        named = {grant.slots.get(member.index) for grant in self.coordinator.open}
        order = {FREE: 0, CORRUPT: 1, SEALED: 2}
        usable = [
            slot
            for slot in arena.slots
            if slot.state in order and slot.index not in named and not (slot.state == SEALED and slot.version in kept)
        ]
        oldest = Version(Incarnation(0, 0), -1)
        return min(usable, key=lambda slot: (order[slot.state], slot.version or oldest), default=None)

    def _all_loaded(self) -> bool:
        members = self.members.values()
        if not members:
            return False
        whole = len(self.members) == next(iter(members)).register.local_world_size
        return whole and all(m.alive and m.loaded and m.finished is None and m.arena_id for m in members)

    # Restoring

    def _restore_wanted(self, event: e.RestoreWanted) -> None:
        if self._member_of(event.conn) is None:
            self._refuse(event.conn, event.ticket, KeeperError("register first"))
            return
        self.restore_requests.append(event)
        self._decide()

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

    def _decide(self) -> None:
        """Seal, then plan, then verify what the plan needs; again without what fails; then answer."""
        if self.state != RESTORING:
            self._answer()
            return
        if self.verifying or any(s.state == COMMITTED for a in self.arenas.values() for s in a.slots):
            return
        if self._launcher_missing():
            return
        if self.decision is None:
            self.decision = plan(self.inventory())
            for piece in self.decision.pieces:
                self.verifying.add((piece.arena_id, piece.slot))
                self._do(e.VerifySlot(piece.arena_id, piece.slot, piece.version))
            if self.verifying:
                return
        self.state = SERVING
        version = self.decision.version
        self.coordinator.base = self.coordinator.complete = version
        if version is not None:
            self.remembered = max(self.remembered or version, version)
        self._write_ledger()
        self._log("info", "restore decided", plan=list(self.decision.reasons), failure=self.decision.failure)
        self._answer()
        self._advance()

    def _launcher_missing(self) -> bool:
        """An empty keeper in a later incarnation: its launcher may hold what it lost, so wait for its word."""
        agreed = any(m.register.incarnation is not None for m in self.members.values())
        return agreed and not self.arenas and self.incarnation.number > 1 and not self.launcher_reported

    def _verified(self, event: e.SlotVerified) -> None:
        key = (event.arena_id, event.slot)
        arena = self.arenas.get(event.arena_id)
        if event.problem and arena is not None:
            slot = arena.slots[event.slot]
            if slot.version == event.version and slot.state == SEALED:
                slot.state = CORRUPT
                text = f"local rank {arena.local_index}, {event.version}: {event.problem}"
                self.damaged.append(text)
                self._count("corrupt_slots")
                self._problem(text)
                if self.coordinator.complete == event.version:
                    self.coordinator.complete = plan(self.inventory()).version
        if key in self.verifying:
            self.verifying.discard(key)
            if event.problem:
                self.decision = None  # plan again without it, once the others have answered
            self._decide()

    def _answer(self) -> None:
        if self.state != SERVING:
            return
        requests, self.restore_requests = self.restore_requests, []
        for request in requests:
            member = self._member_of(request.conn)
            if member is None:
                continue
            answer = self._answer_for(member, request.ticket)
            if isinstance(answer, Error):
                self._refuse(request.conn, request.ticket, answer)
            else:
                self._do(e.Send(request.conn, answer, answer.arena_id))

    def _answer_for(self, member: Member, ticket: int) -> RestoreFrom | Error:
        decision = self.decision
        if decision is None:  # this keeper took over a job that was training already
            return RecoveryError("the training has begun", hint="call restore() once, before the first take()")
        if decision.failure:
            kind = IntegrityError if self.damaged else RecoveryError
            return kind(decision.failure, hint="keepstep inspect shows what is held; keepstep release gives it up")
        if decision.version is None:
            return RestoreFrom(None, "", 0, 0, list(decision.reasons), ticket)
        register = member.register
        piece = next((p for p in decision.pieces if p.local_index == member.index), None)
        first = decision.pieces[0]
        if (
            piece is None
            or (piece.rank, piece.world_size) != (register.rank, register.world_size)
            or first.local_world_size != register.local_world_size
        ):
            return RecoveryError(
                f"{decision.version} was saved by {first.local_world_size} local ranks of {first.world_size}, "
                f"this job has {register.local_world_size} of {register.world_size}",
                hint="start with the same number of ranks, or give the state up with keepstep release",
            )
        if decision.version not in self.coordinator.retain:
            return RecoveryError(
                f"{decision.version} is gone: newer versions have taken its place",
                hint="call restore() once, before the first take()",
            )
        return RestoreFrom(
            decision.version, piece.arena_id, piece.slot, piece.size_bytes, list(decision.reasons), ticket
        )

    def _loaded(self, event: e.RankLoaded) -> None:
        member = self._member_of(event.conn)
        if member is None:
            self._refuse(event.conn, event.ticket, KeeperError("register first"))
            return
        dead = [m.register.rank for m in self.members.values() if not m.alive]
        if dead:
            self._refuse(event.conn, event.ticket, _ended_meanwhile(dead[0]))
            return
        arena = self._arena_of(member.index)
        if not member.arena_id and arena is not None:  # it had its memory from the keeper before this one
            member.arena_id = arena.arena_id
        member.loaded = True
        self.loaded_requests.append(event)
        self._advance()

    # Lease

    def _tick(self, event: e.Tick) -> None:
        self._try_open()
        orphans = [m for m in self.members.values() if m.alive and m.register.launcher_pid]
        lost = [m for m in orphans if m.register.launcher_pid not in self.launchers]
        if not lost:
            self.orphaned_since = None
        elif self.orphaned_since is None:
            self.orphaned_since = self.now
        elif self.now - self.orphaned_since >= self.limits.orphan_s:
            for member in lost:
                self._do(e.Kill(member.pid, "its launcher is dead"))
            self.orphaned_since = self.now

    def _watch_lease(self) -> None:
        in_use = bool(self.launchers) or any(m.alive for m in self.members.values()) or self.opening is not None
        in_use = in_use or (self.limits.sidecar and not self.arenas and not self.members)
        if in_use:
            self.lease_since = None
        elif self.lease_since is None:
            self.lease_since = self.now
        elif self.now - self.lease_since >= self.limits.lease_s:
            self._do(e.End("the lease ran out: no launcher and no trainer is left"))

    def lease_left_s(self) -> float | None:
        if self.lease_since is None:
            return None
        return max(0.0, self.limits.lease_s - (self.now - self.lease_since))

    # Small print

    def _write_ledger(self) -> None:
        self.ledger_serial += 1
        self._do(e.WriteLedger(Ledger(self.incarnation, self.coordinator.base, self.remembered, self.ledger_serial)))

    def _do(self, effect: e.Effect) -> None:
        self._effects.append(effect)

    def _refuse(self, conn: e.Conn, ticket: int, error: Error) -> None:
        self._do(e.Send(conn, Refused(type(error).__name__, error.message, error.hint, ticket)))

    def _count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems = [*self.problems[-19:], text]
        self._log("error", text)

    def _log(self, level: str, text: str, **fields: object) -> None:
        self._do(e.Log(level, text, fields))


def _ended_meanwhile(rank: int) -> Error:
    return RecoveryError(f"rank {rank} ended while the job was restoring", hint="the launcher restarts the job")


def _fits(need: ArenaNeed, capacity: ArenaNeed) -> bool:
    return (
        need.layout_bytes <= capacity.layout_bytes
        and need.values_bytes <= capacity.values_bytes
        and need.payload_bytes <= capacity.payload_bytes
    )


_DISPATCH: dict[type, Callable[[Core, Any], None]] = {
    e.TrainerRegisters: Core._register,
    e.LauncherSeen: Core._launcher_seen,
    e.ProcessDied: Core._died,
    e.ArenaWanted: Core._arena_wanted,
    e.ArenaAdded: Core._arena_added,
    e.ArenaRefused: Core._arena_refused,
    e.SnapshotCommitted: Core._committed,
    e.GrantVoid: Core._void,
    e.SlotSealed: Core._sealed,
    e.SlotVerified: Core._verified,
    e.RestoreWanted: Core._restore_wanted,
    e.RankLoaded: Core._loaded,
    e.TrainerLeaves: Core._leaves,
    e.Tick: Core._tick,
}
