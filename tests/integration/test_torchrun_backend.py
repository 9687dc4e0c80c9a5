"""`torchrun --rdzv-backend=keepstep` with real agents, workers and keepers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from ports import free_port
from torch.distributed import PrefixStore, TCPStore

from keepstep.control.client import KeeperClient
from keepstep.control.messages import Done, Hold, Release, StatusIs, WantArenas, WantStatus
from keepstep.control.signed_store import DocumentSigner
from keepstep.errors import KeeperError
from keepstep.identity import Identity
from keepstep.launcher.rounds import RoundState
from keepstep.types import Incarnation, Status

# Writes what it knows to <facts>/<incarnation number>.<rank>, then works until <facts>/stop exists.
# `hold`: has an arena made first, keeps no descriptor of it, and says goodbye at the end.
WORKER = """
import json, os, sys
from pathlib import Path

facts, mode = Path(sys.argv[1]), sys.argv[2]
names = ["RANK", "MASTER_PORT", "KEEPSTEP_INCARNATION", "KEEPSTEP_RUN_ID", "KEEPSTEP_NODE_ID", "KEEPSTEP_RUNTIME_DIR"]
known = {name: os.environ[name] for name in names} | {"pid": os.getpid(), "arena": "", "fresh": None}
number = known["KEEPSTEP_INCARNATION"].partition(":")[0]

def tell():
    written = facts / f"new.{os.getpid()}"
    written.write_text(json.dumps(known))
    written.rename(facts / f"{number}.{known['RANK']}")

if mode == "fail":
    tell()
    sys.exit(3)

if mode == "hold":
    from keepstep.control.client import KeeperClient
    from keepstep.config import resolve
    from keepstep.identity import identify
    from keepstep.control.messages import *
    from keepstep.types import Incarnation

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    incarnation = Incarnation.parse(os.environ["KEEPSTEP_INCARNATION"])
    client = KeeperClient(identify(resolve()), "trainer")
    client.request(Register(rank, 2, local, 2, incarnation, "", os.getppid(), 1, 2, -1), Registered, timeout_s=20)
    given, fds = client.request(WantArena(SnapshotSize(1 << 16, 1 << 16, 1 << 20), 2), ArenaGiven, timeout_s=20)
    for fd in fds:
        os.close(fd)
    known |= {"arena": given.arena_id, "fresh": given.fresh}

import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
stop = torch.zeros(1)
dist.all_reduce(stop)
tell()
while not stop:
    time.sleep(0.05)
    stop += (facts / "stop").exists()
    dist.all_reduce(stop)
if mode == "hold":
    client.post(Goodbye(finished=True))
dist.destroy_process_group()
"""


@dataclass
class Job:
    """What a test started and what it left. `close` ends it all, by pid."""

    base: Path
    run_id: str = "torchrun-test"
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)

    def start(self, *options: str, node: str = "a", mode: str = "work", **environ: str) -> subprocess.Popen[bytes]:
        """Start an agent. Options are torchrun's; the rendezvous backend is ours."""
        self.nodes.add(node)
        script = self.base / "worker.py"
        script.write_text(WORKER)
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=keepstep", *options]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCH"))}
        ours = {
            "KEEPSTEP_NODE_ID": node, "KEEPSTEP_RUNTIME_DIR": str(self.base / "r"),
            "PYTHONFAULTHANDLER": "1", "TMPDIR": str(self.base),  # torchrun leaves its log directories there
        }  # fmt: skip
        with open(self.log(len(self.agents)), "wb") as output:
            agent = subprocess.Popen(
                [*command, str(script), str(self.base), mode],
                env=clean | ours | environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self.agents.append(agent)
        return agent

    def log(self, index: int) -> Path:
        return self.base / f"agent{index}.log"

    def round(self, number: int, size: int = 2, *, timeout_s: float = 100.0) -> list[dict[str, Any]]:
        """Wait until all ranks of an incarnation are at work; returns what they know, by rank."""
        paths = [self.base / f"{number}.{rank}" for rank in range(size)]
        wait_until(lambda: all(path.exists() for path in paths), timeout_s, self.say_where_it_hangs)
        return [json.loads(path.read_text()) for path in paths]

    def workers(self) -> list[int]:
        return [json.loads(path.read_text())["pid"] for path in self.base.glob("[0-9]*.[0-9]*")]

    def finish(self, timeout_s: float = 60.0) -> list[int]:
        (self.base / "stop").touch()
        return [agent.wait(timeout_s) for agent in self.agents]

    def say(self) -> str:
        return "\n".join(self.log(index).read_text()[-6000:] for index in range(len(self.agents)))

    def say_where_it_hangs(self) -> str:
        """Have every agent and worker dump its threads into the log (PYTHONFAULTHANDLER), and die."""
        agents = [psutil.Process(agent.pid) for agent in self.agents if agent.poll() is None]
        for process in [child for agent in agents for child in agent.children()] + agents:
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(5)
        return self.say()

    # The keeper

    def identity(self, node: str = "a") -> Identity:
        return Identity(self.run_id, node, self.base / "r", outlives_launch=True)

    def keeper(self, node: str = "a") -> int | None:
        with contextlib.suppress(OSError):
            return int(json.loads(self.identity(node).card.read_text())["pid"])
        return None

    def ask(self, message: Any, expect: type[Any], node: str = "a") -> Any:
        client = KeeperClient(self.identity(node), "cli")
        try:
            answer, fds = client.request(message, expect, timeout_s=10)
        finally:
            client.close()
        for fd in fds:
            os.close(fd)
        return answer

    def status(self, node: str = "a") -> Status | None:
        with contextlib.suppress(KeeperError):
            return msgspec.json.decode(self.ask(WantStatus(), StatusIs, node).json, type=Status)
        return None

    def holds(self, instance: str, num_arenas: int) -> bool:
        """A keeper other than `instance` serves, and the agent holds all its arenas too."""
        found = self.status()
        if found is None or found.keeper.instance == instance or found.keeper.holders < 1:
            return False
        return len(self.ask(WantArenas(), Hold).arena_ids) == num_arenas

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(20)
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in self.nodes:
            with contextlib.suppress(KeeperError):
                self.ask(Release(force=True), Done, node)
        wait_until(lambda: not (self.base / "r").exists(), 20)
        shutil.rmtree(self.base)

    def assert_nothing_is_left(self, keepers: list[int]) -> None:
        wait_until(lambda: not any(exists(pid) for pid in [*keepers, *self.workers()]), 10)
        wait_until(lambda: not (self.base / "r").exists(), 10)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(Path(tempfile.mkdtemp(dir="/tmp")))
    try:
        yield made
    finally:
        made.close()


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], timeout_s: float, say: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.02)


