"""Several nodes in one process: real keepers in threads, real sockets and memfds, and trainers that write bytes.

A trainer here is whatever speaks the protocol: it needs no torch and can be made in a millisecond. Nothing
in here is a mock of keepstep's own code; what is missing is the launcher, whose part the test plays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from keepstep.arena import records as h
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import Arena
from keepstep.config import Config, KeeperConfig, ParityConfig, PeersConfig
from keepstep.control.client import KeeperClient
from keepstep.control.held_memory import HeldMemory
from keepstep.control.membership import with_own_card
from keepstep.control.messages import (
    ArenaGiven,
    CardIs,
    Committed,
    Complete,
    Done,
    Goodbye,
    Hold,
    LauncherHello,
    Loaded,
    Membership,
    NodeCard,
    Protected,
    Register,
    Registered,
    RestoreFrom,
    SnapshotSize,
    StatusIs,
    Void,
    Voided,
    WantArena,
    WantCard,
    WantRestore,
    WantStatus,
)  # fmt: skip
from keepstep.errors import Error
from keepstep.identity import Identity, ensure_private
from keepstep.keeper.coordinator.state import Deadlines
from keepstep.keeper.process import Keeper
from keepstep.keeper.transfer.network import ADDRESS_FILE, KeeperAddress
from keepstep.layout import Layout, digest
from keepstep.types import Incarnation, Status, Version

DEADLINE_S = 20.0
T = TypeVar("T")
LAYOUT = Layout((), ()).encode()


def wait_for(what: Callable[[], object], why: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {why}")
        time.sleep(0.003)


def content(rank: int, step: int, size_bytes: int) -> bytes:
    """What a rank's state is at a step: different for every rank and step."""
    return random.Random(f"{rank}:{step}").randbytes(size_bytes)


