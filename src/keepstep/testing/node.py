"""One node of a LocalCluster: an agent, its trainers and its keeper, with ways to break and to inspect them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from keepstep.control.client import KeeperClient
from keepstep.control.messages import Done, Release, StatusIs, WantStatus
from keepstep.errors import KeeperError
from keepstep.identity import Identity
from keepstep.testing.run import alive, keeper_pid, marked_processes, wait_until
from keepstep.types import Status

if TYPE_CHECKING:
    from keepstep.testing.cluster import LocalCluster

CLUSTER, NODE = "KEEPSTEP_TEST_CLUSTER", "KEEPSTEP_TEST_NODE"
END_S = 20.0


class Node:
    """One node of a cluster, started by the cluster."""

    def __init__(self, cluster: LocalCluster, node_id: str) -> None:
        self._cluster, self.node_id = cluster, node_id
        self.address = cluster.network.add(node_id)
        self.identity = Identity(cluster.run_id, node_id, cluster.directory / node_id, outlives_launch=True)
        self.log = cluster.directory / f"{node_id}.log"
        self.agent: subprocess.Popen[bytes] | None = None
        self.killed = False

    def start(self) -> Self:
        cluster = self._cluster
        environ = cluster.environ | {
            "KEEPSTEP_NODE_ID": self.node_id, "KEEPSTEP_RUNTIME_DIR": str(self.identity.runtime_dir),
            "KEEPSTEP_PEERS_ADDRESS": self.address, NODE: self.node_id,
        } | cluster.network.environ(self.node_id)  # fmt: skip
        command = cluster.network.inside(self.node_id, cluster.agent_command(self.address))
        with self.log.open("ab") as log:
            self.agent = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.killed = False
        return self

    # Breaking it

    def kill(self) -> None:
        """SIGKILL everything on the node at once, as a power failure does."""
        self._cluster.disturbed()
        self.killed = True
        # Stopped first, so that no process of the node sees another one die.
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            self._signal(sign)
        wait_until(lambda: not self._signal(signal.SIGKILL), timeout_s=END_S, what=f"the end of {self.node_id}")
        if self.agent is not None:
            self.agent.wait(END_S)

    def freeze(self) -> None:
        """SIGSTOP everything: the node hangs, and its connections stay open."""
        self._cluster.disturbed()
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill_trainer(self, local: int = 0) -> int:
        """SIGKILL one trainer. Returns its pid."""
        pid = self.trainers()[local]
        self._cluster.disturbed()
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_agent(self) -> None:
        """SIGKILL the launcher only: its trainers and its keeper go on."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait(END_S)

    def kill_keeper(self) -> int:
        """SIGKILL the keeper only, which must not disturb training. Returns its pid."""
        pid = self.keeper_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), what=f"the end of keeper {pid}")
        return pid

    # Inspecting it

    def processes(self) -> list[int]:
        mark = f"{NODE}={self.node_id}".encode()
        return marked_processes(mark, f"{CLUSTER}={self._cluster.mark}".encode())

    def trainers(self) -> dict[int, int]:
        """Pids by local rank, without the trainers' own children."""
        pids: dict[int, int] = {}
        for local in range(self._cluster.trainers):
            for pid in marked_processes(f"{CLUSTER}={self._cluster.mark}".encode(), f"LOCAL_RANK={local}".encode()):
                if self.agent is not None and _parent(pid) == self.agent.pid:
                    pids[local] = pid
        return pids

    def keeper_pid(self) -> int:
        return keeper_pid(self.identity)

    def status(self) -> Status:
        client = KeeperClient(self.identity, "cli")
        try:
            return msgspec.json.decode(client.request(WantStatus(), StatusIs, timeout_s=END_S)[0].json, type=Status)
        finally:
            client.close()

    def release(self) -> None:
        """End the keeper, if one runs."""
        with contextlib.suppress(KeeperError):
            client = KeeperClient(self.identity, "cli")
            try:
                client.request(Release(force=True), Done, timeout_s=END_S)
            finally:
                client.close()

    def _signal(self, sign: signal.Signals) -> list[int]:
        pids = self.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        return pids


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
