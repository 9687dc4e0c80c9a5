"""Many simulated nodes in one thread: real cores; clock, network, memory, trainers and launcher are fakes.

Everything that happens is an entry of one queue in fake time, so a seed always gives the same run. The test plays the
launcher: it sets the order of nodes, draws incarnations and replaces a lost node by a spare. `rules` checks all
memories and all orders after every change; `mayhem` injects the faults.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakes import FakeTrainer
from machines import Machine
from rules import Rules

from keepstep.config import Config, KeeperConfig, ParityConfig, PeersConfig
from keepstep.control.messages import Membership, NodeCard
from keepstep.keeper.coordinator.state import Deadlines
from keepstep.keeper.node.effects import Effect, SendToPeer
from keepstep.keeper.node.events import Event, PeerLink, PeerMessage
from keepstep.types import Incarnation

DEAD_S = 0.6
MAX_ROUNDS = 60


@dataclass(frozen=True)
class Setting:
    nodes: int = 4
    losses: int = 1
    group_size: int = 8
    local: int = 1
    slots: int = 2
    pace_s: tuple[float, ...] = (0.01, 0.03, 0.1)
    """seconds for one chunk of an exchange, one of these: quick, or longer than many steps"""

    @property
    def world_size(self) -> int:
        return self.nodes * self.local


class World:
    def __init__(self, seed: int, setting: Setting) -> None:
        self.random = random.Random(seed)
        self.setting = setting
        self.config = Config(
            keeper=KeeperConfig(lease_s=1e9, fence_s=1.0, orphan_s=1e9),
            parity=ParityConfig(losses=setting.losses, group_size=setting.group_size),
            peers=PeersConfig(dead_s=DEAD_S),
        )
        self.deadlines = Deadlines(deadline_s=2.0, stall_s=3.0, inventory_s=1.0)
        self.now = 0.0
        self.handled = 0
        self.trace: list[tuple[float, str, Event, list[Effect]]] | None = None
        """set to []: events and effects of every keeper are recorded"""
        self.ids = itertools.count(1)
        self.drop_rate, self.twice_rate, self.slow_rate, self.void_rate = 0.02, 0.03, 0.08, 0.02
        self.step_s = self.random.uniform(0.1, 0.4)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.rules = Rules(self)
        self.network = Network(self)
        self.job = Training(self)
        self.machines: dict[str, Machine] = {}
        self.launcher = Launcher(self)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), call, args))

    def run(self, for_s: float, until: Callable[[], bool] | None = None) -> bool:
        """True when `until` came true in that time."""
        end = self.now + for_s
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call, args = heapq.heappop(self._queue)
            call(*args)
            if until is not None and until():
                return True
        self.now = end
        return False


@dataclass
class Link:
    up: bool = False
    epoch: int = 0
    received_until: dict[str, float] = field(default_factory=dict)


class Network:
    """Links fail and recover; messages are late, out of order, doubled or lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: dict[tuple[str, str], Link] = {}
        self.cuts: set[tuple[str, str]] = set()

    def cut(self, one: str, other: str, for_s: float) -> None:
        pair = _pair(one, other)
        self.cuts.add(pair)
        self.recompute(self.world.machines[one])
        self.world.later(for_s, self._mend, pair)

    def _mend(self, pair: tuple[str, str]) -> None:
        self.cuts.discard(pair)
        self.recompute(self.world.machines[pair[0]])

    def recompute(self, machine: Machine) -> None:
        """Something about this node has changed: compute which of its links are up now."""
        for other in self.others(machine):
            pair = _pair(machine.node_id, other.node_id)
            link = self.links.setdefault(pair, Link())
            up = pair not in self.cuts and self._may_link(machine, other)
            if up != link.up:
                link.up, link.epoch = up, link.epoch + 1
                for side, peer in ((machine, other), (other, machine)):
                    self._notify(link, side, peer.node_id, up)

    def others(self, machine: Machine) -> list[Machine]:
        return [other for other in self.world.machines.values() if other is not machine]

    def _may_link(self, one: Machine, other: Machine) -> bool:
        """Both have the secret of the run, and one of them knows where the other's keeper is now."""
        if not (one.alive and other.alive and one.core and other.core) or one.frozen or other.frozen:
            return False
        mine, theirs = one.peers.get(other.node_id), other.peers.get(one.node_id)
        return bool(one.peers and other.peers) and (mine == other.place or theirs == one.place)

    def _notify(self, link: Link, side: Machine, peer: str, up: bool) -> None:
        at = max(self.world.now + self.world.random.uniform(0.01, 0.2), link.received_until.get(side.node_id, 0.0))
        link.received_until[side.node_id] = at
        side.in_this_life(at - self.world.now, side.handle, PeerLink(peer, up, "" if up else "cut"))

    def freeze(self, machine: Machine, for_s: float) -> None:
        machine.freeze(for_s)
        self.world.later(DEAD_S, self.recompute, machine)

    def reaches(self, one: str, other: str) -> bool:
        """One can fetch from the other now."""
        link = self.links.get(_pair(one, other))
        machine = self.world.machines[other]
        return link is not None and link.up and not machine.frozen and machine.core is not None

    def send(self, sender: Machine, effect: SendToPeer) -> None:
        link = self.links.get(_pair(sender.node_id, effect.node_id))
        draw = self.world.random
        if link is None or not link.up or draw.random() < self.world.drop_rate:
            return
        target = self.world.machines[effect.node_id]
        for _ in range(2 if draw.random() < self.world.twice_rate else 1):
            slow = draw.random() < self.world.slow_rate
            delay_s = draw.uniform(0.02, 0.7) if slow else draw.uniform(0.001, 0.02)
            message = PeerMessage(sender.node_id, effect.message, sender.card.instance)
            target.in_this_life(delay_s, self._deliver, link, link.epoch, target, message)

    def _deliver(self, link: Link, epoch: int, target: Machine, message: PeerMessage) -> None:
        if link.epoch == epoch:
            target.handle(message)