def incarnations(workers: list[dict[str, Any]]) -> set[Incarnation]:
    return {Incarnation.parse(worker["KEEPSTEP_INCARNATION"]) for worker in workers}


pytestmark = pytest.mark.timeout(240)  # rounds take 5 s here, and 40 s on two cores with a load of 8

ONE_NODE = ("--rdzv-id=torchrun-test", "--nproc-per-node=2", "--max-restarts=5")


@pytest.mark.parametrize("shared_store", ["unset", "disabled"])
def test_a_killed_worker_starts_the_next_incarnation_with_a_store_of_its_own(job: Job, shared_store: str) -> None:
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if shared_store == "disabled" else {}
    job.start(*ONE_NODE, **environ)
    first = job.round(1)
    keeper = job.keeper()
    assert keeper is not None
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = job.round(2)
    assert len(incarnations(first)) == len(incarnations(second)) == 1
    assert incarnations(first).pop().nonce != incarnations(second).pop().nonce
    assert len({worker["MASTER_PORT"] for worker in [*first, *second]}) == 2
    for worker in [*first, *second]:
        assert worker["KEEPSTEP_RUN_ID"] == "torchrun-test"
        assert worker["KEEPSTEP_NODE_ID"] == "a"
        assert worker["KEEPSTEP_RUNTIME_DIR"] == str(job.base / "r")
    assert job.keeper() == keeper
    assert job.finish() == [0]
    job.assert_nothing_is_left([keeper])


def test_a_killed_keeper_is_started_again_and_given_back_what_the_agent_holds(job: Job) -> None:
    job.start(*ONE_NODE, mode="hold")
    first = job.round(1)
    wait_until(lambda: job.holds("", 2), 10)
    before, arenas = job.status(), set(job.ask(WantArenas(), Hold).arena_ids)
    assert before is not None
    assert arenas == {worker["arena"] for worker in first}
    os.kill(before.keeper.pid, signal.SIGKILL)
    wait_until(lambda: job.holds(before.keeper.instance, 2), 10)
    after = job.status()
    assert after is not None
    assert set(job.ask(WantArenas(), Hold).arena_ids) == arenas
    assert (after.incarnation, after.memory_bytes) == (1, before.memory_bytes)
    assert after.keeper.launcher_alive
    # The workers never noticed; what they start next finds its memory.
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.round(2)
    assert [(w["arena"], w["fresh"]) for w in second] == [(w["arena"], False) for w in first]
    assert job.finish() == [0]
    job.assert_nothing_is_left([before.keeper.pid, after.keeper.pid])


def test_a_keeper_killed_together_with_all_workers_loses_nothing(job: Job) -> None:
    job.start(*ONE_NODE, mode="hold")
    first = job.round(1)
    wait_until(lambda: job.holds("", 2), 10)
    keeper = job.keeper()
    assert keeper is not None
    for pid in [keeper, *(worker["pid"] for worker in first)]:
        os.kill(pid, signal.SIGKILL)
    second = job.round(2)
    assert [(w["arena"], w["fresh"]) for w in second] == [(w["arena"], False) for w in first]
    assert job.finish() == [0]
    job.assert_nothing_is_left([keeper])