class PlainTrainer:
    """One rank. Its state at a step is `content(rank, step, size)`."""

    def __init__(
        self, node: Node, rank: int, world_size: int, *, local_index: int = 0, local_world_size: int = 1,
        size_bytes: int = 1000, slots: int = 2,
    ) -> None:  # fmt: skip
        self.node, self.rank, self.size_bytes, self.slots = node, rank, size_bytes, slots
        self.place = (rank, world_size, local_index, local_world_size)
        self.client = KeeperClient(node.identity, "trainer", listener=self)
        self.complete: Version | None = None
        self.protected: Version | None = None
        self.voided: list[Voided] = []
        self.used = -1
        self.progress = -1
        self.arena: Arena | None = None
        self.incarnation = Incarnation(0, 0)
        self.restored: Version | None = None
        self.said: Committed | None = None

    def register(self, incarnation: Incarnation) -> None:
        rank, world, index, local = self.place
        register = Register(rank, world, index, local, incarnation, "", 0, 1, self.slots, -1)
        answer, _ = self.client.request(register, Registered, timeout_s=DEADLINE_S)
        self.incarnation = answer.incarnation

    def rejoin(self, node: Node) -> None:
        """Its keeper died and another one has taken the memory over: go on with that one."""
        self.client.close()
        self.node = node
        self.client = KeeperClient(node.identity, "trainer", listener=self)
        rank, world, index, local = self.place
        arena_id = self.arena.arena_id if self.arena is not None else ""
        register = Register(
            rank, world, index, local, self.incarnation, "", 0, 1, self.slots, self.progress, True, arena_id=arena_id
        )
        self.client.request(register, Registered, timeout_s=DEADLINE_S)
        if self.said is not None:
            self.client.post(self.said)

    def restore(self) -> RestoreFrom:
        """What the keeper gives back, checked byte for byte against what the rank had."""
        answer, fds = self.client.request(WantRestore(), RestoreFrom, timeout_s=DEADLINE_S)
        try:
            self.restored = answer.version
            if answer.version is not None:
                identity = self.node.identity
                arena = Arena.adopt(os.dup(fds[0]), run_id=identity.run_id, node_id=identity.node_id)
                sealed = arena.sealed(answer.slot)
                assert sealed is not None
                assert (sealed.version, sealed.trainer.rank) == (answer.version, self.rank)
                _, values, payload = arena.used_spans(answer.slot, sealed.trainer)
                found = arena.segment.read(payload.offset, payload.size_bytes)
                assert found == content(self.rank, answer.version.step, len(found)), "these are not its bytes"
                assert arena.segment.read(values.offset, values.size_bytes) == str(answer.version.step).encode()
                arena.close()
                self.progress = answer.version.step
        finally:
            for fd in fds:
                os.close(fd)
        return answer

    def get_ready(self) -> None:
        need = SnapshotSize(len(LAYOUT), 64, self.size_bytes)
        _, fds = self.client.request(WantArena(need, self.slots), ArenaGiven, timeout_s=DEADLINE_S)
        identity = self.node.identity
        self.arena = Arena.adopt(fds[0], run_id=identity.run_id, node_id=identity.node_id)
        self.arena.write_progress(h.Progress(self.incarnation, self.progress, 0, 0))  # the memory is ready

    def loaded(self) -> None:
        step = self.restored.step if self.restored else None
        self.client.request(Loaded(step), Done, timeout_s=DEADLINE_S)

    def take(self, step: int) -> bool:
        """True when it was captured."""
        assert self.arena is not None
        self.progress = step
        self.arena.write_progress(h.Progress(self.incarnation, step, 0, 0))
        granted = self.arena.grant()
        if granted is None or granted.incarnation != self.incarnation:
            return False
        grant = granted.after(self.used)
        if grant is None or step < grant.step:
            return False
        self.used = grant.serial
        version = Version(self.incarnation, step)
        payload, values = content(self.rank, step, self.size_bytes), str(step).encode()
        rank, world, index, local = self.place
        header = TrainerHeader(
            state=h.WRITING, rank=rank, world_size=world, local_index=index, local_world_size=local, flags=0,
            version=version, layout_bytes=len(LAYOUT), values_bytes=len(values), payload_bytes=len(payload),
            layout_digest=digest(LAYOUT), written_at=time.time(),
        )  # fmt: skip
        arena, slot = self.arena, grant.slot
        arena.write_trainer_header(slot, header)
        arena.segment.write(arena.layout_span(slot).offset, LAYOUT)
        arena.segment.write(arena.values_span(slot).offset, values)
        arena.segment.write(arena.payload_span(slot).offset, payload)
        arena.write_trainer_header(slot, TrainerHeader(**{**vars(header), "state": h.COMMITTED}))
        self.said = Committed(arena.arena_id, slot, version)
        with contextlib.suppress(Error, OSError):  # said again when its keeper is back
            self.client.post(self.said)
        return True

    def void(self, step: int, reason: str) -> None:
        assert self.arena is not None
        granted = self.arena.grant()
        assert granted is not None
        self.client.post(Void(self.arena.arena_id, granted.slot, Version(self.incarnation, step), reason))

    def leave(self, *, finished: bool = False) -> None:
        if not self.client.lost:
            with contextlib.suppress(Error, OSError):
                self.client.post(Goodbye(finished))
        self.client.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def on_push(self, message: object, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if isinstance(message, Complete | Voided) and self.said is not None and self.said.version == message.version:
            self.said = None
        if isinstance(message, Complete):
            self.complete = message.version
        elif isinstance(message, Protected):
            self.protected = message.version
        elif isinstance(message, Voided):
            self.voided.append(message)

    def on_lost(self) -> None:
        pass


class Node:
    """A keeper in a thread, and whoever plays its launcher."""

    def __init__(self, run: Run, node_id: str, memory: HeldMemory | None = None) -> None:
        """`memory`: what the launcher of this node has kept; this node closes it."""
        self.run, self.node_id = run, node_id
        self.identity = Identity(run.run_id, node_id, run.directory, True)
        self._begin()
        self.memory = memory or HeldMemory(request_timeout_s=DEADLINE_S)
        self.launcher = KeeperClient(self.identity, "launcher", listener=self)
        self.trainers: list[PlainTrainer] = []
        self.membership: Membership | None = None
        self.refused = self.memory.give_back(self.launcher)

    def _begin(self) -> None:
        config = self.run.config(self.node_id)
        self.keeper = Keeper(self.identity, config, deadlines=self.run.deadlines)
        self.thread = threading.Thread(target=self.keeper.run, name=f"keeper-{self.node_id}", daemon=True)
        self.thread.start()

    def hello(self) -> None:
        self.launcher.request(LauncherHello(os.getpid()), Done, timeout_s=DEADLINE_S)

    def on_push(self, message: object, fds: list[int]) -> None:
        if isinstance(message, Hold):
            self.memory.apply(message, fds)
            return
        for fd in fds:
            os.close(fd)

    def on_lost(self) -> None:
        pass

    def card(self) -> CardIs:
        answer, _ = self.launcher.request(WantCard(), CardIs, timeout_s=DEADLINE_S)
        return answer

    def told(self, membership: Membership) -> None:
        self.membership = membership
        self.launcher.request(membership, Done, timeout_s=DEADLINE_S)

    def status(self) -> Status:
        answer, _ = self.launcher.request(WantStatus(), StatusIs, timeout_s=DEADLINE_S)
        return msgspec.json.decode(answer.json, type=Status)

    def kill(self) -> None:
        """Everything on the node is gone."""
        for trainer in self.trainers:
            trainer.leave()
        self.trainers = []
        self.end_keeper()
        self.memory.close()

    def end_keeper(self) -> None:
        """The keeper is gone; its trainers, and whoever holds its memory, are not."""
        self.end()
        self.wait_for_end()
        self.launcher.close()

    def wait_for_end(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()

    def end(self) -> None:
        if self.thread.is_alive() and not self.keeper.ending:
            self.keeper.end("killed by the test")


class Run:
    """A job over several nodes."""

    node_type: type[Node] = Node

    def __init__(
        self, directory: Path, *, losses: int = 1, group_size: int = 8, size_bytes: int = 1000, slots: int = 2,
        local: int = 1, growth: int = 317, deadlines: Deadlines | None = None,
        peers: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.losses, self.group_size = directory, losses, group_size
        self.size_bytes, self.slots, self.local, self.growth = size_bytes, slots, local, growth
        self.run_id = f"run-{secrets.token_hex(4)}"
        self.secret = secrets.token_bytes(32)
        self.nodes: dict[str, Node] = {}
        self.order: list[str] = []
        self.number = 0
        self.deadlines = deadlines
        self.peers = {"dead_s": 1.0} | (peers or {})

    def config(self, node_id: str) -> Config:
        return Config(
            run_id=self.run_id, node_id=node_id, runtime_dir=str(self.directory),
            parity=ParityConfig(losses=self.losses, group_size=self.group_size),
            peers=PeersConfig(address="127.0.0.1", **self.peers),  # type: ignore[arg-type]
            keeper=KeeperConfig(lease_s=60.0),
        )  # fmt: skip

    def add(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.nodes[node_id] = self.node_type(self, node_id)
            self.nodes[node_id].hello()

    def revive(self, node_id: str, *, same_port: bool = True) -> Node:
        """The node's keeper dies and another one takes its memory and its trainers over, in mid-training.

        Not `same_port`: its port is taken meanwhile, here by the keeper of another node.
        """
        before = self.nodes[node_id]
        seat = before.identity.directory / ADDRESS_FILE
        told = KeeperAddress.read(seat)
        assert told is not None
        if not same_port:
            other = next(node for name, node in self.nodes.items() if name != node_id)
            told = msgspec.structs.replace(told, port=other.card().card.port)
        before.end_keeper()
        ensure_private(seat.parent)  # A keeper that is killed leaves its address behind.
        told.write(seat)
        after = self.nodes[node_id] = self.node_type(self, node_id, before.memory)
        if before.membership is not None:
            after.told(with_own_card(before.membership, after.card().card))
        after.hello()
        after.trainers, before.trainers = before.trainers, []
        for trainer in after.trainers:
            trainer.rejoin(after)
        return after

    def sizes(self, rank: int) -> int:
        return self.size_bytes + self.growth * rank

    def begin(self, order: list[str], former: list[NodeCard] | None = None) -> Incarnation:
        """Start an incarnation on these nodes, in this order; trainers register but do not restore yet."""
        self.order = order
        cards = {node_id: self.nodes[node_id].card() for node_id in order}
        self.number = 1 + max([self.number, *(card.largest_number for card in cards.values())])
        incarnation = Incarnation(self.number, secrets.randbits(63))
        nodes = [cards[node_id].card for node_id in order]
        for rank, node_id in enumerate(order):
            self.nodes[node_id].told(Membership(incarnation, nodes, rank, self.secret, former or []))
        world = len(order) * self.local
        for position, node_id in enumerate(order):
            node = self.nodes[node_id]
            for trainer in node.trainers:
                trainer.leave()
            node.trainers = [
                PlainTrainer(
                    node, position * self.local + i, world, local_index=i, local_world_size=self.local,
                    size_bytes=self.sizes(position * self.local + i), slots=self.slots,
                )
                for i in range(self.local)
            ]  # fmt: skip
        self.each(lambda trainer: trainer.register(incarnation))
        return incarnation

    @property
    def trainers(self) -> list[PlainTrainer]:
        return [trainer for node_id in self.order for trainer in self.nodes[node_id].trainers]

    def each(self, call: Callable[[PlainTrainer], T]) -> list[T]:
        """On all ranks at once, as a job does; the first error is raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def one(index: int, trainer: PlainTrainer) -> None:
            try:
                results[index] = call(trainer)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(self.trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S + 5)
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(self.trainers))]

    def restore(self) -> list[RestoreFrom]:
        answers = self.each(lambda trainer: trainer.restore())
        versions = {answer.version for answer in answers}
        assert len(versions) == 1, f"ranks restore different versions: {versions}"
        self.go()
        return answers

    def go(self) -> None:
        """All ranks have their state: training begins."""
        self.each(lambda trainer: trainer.get_ready())
        self.each(lambda trainer: trainer.loaded())

    def start(self, order: list[str], former: list[NodeCard] | None = None) -> list[RestoreFrom]:
        self.begin(order, former)
        return self.restore()

    @property
    def awaits_a_version(self) -> bool:
        """All ranks have captured one and none has heard what became of it: it may be complete at any moment.

        One that only some have captured stays as it is while nobody steps.
        """
        return all(trainer.said is not None for trainer in self.trainers)

    def train(self, steps: int, pause_s: float = 0.0) -> int:
        """Steps on all ranks in lock-step; returns the last one."""
        step = self.trainers[0].progress
        for _ in range(steps):
            step += 1
            for trainer in self.trainers:
                trainer.take(step)
            time.sleep(pause_s)
        return step

    def train_until(self, what: Callable[[], object], why: str, deadline_s: float = DEADLINE_S) -> int:
        end = time.monotonic() + deadline_s
        step = self.trainers[0].progress
        while not what():
            step = self.train(1, 0.002)
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {why}"
        return step

    def protect(self) -> Version:
        """Train until a version that is newer than all now is protected everywhere."""
        before = self.trainers[0].protected

        def is_new(version: Version | None, trainer: PlainTrainer) -> bool:
            # Word of what was restored may still be on its way, and is nothing new.
            return version not in (None, before) and version is not None and version != trainer.restored

        self.train_until(
            lambda: (
                all(is_new(t.protected, t) for t in self.trainers) and len({t.protected for t in self.trainers}) == 1
            ),
            "a version is protected",
        )
        version = self.trainers[0].protected
        assert version is not None
        return version

    def close(self) -> None:
        for node in self.nodes.values():
            node.end()
        for node in self.nodes.values():
            node.kill()


@contextlib.contextmanager
def running(directory: Path, **settings: object) -> Iterator[Run]:
    run = Run(directory, **settings)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.close()


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
