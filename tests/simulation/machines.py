"""A simulated node: a real core; everything around it is fake, and decides nothing.

Effects of the core are carried out in fake time: seals and checks take a while, parity is encoded chunk by chunk from
what the members hold at that moment, snapshots are fetched or rebuilt from what is held. A keeper's death loses
what was in progress; arenas and parity stay, as trainers and launcher hold them. A node's death loses everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fakes import NEED, Content, FakeArena, FakeParity, FakeSlot, FakeTrainer
from transfers import Exchange, Fetch

from keepstep.control.membership import with_own_card
from keepstep.control.messages import (
    ArenaGiven,
    Committed,
    Complete,
    Done,
    Loaded,
    Membership,
    NodeCard,
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
    CancelFetches,
    CreateArena,
    DiscardFetchedArena,
    DropArena,
    DropReplicaCache,
    End,
    FetchSnapshot,
    FreeParity,
    KeepFetchedArena,
    Kill,
    Log,
    SealSlot,
    Send,
    SendSnapshot,
    SendToPeer,
    SetPeers,
    StartExchange,
    StopExchange,
    VerifySlot,
    WriteGrant,
    WriteLedger,
)
from keepstep.keeper.node.events import (
    Event,
    FromTrainer,
    LauncherSeen,
    MembershipSet,
    ParityPlaced,
    ProcessDied,
    SlotSealed,
    SlotVerified,
    Tick,
    TrainerRegisters,
)
from keepstep.types import SnapshotInfo, Version

if TYPE_CHECKING:
    from world_of_many import World

TICK_S = 0.25


class Machine:
    def __init__(self, world: World, node_id: str) -> None:
        self.world, self.node_id = world, node_id
        self.alive, self.frozen = True, False
        self.waiting: list[Callable[[], None]] = []
        """calls that are due when it thaws"""
        self.core: Core | None = None
        self.life = 0
        """counts its keepers"""
        self.dies_after: int | None = None
        """the number of effects after which the keeper is killed"""
        self.card = NodeCard(node_id, f"{node_id}@{world.now:g}", node_id, 0)
        self.peers: dict[str, tuple[str, int]] = {}
        """instances and ports of the keepers it knows, by node"""
        self.membership: Membership | None = None
        self.arenas: dict[str, FakeArena] = {}
        self.parities: dict[str, FakeParity] = {}
        self.trainers: list[FakeTrainer] = []
        self.exchange: Exchange | None = None
        self.fetches: list[Fetch] = []
        self.fetched_arenas: dict[str, FakeArena] = {}
        self.adopted: set[str] = set()
        self.start_keeper()

    # Time

    def at(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call later: not if the node dies first, and not while it is frozen."""
        self.world.later(delay_s, self._happen, call, args)

    def _happen(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.waiting.append(lambda: self._happen(call, args))
            return
        call(*args)

    def in_this_life(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call later, unless the keeper of this moment dies first."""
        life = self.life
        self.at(delay_s, lambda: call(*args) if self.core is not None and self.life == life else None)

    def freeze(self, for_s: float) -> None:
        self.frozen = True
        self.world.later(for_s, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            self.world.later(0.0, call)
        self.world.network.recompute(self)

    # The keeper

    @property
    def place(self) -> tuple[str, int]:
        return self.card.instance, self.card.port

    def start_keeper(self) -> None:
        """Start a new keeper; its holders connect in any order, give back what they hold and register."""
        self.life += 1
        self.card = NodeCard(self.node_id, self.card.instance, self.node_id, self.life)
        self.core = Core(self.world.config, self.card, deadlines=self.world.deadlines)
        self.dies_after, self.adopted, self.peers = None, set(), {}
        self.exchange, self.fetches, self.fetched_arenas = None, [], {}
        self.in_this_life(self.world.random.uniform(0, TICK_S), self._tick)
        holders: list[Callable[[], None]] = [self._launcher_connects]
        holders += [partial(self._rejoin, trainer) for trainer in self.trainers if trainer.alive]
        self.world.random.shuffle(holders)
        for number, holder in enumerate(holders):
            self.in_this_life(0.01 + number * self.world.random.choice([0.01, 0.1]), holder)
        if self.life > 1:  # its agent publishes the new address
            self.at(self.world.random.uniform(0.1, 1.0), self.world.launcher.keeper_moved)

    def kill_keeper(self) -> None:
        self.core = None
        self.world.network.recompute(self)
        self.at(self.world.random.uniform(0.1, 0.6), self.start_keeper)

    def _tick(self) -> None:
        self.handle(Tick())
        self.in_this_life(TICK_S, self._tick)

    def handle(self, event: Event) -> None:
        core = self.core
        if core is None:
            return
        for trainer in self.trainers:
            core.progress[trainer.index] = trainer.progress
        self.world.handled += 1
        effects = core.handle(event, self.world.now)
        if self.world.trace is not None:
            self.world.trace.append((self.world.now, self.node_id, event, effects))
        self.world.rules.handled(self)  # decisions count from now on; then they are carried out
        for effect in effects:
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self.kill_keeper()
                    return
            _EFFECTS[type(effect)](self, effect)

    def _give_back(self) -> None:
        """Every holder has duplicates of everything."""
        found: list[Event] = []
        for arena_id, arena in self.arenas.items():
            if arena_id not in self.adopted:
                self.adopted.add(arena_id)
                found.append(arena.describe())
        for buffer_id, parity in self.parities.items():
            if buffer_id not in self.adopted:
                self.adopted.add(buffer_id)
                found.append(ParityPlaced(parity.found))
        self.world.random.shuffle(found)
        for event in found:
            self.handle(event)

    def _introduce(self) -> None:
        if self.membership is not None and self.membership.nodes[self.membership.node_rank] != self.card:
            self.introduce(self.membership)

    def introduce(self, membership: Membership) -> None:
        if self.membership is not None and membership.incarnation.number < self.membership.incarnation.number:
            return  # another round has begun meanwhile
        self.membership = with_own_card(membership, self.card)
        self.handle(MembershipSet(self.membership))

    def _launcher_connects(self) -> None:
        self._give_back()
        self._introduce()
        self.handle(LauncherSeen(1, alive=False))

    def _rejoin(self, trainer: FakeTrainer) -> None:
        if not trainer.alive:
            return
        self._give_back()
        self._introduce()
        trainer.conn = next(self.world.ids)
        self.register(trainer)

    # Trainers

    def start_trainers(self, trainers: list[FakeTrainer]) -> None:
        self.trainers = trainers
        for trainer in trainers:
            if self.core is not None:
                self.register(trainer)

    def register(self, trainer: FakeTrainer) -> None:
        setting = self.world.setting
        register = Register(
            trainer.rank, setting.world_size, trainer.index, setting.local, trainer.incarnation, "", 0, 1,
            setting.slots, trainer.progress, rejoin=trainer.ready, arena_id=trainer.arena_id,
        )  # fmt: skip
        self.send(trainer, TrainerRegisters(trainer.conn, trainer.pid, True, register, 0))

    def send(self, trainer: FakeTrainer, event: Event) -> None:
        """Send a message of a trainer to its keeper, in order."""
        at = max(trainer.sent_until, self.world.now + self.world.random.uniform(0, 0.01))
        trainer.sent_until = at
        conn = trainer.conn
        self.in_this_life(at - self.world.now, lambda: self.handle(event) if conn == trainer.conn else None)

    def kill_trainer(self, trainer: FakeTrainer) -> None:
        if trainer.alive:
            trainer.alive = False
            self.in_this_life(self.world.random.uniform(0, 0.05), self.handle, ProcessDied(trainer.pid))
            self.world.launcher.noticed(trainer)

    def _send(self, effect: Send) -> None:
        trainer = next((t for t in self.trainers if t.conn == effect.conn), None)
        if isinstance(effect.message, Complete):
            self.world.rules.promised(self, effect.message.version)
        if trainer is None or not trainer.alive:
            return
        at = max(trainer.received_until, self.world.now + self.world.random.uniform(0, 0.01))
        trainer.received_until = at
        conn = trainer.conn
        self.at(at - self.world.now, lambda: self._receive(trainer, effect.message) if conn == trainer.conn else None)

    def _receive(self, trainer: FakeTrainer, message: Any) -> None:
        if not trainer.alive:
            return
        if isinstance(message, Refused):
            self.world.rules.refused(trainer, message)
            trainer.died.append(message.message)
            self.kill_trainer(trainer)
        elif isinstance(message, Registered):
            assert message.incarnation == trainer.incarnation
            self._continue(trainer)
        elif isinstance(message, RestoreFrom) and trainer.stage == "restoring":
            self.world.rules.restored(self, trainer, message)
            trainer.loaded, trainer.stage = message.version, "making room"
            trainer.progress = message.version.step if message.version else -1
            self._continue(trainer)
        elif isinstance(message, ArenaGiven) and trainer.stage == "making room":
            trainer.arena_id, trainer.stage = message.arena_id, "loading"
            self.arenas[message.arena_id].writer = trainer
            self._continue(trainer)
        elif isinstance(message, Done) and trainer.stage == "loading":
            trainer.stage = "ready"
            self.world.job.ready(trainer)
        elif (version := getattr(message, "version", None)) is not None:
            trainer.outcomes = [outcome for outcome in trainer.outcomes if outcome.version != version]

    def _continue(self, trainer: FakeTrainer) -> None:
        """Send the next request; sent again to a new keeper."""
        if trainer.stage == "registering":
            trainer.stage = "restoring"
        if trainer.stage == "restoring":
            self.send(trainer, FromTrainer(trainer.conn, WantRestore(1)))
        elif trainer.stage == "making room":
            self.send(trainer, FromTrainer(trainer.conn, WantArena(NEED, self.world.setting.slots, 0, 2)))
        elif trainer.stage == "loading":
            step = trainer.loaded.step if trainer.loaded else None
            self.send(trainer, FromTrainer(trainer.conn, Loaded(step, 3)))
        for outcome in trainer.outcomes if trainer.ready else ():
            self.send(trainer, FromTrainer(trainer.conn, outcome))

    def take(self, trainer: FakeTrainer) -> None:
        """Train one step, and take the snapshot that was granted for it."""
        if not trainer.alive:
            return
        trainer.progress += 1
        self.world.job.stepped(trainer)
        arena = self.arenas[trainer.arena_id]
        granted = arena.grant
        if granted is None or granted.incarnation != trainer.incarnation:
            return
        grant = granted.after(trainer.used_serial)
        if grant is None or trainer.progress < grant.step:
            return
        trainer.used_serial = grant.serial
        version = Version(trainer.incarnation, trainer.progress)
        full = len(trainer.busy) >= (2 if self.world.setting.slots >= 3 else 1)
        if full or self.world.random.random() < self.world.void_rate:
            self._report(trainer, Void(arena.arena_id, grant.slot, version, "cannot"))
            return
        slot = arena.slots[grant.slot]
        self.world.rules.written(self, slot)
        slot.writing, slot.content, slot.damaged = True, (trainer.rank, version), False
        slot.world_size, slot.local_size = self.world.setting.world_size, self.world.setting.local
        trainer.busy.append((arena.arena_id, grant.slot, version))
        self.world.rules.memory_changed()
        trainer.free_at = max(self.world.now, trainer.free_at) + self.world.random.uniform(0.02, 0.3)
        self.at(trainer.free_at - self.world.now, self._finish_copy, trainer)

    def _finish_copy(self, trainer: FakeTrainer) -> None:
        if not trainer.alive:
            return
        arena_id, slot, version = trainer.busy.pop(0)
        if self.world.random.random() < self.world.void_rate:
            self._report(trainer, Void(arena_id, slot, version, "the copy failed"))
            return
        self.arenas[arena_id].slots[slot].writing = False
        self._report(trainer, Committed(arena_id, slot, version))

    def _report(self, trainer: FakeTrainer, outcome: Committed | Void) -> None:
        trainer.outcomes = [*trainer.outcomes, outcome][-4:]
        self.send(trainer, FromTrainer(trainer.conn, outcome))

    # Memory

    def slots(self) -> list[FakeSlot]:
        return [slot for arena in self.arenas.values() for slot in arena.slots]

    def holds(self, content: Content) -> bool:
        """Whether a peer that fetches it gets sealed, sound bytes."""
        return any(slot.sound(content) for slot in self.slots())

    def manifest(self, version: Version) -> tuple[int, ...]:
        """The ranks whose snapshots of a version are sealed here, whatever their bytes are by now."""
        return tuple(sorted({s.whole[0] for s in self.slots() if s.whole and s.whole[1] == version == s.sealed}))

    def _write_grant(self, effect: WriteGrant) -> None:
        self.arenas[effect.arena_id].grant = effect.grant

    def _write_ledger(self, effect: WriteLedger) -> None:
        for arena in self.arenas.values():
            if self.dies_after == 0 and self.world.random.random() < 0.3:
                break
            arena.ledger = effect.ledger

    def _seal(self, effect: SealSlot) -> None:
        self.in_this_life(self.world.random.uniform(0.005, 0.1), self._sealed, effect)

    def _sealed(self, effect: SealSlot) -> None:
        arena = self.arenas.get(effect.arena_id)
        if arena is None:
            return
        slot = arena.slots[effect.slot]
        rank, version = slot.whole or (0, None)
        fits = version is not None and effect.version in (None, version)
        again = fits and slot.sealed == version
        late = effect.newer_than is not None and version is not None and version <= effect.newer_than
        if version is not None and fits and (again or not late):
            slot.sealed = version
            info = SnapshotInfo(version, rank, slot.world_size, slot.local_size, 1)
            self.handle(SlotSealed(arena.arena_id, effect.slot, version, info))
        else:
            self.handle(SlotSealed(arena.arena_id, effect.slot, effect.version, problem="not whole"))

    def _verify(self, effect: VerifySlot) -> None:
        self.in_this_life(
            self.world.random.uniform(0.005, 0.1), self.verify, effect.arena_id, effect.slot, effect.version
        )

    def verify(self, arena_id: str, index: int, version: Version) -> None:
        arena = self.arenas.get(arena_id)
        if arena is None:
            return
        slot = arena.slots[index]
        sound = slot.whole is not None and slot.sound((slot.whole[0], version))
        self.handle(SlotVerified(arena_id, index, version, "" if sound else "does not match its checksum"))

    def _create(self, effect: CreateArena) -> None:
        self.in_this_life(self.world.random.uniform(0.01, 0.1), self._created, effect)

    def _created(self, effect: CreateArena) -> None:
        wanted = effect.wanted
        trainer = next((t for t in self.trainers if t.conn == effect.conn and t.alive), None)
        if trainer is None:
            return
        arena = self.new_arena(effect.local_index, effect.generation, wanted.slots)
        self.handle(arena.describe())
        self._send(Send(effect.conn, ArenaGiven(arena.arena_id, 1, True, wanted.ticket)))

    def new_arena(self, local_index: int, generation: int, slots: int) -> FakeArena:
        arena_id = f"{self.node_id}/{local_index}.{generation}.{next(self.world.ids)}"
        arena = FakeArena(arena_id, local_index, generation, [FakeSlot() for _ in range(slots)])
        self.arenas[arena_id] = arena
        self.adopted.add(arena_id)
        return arena

    def _keep_fetched(self, effect: KeepFetchedArena) -> None:
        self.arenas[effect.arena_id] = self.fetched_arenas.pop(effect.arena_id)
        self.adopted.add(effect.arena_id)

    def _discard_fetched(self, effect: DiscardFetchedArena) -> None:
        del self.fetched_arenas[effect.arena_id]

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        self._send(Send(effect.conn, effect.answer, effect.answer.arena_id))

    def _drop(self, effect: DropArena) -> None:
        del self.arenas[effect.arena_id]
        self.world.rules.memory_changed()

    def _kill(self, effect: Kill) -> None:
        pids = [t for t in (*self.trainers, *self.world.launcher.old) if t.pid == effect.pid]
        for trainer in pids:
            self.at(self.world.random.uniform(0.0, 0.2), self._killed, trainer)

    def _killed(self, trainer: FakeTrainer) -> None:
        if trainer.alive:
            self.kill_trainer(trainer)

    def _ends(self, effect: End) -> None:
        raise AssertionError(f"{self.node_id}: the keeper ended: {effect.reason}")

    # Peers

    def _send_to_peer(self, effect: SendToPeer) -> None:
        self.world.network.send(self, effect)

    def _set_peers(self, effect: SetPeers) -> None:
        self.peers = {card.node_id: (card.instance, card.port) for card in effect.cards}
        self.world.network.recompute(self)

    def _start_exchange(self, effect: StartExchange) -> None:
        self.world.rules.exchange_starts(self)
        self.exchange = Exchange(self, effect)

    def _stop_exchange(self, effect: StopExchange) -> None:
        if self.exchange is not None and self.exchange.effect.key == effect.key:
            self.exchange.stopped = True
            self.exchange = None

    def _free_parity(self, effect: FreeParity) -> None:
        self.parities.pop(effect.buffer_id, None)
        self.world.rules.memory_changed()

    def _fetch(self, effect: FetchSnapshot) -> None:
        self.fetches.append(Fetch(self, effect))

    def _cancel_fetches(self, effect: CancelFetches) -> None:
        for one in self.fetches:
            one.stopped = one.stopped or one.effect.plan <= effect.plan


_EFFECTS: dict[type, Callable[[Machine, Any], None]] = {
    Send: Machine._send,
    SendSnapshot: Machine._send_snapshot,
    KeepFetchedArena: Machine._keep_fetched,
    DiscardFetchedArena: Machine._discard_fetched,
    DropReplicaCache: lambda machine, effect: None,
    WriteGrant: Machine._write_grant,
    WriteLedger: Machine._write_ledger,
    SealSlot: Machine._seal,
    VerifySlot: Machine._verify,
    CreateArena: Machine._create,
    DropArena: Machine._drop,
    Kill: Machine._kill,
    End: Machine._ends,
    Log: lambda machine, effect: None,
    SendToPeer: Machine._send_to_peer,
    SetPeers: Machine._set_peers,
    FetchSnapshot: Machine._fetch,
    CancelFetches: Machine._cancel_fetches,
    StartExchange: Machine._start_exchange,
    StopExchange: Machine._stop_exchange,
    FreeParity: Machine._free_parity,
}
