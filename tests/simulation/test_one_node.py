"""One node, simulated: the real core, and trainers, arenas, work and crashes driven by one seed.

Actions are drawn at random: a trainer takes, finishes or voids a copy, outgrows its arena and moves into a
larger one in its own time, a message arrives late, a slot is sealed, trainers are killed and restarted, the
keeper is killed and adopts what others hold, a slot is damaged. In every other world a launcher agrees on the
incarnations and gives back what it holds, arena by arena, while new trainers may be registering. After every
action the rules are checked:

    1  once a version was reported complete there is always one at least as new whose slots are whole
    2  what is restored is the same version on all ranks, and not older than the last one reported complete
    3  a slot that holds a retained version is never granted
    4  a rank never gets a snapshot that was not sealed for exactly the bytes it holds
    5  after the last fault snapshots continue
    6  a rank is never granted a slot that it is writing
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from keepstep.arena.records import Grant, Ledger
from keepstep.config import Config, KeeperConfig
from keepstep.control.messages import (
    ArenaGiven,
    Committed,
    Complete,
    Loaded,
    Refused,
    Register,
    Registered,
    RestoreFrom,
    Void,
    WantArena,
    WantRestore,
)
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.effects import (
    CreateArena,
    DropArena,
    DropReplicaCache,
    Effect,
    Kill,
    Log,
    SealSlot,
    Send,
    SendSnapshot,
    VerifySlot,
    WriteGrant,
    WriteLedger,
)
from keepstep.keeper.node.events import (
    ArenaAdded,
    Event,
    FromTrainer,
    LauncherSeen,
    ProcessDied,
    SlotFound,
    SlotSealed,
    SlotVerified,
    TrainerRegisters,
)
from keepstep.layout import SnapshotSize
from keepstep.types import Incarnation, SnapshotInfo, Version


@dataclass
class FakeSlot:
    writing: bool = False
    content: Version | None = None
    sealed: Version | None = None
    damaged: bool = False


@dataclass
class FakeArena:
    arena_id: str
    local_index: int
    slots: list[FakeSlot]
    size: int = 1
    generation: int = 1
    grant: Grant | None = None
    ledger: Ledger | None = None


@dataclass
class FakeTrainer:
    index: int
    pid: int
    conn: int
    incarnation: Incarnation | None = None
    alive: bool = True
    ready: bool = False
    progress: int = -1
    used_serial: int = -1
    arena_id: str = ""
    given: str = ""
    """the arena that it is moving into"""
    busy: list[tuple[str, int, Version]] = field(default_factory=list)
    """oldest first: they are finished in order"""
    outcomes: list[Committed | Void] = field(default_factory=list)
    outbox: list[Event] = field(default_factory=list)


class World:
    """One node of `ranks` trainers with `slots` slots each."""

    def __init__(self, seed: int, ranks: int, slots: int) -> None:
        self.random = random.Random(seed)
        self.ranks, self.slots = ranks, slots
        self.launcher = bool(seed % 2)
        self.grows = seed % 3 == 0
        self.to_give_back: list[Event] = [LauncherSeen(1)] if self.launcher else []
        self.arenas: dict[str, FakeArena] = {}
        self.trainers: dict[int, FakeTrainer] = {}
        self.work: list[Effect] = []
        self.ids = iter(range(1, 1_000_000))
        self.now = 0.0
        self.round = 0
        self.completed: Version | None = None
        self.steps_done = 0
        self.doomed = self.settled = False
        self.sizes = dict.fromkeys(range(ranks), 1)
        self.moves = 0
        self.together = 0
        """the most snapshots that a rank was writing at once"""
        self.may_damage = True
        self.core = Core(Config(keeper=KeeperConfig(lease_s=1e9)))

    # Carrying effects out

    def handle(self, event: Event) -> None:
        self.now += 0.001
        for trainer in self.trainers.values():
            self.core.progress[trainer.index] = trainer.progress
        for effect in self.core.handle(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, WriteGrant):
            slot = self.arenas[effect.arena_id].slots[effect.grant.slot]
            whole = slot.sealed == slot.content and not slot.writing and not slot.damaged
            assert not (whole and slot.sealed in self.core.retain), "rule 3"
            self.arenas[effect.arena_id].grant = effect.grant
        elif isinstance(effect, WriteLedger):
            for arena in self.arenas.values():
                arena.ledger = effect.ledger
        elif isinstance(effect, SealSlot | VerifySlot):
            self.work.append(effect)
        elif isinstance(effect, Kill):
            victim = next(t for t in [*self.trainers.values(), *self.old] if t.pid == effect.pid)
            victim.alive = False
            self.handle(ProcessDied(victim.pid))
        elif isinstance(effect, Send):
            self.deliver(effect)
        elif isinstance(effect, SendSnapshot):
            self.deliver(Send(effect.conn, effect.answer, effect.answer.arena_id))
        else:
            assert isinstance(effect, Log | CreateArena | DropArena | DropReplicaCache), effect
            if isinstance(effect, CreateArena):
                self.create(effect)
            elif isinstance(effect, DropArena):
                self.drop(effect)

    def create(self, effect: CreateArena) -> None:
        slots, size = [FakeSlot() for _ in range(self.slots)], effect.wanted.need.payload_bytes
        arena = FakeArena(f"arena{next(self.ids)}", effect.local_index, slots, size, effect.generation)
        self.arenas[arena.arena_id] = arena
        self.handle(self.describe(arena))
        self.doomed = self.settled and self.random.random() < 0.1  # it dies before its answer has arrived
        if not self.doomed:
            self.deliver(Send(effect.conn, ArenaGiven(arena.arena_id, 1, True, effect.wanted.ticket)))

    def drop(self, effect: DropArena) -> None:
        for trainer in self.trainers.values():
            writing = {arena_id for arena_id, _, _ in trainer.busy} if trainer.alive else set()
            assert effect.arena_id not in writing, "rule 6"
        del self.arenas[effect.arena_id]

    def describe(self, arena: FakeArena) -> ArenaAdded:
        found = []
        for index, slot in enumerate(arena.slots):
            whole = slot.content is not None and not slot.writing
            state = "sealed" if whole and slot.sealed == slot.content else "committed" if whole else "free"
            version = slot.content if whole else None
            found.append(SlotFound(index, state, self.info(version, arena) if version is not None else None))
        need = SnapshotSize(arena.size, arena.size, arena.size)
        return ArenaAdded(
            arena.arena_id, arena.local_index, arena.generation, 1, need, tuple(found), arena.ledger, arena.grant
        )

    def deliver(self, effect: Send) -> None:
        trainer = next((t for t in self.trainers.values() if t.conn == effect.conn and t.alive), None)
        message = effect.message
        if isinstance(message, Complete):
            self.completed = max(self.completed, message.version) if self.completed else message.version
        if trainer is None:
            return
        if isinstance(message, Registered):
            trainer.incarnation = message.incarnation
        elif isinstance(message, RestoreFrom):
            self.restored[trainer.index] = message.version
            if message.version is not None:
                slot = self.arenas[message.arena_id].slots[message.slot]
                assert slot.sealed == slot.content == message.version, "rule 4"
                assert not slot.damaged, "rule 4"
                trainer.progress = message.version.step
        elif isinstance(message, ArenaGiven):
            trainer.given = message.arena_id
        elif isinstance(message, Refused):
            raise AssertionError(f"refused: {message.message}")
        elif (version := getattr(message, "version", None)) is not None:
            trainer.outcomes = [outcome for outcome in trainer.outcomes if outcome.version != version]

    # Restarts and deaths

    old: list[FakeTrainer] = []

    def restart(self) -> None:
        """All trainers die where they are; new ones register, restore and load."""
        dead = list(self.trainers.values())
        self.old = dead
        for trainer in dead:
            if trainer.alive and self.random.random() < 0.7:
                trainer.alive = False
                self.handle(ProcessDied(trainer.pid))
        self.round += 1
        self.trainers = {i: FakeTrainer(i, next(self.ids), next(self.ids)) for i in range(self.ranks)}
        self.restored: dict[int, Version | None] = {}
        self.settled, completed = False, self.completed
        agreed = Incarnation(self.round, self.random.getrandbits(63)) if self.launcher else None
        for trainer in self.trainers.values():
            self.give_back(self.random.randrange(3))
            register = Register(
                trainer.index, self.ranks, trainer.index, self.ranks, agreed, f"round{self.round}", 0, 1, self.slots,
                -1, no_holder=not self.launcher,
            )  # fmt: skip
            self.handle(TrainerRegisters(trainer.conn, trainer.pid, True, register, self.random.getrandbits(63)))
        self.give_back()
        while self.work:
            self.do_work()
        for trainer in self.trainers.values():
            self.handle(FromTrainer(trainer.conn, WantRestore(1)))
        while self.work:
            self.do_work()
        versions = set(self.restored.values())
        assert len(self.restored) == self.ranks, "every rank gets an answer"
        assert len(versions) == 1, f"rule 2: {versions}"
        (version,) = versions
        if self.may_damage is False or not self.damage_done:
            assert completed is None or (version is not None and version >= completed), (
                f"rule 2: {version} after {completed}"
            )
        for trainer in self.trainers.values():
            self.want_arena(trainer)
            self.move_in(trainer)
            self.handle(FromTrainer(trainer.conn, Loaded(version.step if version else None, 1)))
            trainer.ready = True
        self.settled = True
        if version is not None and self.damage_done:
            self.completed = version
        self.damage_done = False

    damage_done = False

    def kill_keeper(self) -> None:
        """A new core has only what the arenas hold and what trainers send again."""
        self._new_core()
        living = [t for t in self.trainers.values() if t.alive]
        self.give_back()
        self.random.shuffle(living)
        for trainer in living:
            trainer.conn = next(self.ids)
            trainer.outbox.clear()  # what was in flight is lost; the last outcomes are sent again
            register = Register(
                trainer.index, self.ranks, trainer.index, self.ranks, trainer.incarnation, f"round{self.round}", 0, 1,
                self.slots, trainer.progress, rejoin=True, arena_id=trainer.given or trainer.arena_id,
                no_holder=not self.launcher,
            )  # fmt: skip
            self.handle(TrainerRegisters(trainer.conn, trainer.pid, True, register, self.random.getrandbits(63)))
            trainer.outbox += [FromTrainer(trainer.conn, outcome) for outcome in trainer.outcomes]

    # What trainers and threads do

    def want_arena(self, trainer: FakeTrainer) -> None:
        size = self.sizes[trainer.index]
        self.handle(FromTrainer(trainer.conn, WantArena(SnapshotSize(size, size, size), self.slots, 0, 1)))

    def move_in(self, trainer: FakeTrainer) -> None:
        if trainer.arena_id != trainer.given:
            trainer.arena_id, trainer.used_serial = trainer.given, -1
        trainer.given = ""

    def outgrow(self, trainer: FakeTrainer) -> None:
        """Voids what it was granted, and asks for more; nothing of it is being copied."""
        trainer.progress += 1
        grant = self.usable(trainer)
        if grant is None or len(self.arenas) > 3 * self.ranks:
            return
        trainer.used_serial = grant.serial
        assert trainer.incarnation is not None
        version = Version(trainer.incarnation, trainer.progress)
        self.report(trainer, Void(trainer.arena_id, grant.slot, version, "outgrown"))
        self.sizes[trainer.index] += 1
        size = self.sizes[trainer.index]
        trainer.outbox.append(FromTrainer(trainer.conn, WantArena(SnapshotSize(size, size, size), self.slots, 0, 1)))
        self.moves += 1

    def usable(self, trainer: FakeTrainer) -> Grant | None:
        granted = self.arenas[trainer.arena_id].grant
        if granted is None or granted.incarnation != trainer.incarnation:
            return None
        grant = granted.after(trainer.used_serial)
        return grant if grant is not None and trainer.progress >= grant.step else None

    def take(self, trainer: FakeTrainer) -> None:
        trainer.progress += 1
        self.steps_done += 1
        arena = self.arenas[trainer.arena_id]
        grant = self.usable(trainer) if not trainer.given else None
        if grant is None:
            return
        trainer.used_serial = grant.serial
        assert trainer.incarnation is not None
        version = Version(trainer.incarnation, trainer.progress)
        full = len(trainer.busy) >= (2 if self.slots >= 3 else 1)
        if full or self.random.random() < 0.05:
            self.report(trainer, Void(arena.arena_id, grant.slot, version, "cannot"))
            return
        slot = arena.slots[grant.slot]
        assert (arena.arena_id, grant.slot) not in [(a, s) for a, s, _ in trainer.busy], "rule 6"
        slot.writing, slot.content, slot.damaged = True, version, False
        trainer.busy.append((arena.arena_id, grant.slot, version))
        self.together = max(self.together, len(trainer.busy))

    def finish_copy(self, trainer: FakeTrainer) -> None:
        arena_id, slot_index, version = trainer.busy.pop(0)
        arena = self.arenas[arena_id]
        if self.random.random() < 0.05:
            self.report(trainer, Void(arena.arena_id, slot_index, version, "the copy failed"))
            return
        arena.slots[slot_index].writing = False
        self.report(trainer, Committed(arena.arena_id, slot_index, version))

    def report(self, trainer: FakeTrainer, outcome: Committed | Void) -> None:
        trainer.outcomes = [*trainer.outcomes, outcome][-4:]
        trainer.outbox.append(FromTrainer(trainer.conn, outcome))

    def do_work(self) -> None:
        effect = self.work.pop(self.random.randrange(len(self.work)))
        assert isinstance(effect, SealSlot | VerifySlot)
        arena = self.arenas[effect.arena_id]
        slot = arena.slots[effect.slot]
        if isinstance(effect, VerifySlot):
            sound = not slot.writing and slot.sealed == slot.content == effect.version and not slot.damaged
            self.handle(SlotVerified(arena.arena_id, effect.slot, effect.version, "" if sound else "damaged"))
            return
        whole = slot.content is not None and not slot.writing and effect.version in (None, slot.content)
        resealed = slot.sealed == slot.content
        gone = effect.newer_than is not None and slot.content is not None and slot.content <= effect.newer_than
        ok = whole and (resealed or not gone)
        if ok:
            slot.sealed = slot.content
        if ok and slot.content is not None:
            self.handle(SlotSealed(arena.arena_id, effect.slot, slot.content, self.info(slot.content, arena)))
        else:
            self.handle(SlotSealed(arena.arena_id, effect.slot, effect.version, problem="not whole"))

    def info(self, version: Version, arena: FakeArena) -> SnapshotInfo:
        return SnapshotInfo(version, arena.local_index, self.ranks, self.ranks, 1)

    def damage(self) -> None:
        """Flip a bit in one retained slot; only while an older one may be gone is that allowed to cost anything."""
        sealed = [
            s for a in self.arenas.values() for s in a.slots if s.sealed and s.sealed == s.content and not s.writing
        ]
        if sealed:
            self.random.choice(sealed).damaged = True
            self.damage_done = True

    def act(self, *, faults: bool) -> None:
        if self.doomed:
            self.doomed = False
            self.kill_keeper()
        choices = []
        for trainer in self.trainers.values():
            if trainer.alive and trainer.ready:
                lag = trainer.progress - min(t.progress for t in self.trainers.values())
                choices += [(self.take, trainer)] * (4 if lag < 2 else 0)
                choices += [(self.finish_copy, trainer)] * (3 if trainer.busy else 0)
                choices += [(self.move_in, trainer)] * (2 if trainer.given else 0)
                choices += [(self.outgrow, trainer)] * (
                    faults and self.grows and lag < 2 and not (trainer.busy or trainer.given)
                )
                choices += [(self.deliver_next, trainer)] * (3 if trainer.outbox else 0)
        choices += [(self.do_work, None)] * (4 if self.work else 0)
        if faults and self.random.random() < 0.02:
            choices = [(self.random.choice([self.restart, self.kill_keeper, self.kill_both]), None)]
        call, argument = self.random.choice(choices)
        call(argument) if argument is not None else call()
        self.check()

    def kill_both(self) -> None:
        if self.launcher and self.random.random() < 0.5:  # no old trainer comes back, and new ones may be there first
            self._new_core()
            for trainer in self.trainers.values():
                trainer.alive = False
        else:
            self.kill_keeper()
        self.restart()

    def _new_core(self) -> None:
        self.work.clear()
        self.core = Core(Config(keeper=KeeperConfig(lease_s=1e9)))
        self.to_give_back = [self.describe(arena) for arena in self.arenas.values()]
        self.random.shuffle(self.to_give_back)
        if self.launcher:
            self.to_give_back.append(LauncherSeen(1))

    def give_back(self, count: int = 1_000_000) -> None:
        """Give back part of what the new keeper lacks; the launcher reports last."""
        for _ in range(min(count, len(self.to_give_back))):
            self.handle(self.to_give_back.pop(0))

    def deliver_next(self, trainer: FakeTrainer) -> None:
        self.handle(trainer.outbox.pop(0))

    def check(self) -> None:
        if self.completed is None:
            return
        whole: dict[Version, set[int]] = {}
        for arena in self.arenas.values():
            for slot in arena.slots:
                if slot.content is not None and not slot.writing:
                    whole.setdefault(slot.content, set()).add(arena.local_index)
        best = max((v for v, ranks in whole.items() if len(ranks) == self.ranks), default=None)
        assert best is not None, f"rule 1: nothing is left of {self.completed}"
        assert best >= self.completed, f"rule 1: {best} after {self.completed}"


@pytest.mark.parametrize(("ranks", "slots"), [(1, 2), (2, 2), (3, 2), (2, 3), (4, 4)])
def test_a_thousand_lives_never_lose_or_mix_a_version(ranks: int, slots: int) -> None:
    together = set()
    for seed in range(200):
        world = World(seed, ranks, slots)
        try:
            live(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {ranks} ranks, {slots} slots: {error}") from error
        together.add(world.together)
    assert max(together) == (2 if slots >= 3 else 1)


def live(world: World) -> None:
    world.restart()
    for _ in range(world.random.randrange(50, 400)):
        world.act(faults=True)
    before = world.completed
    for _ in range(400):
        world.act(faults=False)
    assert world.completed is not None, "rule 5"
    assert world.completed != before, f"rule 5: nothing after {before}"


@pytest.mark.parametrize("slots", [2, 3])
def test_a_damaged_version_falls_back_or_is_refused_and_is_never_handed_out(slots: int) -> None:
    handed_back = refused = 0
    for seed in range(300):
        world = World(seed, 2, slots)
        world.restart()
        for _ in range(world.random.randrange(60, 120)):
            world.act(faults=False)
        world.damage()
        problem = refusal_of(world)
        assert not problem or ("refused" in problem and "cannot be given back" in problem), f"seed {seed}: {problem}"
        handed_back, refused = handed_back + (not problem), refused + bool(problem)
    assert handed_back
    assert refused


def refusal_of(world: World) -> str:
    """Restart; rule 4 is checked where a slot is handed out. Returns why nothing was."""
    try:
        world.restart()
    except AssertionError as error:
        return str(error)
    return ""