class Training:
    """The job in step: no rank begins a step before all have finished the one before."""

    def __init__(self, world: World) -> None:
        self.world = world

    def ready(self, trainer: FakeTrainer) -> None:
        self._all_take(lambda one: one.ready)

    def stepped(self, trainer: FakeTrainer) -> None:
        self._all_take(lambda one: one.progress == trainer.progress)

    def _all_take(self, may: Callable[[FakeTrainer], bool]) -> None:
        places = self.world.launcher.trainers
        if all(trainer.alive and may(trainer) for _, trainer in places):
            for machine, trainer in places:
                machine.at(self.world.step_s * self.world.random.uniform(0.8, 1.2), machine.take, trainer)


class Launcher:
    """The agents: they agree on the nodes of the next incarnation, and when it begins."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = 0
        self.rounds = 0
        self.names = (f"n{number}" for number in itertools.count())
        self.trainers: list[tuple[Machine, FakeTrainer]] = []
        self.old: list[FakeTrainer] = []
        self.order: list[str] = []
        self.former: list[str] = []
        self.unwanted: set[str] = set()
        """nodes that the next round does without, though they are not dead"""
        self._pending = False
        self.order = [self.add() for _ in range(world.setting.nodes)]
        self.again(0.0)

    def add(self) -> str:
        node_id = next(self.names)
        self.world.machines[node_id] = Machine(self.world, node_id)
        return node_id

    def noticed(self, trainer: FakeTrainer) -> None:
        if any(trainer is one for _, one in self.trainers):
            self.again(self.world.random.uniform(0.1, 0.6))

    def again(self, delay_s: float) -> None:
        if not self._pending:
            self._pending = True
            self.world.later(delay_s, self._begin)

    def _begin(self) -> None:
        draw, machines = self.world.random, self.world.machines
        for node_id in self.order:
            if machines[node_id].frozen and node_id not in self.unwanted:
                if draw.random() < 0.5 and self.world.rules.may_lose(node_id):
                    self.unwanted.add(node_id)
                    self.world.rules.lost_memory()
                else:
                    self.world.later(0.2, self._begin)  # it may come back
                    return
        gone = [n for n in self.order if not machines[n].alive or n in self.unwanted]
        if any(machines[node_id].core is None for node_id in self.order if node_id not in gone):
            self.world.later(0.1, self._begin)  # agents wait for their keepers
            return
        members = [self.add() if node_id in gone else node_id for node_id in self.order]
        if draw.random() < 0.05:
            draw.shuffle(members)
        self.rounds += 1
        assert self.rounds < MAX_ROUNDS, f"the job starts again and again: {[t.died for _, t in self.trainers]}"
        self._pending = False
        self.former, self.order = [n for n in self.order if n not in members], members
        self.unwanted.clear()
        self._start()

    def _start(self) -> None:
        draw, machines, setting = self.world.random, self.world.machines, self.world.setting
        for machine, _ in self.trainers:
            self.old += machine.trainers
        known = [core.incarnation.number for n in self.order if (core := machines[n].core) is not None]
        openings = [
            core.trainers.opening.incarnation.number
            for n in self.order
            if (core := machines[n].core) is not None and core.trainers.opening is not None
        ]
        self.number = 1 + max([self.number, *known, *openings])
        incarnation = Incarnation(self.number, draw.getrandbits(32))
        self.trainers = [
            (
                machines[node_id],
                FakeTrainer(
                    position * setting.local + index, index, next(self.world.ids), next(self.world.ids), incarnation
                ),
            )
            for position, node_id in enumerate(self.order)
            for index in range(setting.local)
        ]
        for rank, node_id in enumerate(self.order):
            machines[node_id].at(draw.uniform(0, 0.1), self._start_on, machines[node_id], incarnation, rank)

    def _start_on(self, machine: Machine, incarnation: Incarnation, rank: int) -> None:
        if incarnation.number != self.number:
            return  # there was another round before this one began here
        for trainer in machine.trainers:
            if self.world.random.random() < 0.6:  # the agent stops its workers; others are left to the fence
                machine.kill_trainer(trainer)
        mine = [trainer for home, trainer in self.trainers if home is machine]
        self.old += machine.trainers
        machine.membership = Membership(incarnation, self._cards(self.order), rank, b"secret", self._cards(self.former))
        if machine.core is not None:
            machine.introduce(machine.membership)
        machine.start_trainers(mine)

    def keeper_moved(self) -> None:
        """Agents publish the addresses of their keepers, and send their own keepers those of the others."""
        for rank, node_id in enumerate(self.order):
            machine = self.world.machines[node_id]
            known = machine.membership
            if (
                machine.core is None
                or known is None
                or known.incarnation.number != self.number
                or known.node_rank != rank
            ):
                continue
            nodes = self._cards(self.order)
            if nodes != known.nodes:
                membership = Membership(known.incarnation, nodes, rank, known.secret, known.former)
                machine.at(self.world.random.uniform(0, 0.2), machine.introduce, membership)

    def _cards(self, node_ids: list[str]) -> list[NodeCard]:
        return [self.world.machines[node_id].card for node_id in node_ids]


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
