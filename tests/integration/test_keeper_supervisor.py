"""KeeperSupervisor with real keepers, and a trainer that holds no memory itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.config import Config
from keepstep.control.client import KeeperClient
from keepstep.control.messages import Done, Hold, Release, StatusIs, WantArenas, WantStatus
from keepstep.errors import KeeperError
from keepstep.identity import Identity
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.types import Status

# Registers, has an arena made, closes every descriptor it gets, and waits to be told to say goodbye.
TRAINER = """
import os, sys
from keepstep.control.client import KeeperClient
from keepstep.config import resolve
from keepstep.identity import identify
from keepstep.control.messages import *
from keepstep.types import Incarnation

client = KeeperClient(identify(resolve()), "trainer")
register = Register(0, 1, 0, 1, Incarnation(int(sys.argv[1]), 7), "", 0, 1, 2, -1)
client.request(register, Registered, timeout_s=20)
given, fds = client.request(WantArena(SnapshotSize(1 << 16, 1 << 16, 1 << 20), 2), ArenaGiven, timeout_s=20)
for fd in fds:
    os.close(fd)
print(given.arena_id, given.fresh, flush=True)
sys.stdin.readline()
client.post(Goodbye(finished=True))
sys.stdin.readline()
"""


@dataclass
class Node:
    """A run on this machine: its identity, and whatever a test started."""

    identity: Identity
    config: Config
    trainers: list[subprocess.Popen[str]] = field(default_factory=list)
    keepers: set[int] = field(default_factory=set)

    def ask(self, message: Any, expect: type[Any]) -> tuple[Any, list[int]]:
        client = KeeperClient(self.identity, "cli")
        try:
            self.keepers.add(client.welcome.keeper_pid)
            return client.request(message, expect, timeout_s=10)
        finally:
            client.close()

    def status(self) -> Status:
        return msgspec.json.decode(self.ask(WantStatus(), StatusIs)[0].json, type=Status)

    def arenas(self) -> list[str]:
        held, fds = self.ask(WantArenas(), Hold)
        for fd in fds:
            os.close(fd)
        return sorted(held.arena_ids)

    def start_trainer(self, incarnation: int) -> tuple[str, bool]:
        """Returns the arena it got, and whether that was a new one."""
        environ = os.environ | {
            "KEEPSTEP_RUN_ID": self.identity.run_id, "KEEPSTEP_NODE_ID": self.identity.node_id,
            "KEEPSTEP_RUNTIME_DIR": str(self.identity.runtime_dir),
        }  # fmt: skip
        command = [sys.executable, "-c", TRAINER, str(incarnation)]
        pipe = subprocess.PIPE
        self.trainers.append(subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True))
        assert self.trainers[-1].stdout is not None
        arena_id, fresh = self.trainers[-1].stdout.readline().split()
        return arena_id, fresh == "True"

    def say_goodbye(self) -> None:
        stdin = self.trainers[-1].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    def kill_keeper(self) -> int:
        pid = int(json.loads(self.identity.card.read_text())["pid"])
        self.keepers.add(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not exists(pid))
        return pid


@pytest.fixture
def node() -> Iterator[Node]:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    made = Node(Identity("holder-test", "node", base / "r", outlives_launch=True), Config())
    try:
        yield made
    finally:
        for trainer in made.trainers:
            trainer.kill()
            trainer.communicate()
        with contextlib.suppress(KeeperError):
            made.ask(Release(force=True), Done)
        wait_until(lambda: not any(exists(pid) for pid in made.keepers))
        wait_until(lambda: not any(base.iterdir()))
        base.rmdir()


@pytest.fixture
def holder(node: Node) -> Iterator[KeeperSupervisor]:
    made = KeeperSupervisor(node.identity, node.config)
    try:
        yield made
    finally:
        made.close()


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(node: Node) -> bool:
    with contextlib.suppress(KeeperError):
        return node.status().keeper.holders == 1
    return False


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_killed_keepers_get_the_memory_back_from_the_launcher_alone(node: Node, holder: KeeperSupervisor) -> None:
    assert holder.status(timeout_s=20, patient=False).memory_bytes == 0
    arena_id, fresh = node.start_trainer(1)
    assert fresh
    wait_until(lambda: answers(node))
    memory, fds = node.status().memory_bytes, open_fds()
    for _ in range(4):
        node.kill_keeper()
        wait_until(lambda: answers(node))
        assert node.arenas() == [arena_id]
        assert node.status().memory_bytes == memory
    assert holder.status(timeout_s=20, patient=True).incarnation == 1
    assert open_fds() == fds
    node.trainers[-1].kill()
    assert node.start_trainer(2) == (arena_id, False)


def test_a_keeper_that_ends_on_purpose_is_replaced_only_when_asked_for(node: Node, holder: KeeperSupervisor) -> None:
    before = open_fds()
    first = holder.status(timeout_s=20, patient=False).keeper
    node.start_trainer(1)
    wait_until(lambda: answers(node))
    node.keepers.add(first.pid)
    node.say_goodbye()
    wait_until(lambda: not exists(first.pid))
    time.sleep(0.5)
    assert not node.identity.directory.exists()
    node.trainers[-1].communicate("\n")
    assert open_fds() <= before + 1  # the lost connection at most: the memory is let go
    second = holder.status(timeout_s=20, patient=True).keeper
    assert second.instance != first.instance
    assert second.launcher_alive


def test_a_launch_right_after_the_last_one_waits_for_the_old_keeper_to_go(node: Node) -> None:
    for _ in range(5):
        launcher = KeeperSupervisor(node.identity, node.config)
        try:
            node.keepers.add(launcher.status(timeout_s=20, patient=False).keeper.pid)
        finally:
            launcher.close()
    assert len(node.keepers) == 5


def test_the_end_of_the_launcher_ends_a_keeper_that_keeps_nothing(node: Node, holder: KeeperSupervisor) -> None:
    node.keepers.add(holder.status(timeout_s=20, patient=False).keeper.pid)
    holder.close()
    wait_until(lambda: not node.identity.runtime_dir.exists())


def test_the_end_of_the_launcher_leaves_a_keeper_that_holds_state(node: Node, holder: KeeperSupervisor) -> None:
    holder.status(timeout_s=20, patient=False)
    arena_id, _ = node.start_trainer(1)
    wait_until(lambda: answers(node))
    holder.close()
    node.trainers[-1].kill()
    assert node.arenas() == [arena_id]


def test_a_keeper_that_cannot_start_is_an_error_with_the_reason(node: Node) -> None:
    base = node.identity.runtime_dir.parent
    nowhere = KeeperSupervisor(Identity("r", "n", base / ("x" * 100), outlives_launch=True), node.config)
    try:
        started = time.monotonic()
        with pytest.raises(KeeperError, match="too long for a unix socket path"):
            nowhere.status(timeout_s=100, patient=False)
        assert time.monotonic() - started < 50, "it waited for a keeper that is not there"
    finally:
        nowhere.close()
