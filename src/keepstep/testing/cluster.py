"""Many nodes on one machine: real agents, keepers and trainers, and ways to break them.

    with LocalCluster(nodes=4, script="train.py") as cluster:
        cluster.train(until=40)
        cluster.node(2).kill()
        cluster.replace(2)
        assert cluster.restored.source == "parity"
        assert cluster.result() == undisturbed.result()

A node is an agent (`torchrun --rdzv-backend=keepstep`), its trainers and its keeper, with a node id, a runtime
directory and an address of their own. The rendezvous store is a process beside them: any node may die.
Scripts report through `keepstep.testing.facts`. Every wait has a deadline, and its error shows the end of every
node's log. The end of the block ends everything, and raises if a process or a file remains.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keepstep.testing.facts import FACTS, Facts
from keepstep.testing.network import Loopback, Network
from keepstep.testing.node import CLUSTER, END_S, Node
from keepstep.testing.run import marked_processes, wait_until
from keepstep.types import Status

__all__ = ["LocalCluster", "Node", "RestoredRecord"]

WAIT_S = 120.0  # Rounds take seconds, and a minute where two cores serve thirty processes.
LOG_TAIL_BYTES = 4000

STORE = """
import sys, threading
from keepstep.launcher.store import serve
store = serve(sys.argv[1], 0)
print(store.port, flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class RestoredRecord:
    """The version that all trainers of the newest incarnation restored."""

    step: int | None  # None: a first start.
    source: str  # memory, parity or disk: the furthest source that any rank needed.
    survives: str
    plan: list[str]  # of rank 0
    incarnation: int
    nodes: list[str]  # node ids, by the rank of their first trainer
    at: float  # time.time() when the last rank had restored


class LocalCluster:
    """A job of `nodes` nodes (at least `min_nodes` of them), and `spares` more that wait for a place."""

    def __init__(
        self,
        *,
        nodes: int,
        script: str | Path,
        arguments: Sequence[str] = (),
        trainers: int = 1,
        spares: int = 0,
        min_nodes: int = 0,
        environ: Mapping[str, str] | None = None,
        network: Network | None = None,
        backend: str = "keepstep",
    ) -> None:
        """`backend`: of torchrun. With c10d, scripts must set KEEPSTEP_INCARNATION in their own environment."""
        self.size, self.trainers, self._min_nodes = nodes, trainers, min_nodes or nodes
        self._script, self._arguments, self._num_spares = Path(script).resolve(), list(arguments), spares
        self._extra = dict(environ or {})
        self.network: Network = network or Loopback()
        self._backend = backend
        self.mark = uuid.uuid4().hex
        self.run_id = f"cluster-{self.mark[:8]}"
        # Short: a unix socket path has 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="ks-", dir="/tmp"))
        (self.directory / "facts").mkdir()
        self.facts = Facts(self.directory / "facts")
        self.nodes: list[Node] = []  # By the place they were started for; a replaced node is in `gone`.
        self.gone: list[Node] = []
        self.spares: list[Node] = []
        self._store: subprocess.Popen[str] | None = None
        self._endpoint = ""
        self._at_least = 0

    # Training and failures

    def start(self) -> Self:
        """Start the store and all nodes. Returns at once: training begins when all have joined."""
        self.network.open()
        self._start_store()
        self.nodes = [Node(self, f"node{index}").start() for index in range(self.size)]
        for _ in range(self._num_spares):
            self.add_spare()
        return self

    def node(self, index: int) -> Node:
        return self.nodes[index]

    def replace(self, index: int) -> Node:
        """Start an empty node with another id and address in place of one that is lost."""
        former = self.nodes[index]
        self.gone.append(former)
        self.nodes[index] = Node(self, f"{former.node_id}b").start()
        return self.nodes[index]

    def kill_store(self) -> None:
        """Kill the rendezvous store. No new round can begin without it."""
        assert self._store is not None
        self._store.kill()
        self._store.communicate()

    def train(self, *, until: int, timeout_s: float = WAIT_S) -> None:
        """Start if necessary, and wait until every rank has done this step since the last failure."""
        if not self.nodes:
            self.start()
        self.wait_step(until, timeout_s=timeout_s)

    def wait_step(self, step: int, *, timeout_s: float = WAIT_S) -> None:
        self._wait(lambda: self._all_have("step", lambda fact: fact["step"] >= step), f"step {step}", timeout_s)

    def disturbed(self) -> None:
        """A failure was injected: facts that are waited for must be of a later incarnation from now on."""
        self._at_least = self.incarnation + 1

    @property
    def incarnation(self) -> int:
        """The newest incarnation that a trainer reported; 0 before the first."""
        return max((int(fact["incarnation"]) for fact in self.facts), default=0)

    @property
    def step(self) -> int:
        """The last step that every rank of the newest incarnation has done; -1 before the first."""
        facts = self._newest("step")
        return min(int(fact["step"]) for fact in facts) if facts else -1

    @property
    def restored(self) -> RestoredRecord:
        """The restore of the newest incarnation. After a failure it waits for the next incarnation."""
        self._wait(lambda: self._all_have("restored"), "the restore", WAIT_S)
        facts = self._newest("restored")
        steps = {fact["step"] for fact in facts}
        assert len(steps) == 1, f"ranks restored different steps: {facts}"
        furthest = max(facts, key=lambda fact: ["", "memory", "parity", "disk"].index(fact["source"]))
        return RestoredRecord(
            facts[0]["step"], furthest["source"], facts[0]["survives"], facts[0]["plan"], facts[0]["incarnation"],
            [fact["node"] for fact in facts[:: self.trainers]], max(fact["at"] for fact in facts),
        )  # fmt: skip

    def result(self, *, timeout_s: float = WAIT_S) -> list[Any]:
        """The digests that the trainers reported at their end, by rank, once their agents have exited with code 0."""
        self._wait(lambda: self._all_have("result"), "results", timeout_s)
        facts = self._newest("result")
        members = [node for node in self._every if node.node_id in {fact["node"] for fact in facts}]
        agents = [node.agent for node in members if node.agent is not None]
        self._wait(lambda: all(agent.poll() == 0 for agent in agents), "the end of the agents", timeout_s, members)
        return [fact["digest"] for fact in facts]

    def add_spare(self) -> Node:
        """Start one more node, which waits for a place."""
        self.spares.append(Node(self, f"spare{len(self.spares)}").start())
        return self.spares[-1]

    def status(self, index: int) -> Status:
        return self.nodes[index].status()

    def tails(self) -> str:
        """The end of every node's log."""
        parts = []
        for path in sorted(self.directory.glob("*.log")):
            text = path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            parts.append(f"--- {path.stem}\n{text}")
        return "\n".join(parts)

    # The end

    def close(self) -> None:
        """End everything. Raises AssertionError if a process or a file remains."""
        every = self._every
        try:
            for node in every:
                node.thaw()
                if node.agent is not None:
                    node.agent.kill()
                    node.agent.wait(END_S)
                for pid in [] if node.killed else set(node.processes()) - {node.keeper_pid()}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for node in every:
                node.release()
            if self._store is not None and self._store.returncode is None:
                self.kill_store()
            wait_until(lambda: not self._left(), timeout_s=END_S, what=lambda: f"the end of {self._left()}")
        finally:
            for pid in marked_processes(f"{CLUSTER}={self.mark}".encode()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.network.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _left(self) -> list[str]:
        """Processes (which alone can hold memfds), and files of keepers that were not killed."""
        left = [f"process {pid}" for pid in marked_processes(f"{CLUSTER}={self.mark}".encode())]
        for node in self._every:
            if not node.killed:
                # Unlike rglob, os.walk ignores files that disappear meanwhile.
                for directory, _, names in os.walk(node.identity.runtime_dir):
                    left += [directory, *(f"{directory}/{name}" for name in names)]
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Commands

    @property
    def environ(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCH"))}
        ours = {
            CLUSTER: self.mark, FACTS: str(self.directory / "facts"), "KEEPSTEP_RUN_ID": self.run_id,
            "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.directory),  # torchrun leaves its log directories there.
        }  # fmt: skip
        return clean | ours | self._extra

    def agent_command(self, address: str) -> list[str]:
        sizes = str(self.size) if self._min_nodes == self.size else f"{self._min_nodes}:{self.size}"
        return [
            sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={self._backend}",
            f"--rdzv-id={self.run_id}", f"--nnodes={sizes}", f"--nproc-per-node={self.trainers}",
            "--max-restarts=100", f"--rdzv-endpoint={self._endpoint}", "--rdzv-conf=is_host=0",
            f"--local-addr={address}", str(self._script), *self._arguments,
        ]  # fmt: skip

    def _start_store(self) -> None:
        address = self.network.store_address
        command = self.network.inside("", [sys.executable, "-c", STORE, address])
        with (self.directory / "store.log").open("wb") as log:
            self._store = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._store.stdout is not None
        port = self._store.stdout.readline().strip()
        assert port, f"the store did not start\n{self.tails()}"
        self._endpoint = f"{address}:{port}"

    # Facts of the trainers

    def _newest(self, event: str) -> list[dict[str, Any]]:
        """The last fact of this kind from each rank of the newest incarnation, by rank."""
        number = max(self.incarnation, self._at_least)
        last = {fact["rank"]: fact for fact in self.facts if fact["event"] == event and fact["incarnation"] == number}
        return [last[rank] for rank in sorted(last)]

    def _all_have(self, event: str, holds: Callable[[dict[str, Any]], bool] = lambda fact: True) -> bool:
        facts = self._newest(event)
        return bool(facts) and len(facts) == facts[0]["world_size"] and all(holds(fact) for fact in facts)

    @property
    def _every(self) -> list[Node]:
        return [*self.gone, *self.nodes, *self.spares]

    def _wait(
        self, condition: Callable[[], Any], what: str, timeout_s: float, among: Sequence[Node] | None = None
    ) -> None:
        """`among`: the nodes whose agents must not end with an error meanwhile."""
        among = self.nodes if among is None else among
        deadline = time.monotonic() + timeout_s
        while not condition():
            failed = [n for n in among if not n.killed and n.agent is not None and n.agent.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                reason = f"{failed[0].node_id} ended with an error" if failed else f"not within {timeout_s:g} s"
                raise AssertionError(f"waited for {what}: {reason}\n{self.tails()}")
            time.sleep(0.05)