def test_a_job_without_a_name_is_refused(job: Job) -> None:
    agent = job.start("--nproc-per-node=1")
    assert agent.wait(60) != 0
    assert "this job has no run id" in job.say()
    assert "--rdzv-id=<a name>" in job.say()
    assert not job.workers()
    assert not (job.base / "r").exists()


def test_the_run_id_of_the_environment_names_a_job_that_torchrun_does_not(job: Job) -> None:
    job.run_id = "named"
    job.start("--nproc-per-node=1", mode="fail", KEEPSTEP_RUN_ID="named")
    assert [worker["KEEPSTEP_RUN_ID"] for worker in job.round(1, 1)] == ["named"]


def test_several_nodes_without_restarts_are_refused(job: Job) -> None:
    agent = job.start("--nnodes=2", "--rdzv-id=x", f"--rdzv-endpoint=localhost:{free_port()}")
    assert agent.wait(60) != 0
    assert "--max-restarts=0" in job.say()
    assert not (job.base / "r").exists()


def test_the_restart_budget_ends_the_job(job: Job) -> None:
    agent = job.start(*ONE_NODE, mode="fail", KEEPSTEP_LAUNCH_RESTARTS="1")
    assert agent.wait(60) != 0
    assert "launch.restarts allows 1" in job.say()
    assert {path.name.partition(".")[0] for path in job.base.glob("[0-9]*.[0-9]*")} == {"1", "2"}
    job.assert_nothing_is_left([])


def two_nodes(port: int, host: bool) -> tuple[str, ...]:
    conf = f"is_host={int(host)},keep_alive_interval=1,keep_alive_max_attempt=4"
    return (
        "--rdzv-id=torchrun-test", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=5",
        f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={conf}", "--local-addr=localhost",
    )  # fmt: skip


def test_two_agents_agree_on_one_incarnation_and_recover_from_a_killed_worker(job: Job) -> None:
    port = free_port()
    job.start(*two_nodes(port, True), node="a")
    job.start(*two_nodes(port, False), node="b")
    first = job.round(1)
    keepers = [pid for node in "ab" if (pid := job.keeper(node)) is not None]
    assert len(set(keepers)) == 2
    assert job.say().count("the store of this job is open") == 1  # said by node 0 alone
    assert {worker["KEEPSTEP_NODE_ID"] for worker in first} == {"a", "b"}
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = job.round(2)
    for workers in (first, second):
        assert len(incarnations(workers)) == 1
        assert len({worker["MASTER_PORT"] for worker in workers}) == 1
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    assert job.finish() == [0, 0]
    job.assert_nothing_is_left(keepers)


def test_with_a_secret_file_nobody_ends_the_job_through_its_store(job: Job) -> None:
    secret, port = job.base / "secret", free_port()
    secret.write_text("a secret of this job, 32 bytes..")
    secret.chmod(0o600)
    job.start(*two_nodes(port, True), node="a", KEEPSTEP_SECRET_FILE=str(secret))
    job.start(*two_nodes(port, False), node="b", KEEPSTEP_SECRET_FILE=str(secret))
    workers = job.round(1)
    client = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    stranger = PrefixStore("keepstep.torchrun-test", client)
    ended = RoundState(round=1, closed=True, broken="ended by a stranger", revision=1 << 62)
    forged = DocumentSigner("torchrun-test", b"").sign("board", msgspec.json.encode(ended).decode())
    stranger.set("board", forged)
    stranger.add("changes", 1)
    wait_until(lambda: stranger.get("board").decode() != forged, 60, job.say)

    def problems() -> str:  # of the node that was the first to read it, and wrote the document again
        return str([status.problems for node in "ab" if (status := job.status(node)) is not None])

    wait_until(lambda: "were ignored" in problems(), 60, lambda: problems() + job.say())
    assert "it is not signed" in problems()
    status = job.status()
    assert status is not None
    assert status.security == "secret file"
    assert all(exists(worker["pid"]) for worker in workers)
    assert "the store of this job is open" not in job.say()
    assert job.finish() == [0, 0]


def test_a_frozen_store_host_does_not_block_the_other_agent(job: Job) -> None:
    port = free_port()
    host = job.start(*two_nodes(port, True), node="a")
    other = job.start(*two_nodes(port, False), node="b")
    job.round(1)
    host.send_signal(signal.SIGSTOP)
    time.sleep(3)  # by now a call into the store has been made, and hangs
    other.terminate()
    assert other.wait(20) == 1


def test_a_new_agent_takes_the_place_of_a_killed_one_and_numbers_go_on(job: Job) -> None:
    port = free_port()
    job.start(*two_nodes(port, True), node="a")
    lost = job.start(*two_nodes(port, False), node="b")
    first = {worker["KEEPSTEP_NODE_ID"]: worker for worker in job.round(1)}
    lost.kill()
    os.kill(first["b"]["pid"], signal.SIGKILL)
    job.start(*two_nodes(port, False), node="b")
    second = job.round(2)
    assert len(incarnations(second)) == 1
    assert job.finish() == [0, -signal.SIGKILL, 0]
