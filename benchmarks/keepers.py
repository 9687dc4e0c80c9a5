"""Several real keepers, and trainers that only write bytes: protection and recovery without torch and torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from keepstep.arena import records as h
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import Arena
from keepstep.config import Config, KeeperConfig, ParityConfig, PeersConfig
from keepstep.control.client import KeeperClient
from keepstep.control.messages import (
    ArenaGiven,
    CardIs,
    Committed,
    Complete,
    Done,
    Goodbye,
    LauncherHello,
    Loaded,
    Membership,
    Protected,
    Register,
    Registered,
    Release,
    RestoreFrom,
    SnapshotSize,
    StatusIs,
    WantArena,
    WantCard,
    WantRestore,
    WantStatus,
)  # fmt: skip
from keepstep.control.spawn import start_keeper
from keepstep.errors import Error
from keepstep.identity import Identity
from keepstep.layout import Layout, digest
from keepstep.types import Incarnation, Status, Version

WAIT_S = 600.0
LAYOUT = Layout((), ()).encode()
BLOCK = 4 << 20


class Trainer:
    """One rank on one node. Its bytes at a step are random blocks with rank, step and block number in them."""

    def __init__(self, node: Node, rank: int, world: int, size_bytes: int, slots: int) -> None:
        self.node, self.rank, self.world, self.size_bytes, self.slots = node, rank, world, size_bytes, slots
        self.changed = threading.Condition()
        self.complete: Version | None = None
        self.protected: Version | None = None
        self.complete_at = self.protected_at = 0.0
        self.used = -1
        self.arena: Arena | None = None
        self.incarnation = Incarnation(0, 0)
        self.client = KeeperClient(node.identity, "trainer", listener=self)

    def register(self, incarnation: Incarnation) -> None:
        register = Register(self.rank, self.world, 0, 1, incarnation, "", 0, 1, self.slots, -1)
        answer, _ = self.client.request(register, Registered, timeout_s=WAIT_S)
        self.incarnation = answer.incarnation

    def restore(self) -> Version | None:
        answer, fds = self.client.request(WantRestore(), RestoreFrom, timeout_s=WAIT_S)
        try:
            if answer.version is not None:
                self._check(answer, fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        self.restored_at = time.monotonic()
        return answer.version

    def _check(self, answer: RestoreFrom, fd: int) -> None:
        """A few blocks: the keepers have checked every byte."""
        identity = self.node.identity
        arena = Arena.adopt(os.dup(fd), run_id=identity.run_id, node_id=identity.node_id)
        assert answer.version is not None
        span = arena.payload_span(answer.slot)
        for number in {0, self.size_bytes // BLOCK // 2, max(0, self.size_bytes // BLOCK - 1)}:
            size = min(BLOCK, self.size_bytes - number * BLOCK)
            found = arena.segment.read(span.offset + number * BLOCK, size)
            assert found == self._block(answer.version.step, number)[:size], f"rank {self.rank}: not its bytes"
        arena.close()

    def _block(self, step: int, number: int) -> bytes:
        seed = f"{self.rank} {step} {number}".encode()
        return xxhash.xxh3_128_digest(seed) * 16 + _noise()[256:]

    def get_ready(self) -> None:
        need = SnapshotSize(len(LAYOUT), 64, self.size_bytes)
        _, fds = self.client.request(WantArena(need, self.slots), ArenaGiven, timeout_s=WAIT_S)
        identity = self.node.identity
        self.arena = Arena.adopt(fds[0], run_id=identity.run_id, node_id=identity.node_id)
        self.arena.write_progress(h.Progress(self.incarnation, -1, 0, 0))  # the memory is ready

    def loaded(self, step: int | None) -> None:
        self.client.request(Loaded(step), Done, timeout_s=WAIT_S)

    def take(self, step: int) -> bool:
        """Write the snapshot if it was granted."""
        assert self.arena is not None
        arena = self.arena
        arena.write_progress(h.Progress(self.incarnation, step, 0, 0))
        granted = arena.grant()
        if granted is None or granted.incarnation != self.incarnation:
            return False
        grant = granted.after(self.used)
        if grant is None or step < grant.step:
            return False
        self.used = grant.serial
        version, values = Version(self.incarnation, step), str(step).encode()
        header = TrainerHeader(
            state=h.WRITING, rank=self.rank, world_size=self.world, local_index=0, local_world_size=1, flags=0,
            version=version, layout_bytes=len(LAYOUT), values_bytes=len(values), payload_bytes=self.size_bytes,
            layout_digest=digest(LAYOUT), written_at=time.time(),
        )  # fmt: skip
        arena.write_trainer_header(grant.slot, header)
        arena.segment.write(arena.layout_span(grant.slot).offset, LAYOUT)
        arena.segment.write(arena.values_span(grant.slot).offset, values)
        at = arena.payload_span(grant.slot).offset
        for number in range(-(-self.size_bytes // BLOCK)):
            size = min(BLOCK, self.size_bytes - number * BLOCK)
            arena.segment.write(at + number * BLOCK, self._block(step, number)[:size])
        arena.write_trainer_header(grant.slot, dataclasses.replace(header, state=h.COMMITTED))
        self.client.post(Committed(arena.arena_id, grant.slot, version))
        return True

    def wait(self, what: Callable[[], bool]) -> None:
        with self.changed:
            if not self.changed.wait_for(what, WAIT_S):
                raise TimeoutError(f"rank {self.rank} waited {WAIT_S:g} s")

    def leave(self) -> None:
        with contextlib.suppress(Error, OSError):
            self.client.post(Goodbye(False))
        self.client.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def on_push(self, message: Any, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        with self.changed:
            if isinstance(message, Complete):
                self.complete, self.complete_at = message.version, time.monotonic()
            elif isinstance(message, Protected):
                self.protected, self.protected_at = message.version, time.monotonic()
            self.changed.notify_all()

    def on_lost(self) -> None:
        pass


_noise_block: list[bytes] = []


def _noise() -> bytes:
    if not _noise_block:
        _noise_block.append(os.urandom(BLOCK))
    return _noise_block[0]


class Node:
    """One keeper, a process of its own; the benchmark is its launcher."""

    def __init__(self, run: Run, node_id: str) -> None:
        self.identity = Identity(run.run_id, node_id, run.directory, outlives_launch=True)
        start_keeper(self.identity, run.config)
        self.launcher = KeeperClient(self.identity, "launcher")
        self.launcher.request(LauncherHello(os.getpid()), Done, timeout_s=WAIT_S)
        self.pid = self.status().keeper.pid
        self.trainer: Trainer | None = None

    def card(self) -> CardIs:
        return self.launcher.request(WantCard(), CardIs, timeout_s=WAIT_S)[0]

    def status(self) -> Status:
        answer, _ = self.launcher.request(WantStatus(), StatusIs, timeout_s=WAIT_S)
        return msgspec.json.decode(answer.json, type=Status)

    def kill(self) -> None:
        """The node is gone: its keeper, and whoever holds its memory."""
        if self.trainer is not None:
            self.trainer.leave()
        os.kill(self.pid, signal.SIGKILL)
        self.launcher.close()

    def release(self) -> None:
        if self.trainer is not None:
            self.trainer.leave()
        with contextlib.suppress(Error):
            self.launcher.request(Release(force=True), Done, timeout_s=30.0)
        self.launcher.close()


class Run:
    """A job of n nodes with one rank each."""

    def __init__(self, directory: Path, *, losses: int, size_bytes: int, slots: int = 2, group_size: int = 36) -> None:
        self.directory, self.size_bytes, self.slots = directory, size_bytes, slots
        self.run_id = f"bench-{secrets.token_hex(4)}"
        self.secret = secrets.token_bytes(32)
        self.config = Config(
            parity=ParityConfig(losses=losses, group_size=group_size), peers=PeersConfig(address="127.0.0.1"),
            keeper=KeeperConfig(lease_s=120.0),
        )  # fmt: skip
        self.nodes: dict[str, Node] = {}
        self.number = 0
        self.step = -1

    def add(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = Node(self, name)

    def start(self) -> dict[str, float]:
        """An incarnation on all nodes; returns when each phase was over, in seconds from its beginning."""
        begun = time.monotonic()
        names = list(self.nodes)
        cards = [self.nodes[name].card() for name in names]
        self.number = 1 + max([self.number, *(card.largest_number for card in cards)])
        incarnation = Incarnation(self.number, secrets.randbits(63))
        for rank, name in enumerate(names):
            told = Membership(incarnation, [card.card for card in cards], rank, self.secret)
            self.nodes[name].launcher.request(told, Done, timeout_s=WAIT_S)
        for rank, name in enumerate(names):
            node = self.nodes[name]
            if node.trainer is not None:
                node.trainer.leave()
            node.trainer = Trainer(node, rank, len(names), self.size_bytes, self.slots)
        self.each(lambda trainer: trainer.register(incarnation))
        registered = time.monotonic()
        versions = set(self.each(lambda trainer: trainer.restore()))
        restored = time.monotonic()
        (version,) = versions
        self.each(lambda trainer: trainer.get_ready())
        self.each(lambda trainer: trainer.loaded(version.step if version else None))
        self.step = version.step if version else self.step
        return {"register": registered - begun, "restore": restored - registered, "ready": time.monotonic() - restored}

    @property
    def trainers(self) -> list[Trainer]:
        return [node.trainer for node in self.nodes.values() if node.trainer is not None]

    def each(self, call: Callable[[Trainer], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.trainers)
        errors: list[BaseException] = []

        def one(index: int, trainer: Trainer) -> None:
            try:
                results[index] = call(trainer)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(self.trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        if errors:
            raise errors[0]
        return results

    def protect(self) -> dict[str, float]:
        """One version from its first byte to its protection on all nodes, seconds of each phase."""
        begun = time.monotonic()
        before = self.trainers[0].protected
        taken: set[int] = set()
        while len(taken) < len(self.trainers):
            self.step += 1
            self.each(lambda trainer: trainer.take(self.step) and taken.add(trainer.rank))
            time.sleep(0.01)
            if time.monotonic() - begun > WAIT_S:
                raise TimeoutError("no grant")
        written = time.monotonic()
        for trainer in self.trainers:
            trainer.wait(lambda t=trainer: t.protected not in (None, before))  # type: ignore[misc]
        complete = max(trainer.complete_at for trainer in self.trainers)
        protected = max(trainer.protected_at for trainer in self.trainers)
        return {"write": written - begun, "seal": complete - written, "protect": protected - complete}

    def close(self) -> None:
        for node in self.nodes.values():
            node.release()
