"""A peer with the secret and a local process send as much as they can for a minute, to real keepers."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import statistics
import time
from pathlib import Path

import pytest
from test_strangers import SilentListener

from keepstep.config import PeersConfig
from keepstep.control import messages as control
from keepstep.control.client import KeeperClient
from keepstep.control.framing import pack
from keepstep.keeper.coordinator import messages
from keepstep.keeper.coordinator.messages import Report
from keepstep.testing.cluster import LocalCluster
from keepstep.transport.interface import Peer
from keepstep.transport.tcp import TcpTransport
from keepstep.types import Incarnation

SCRIPT = Path(__file__).parents[1] / "integration" / "cluster_trainer.py"
FLOOD_S = 60.0
MAX_LOG_BYTES = 2 << 20  # a minute of it; the log as a whole is bounded by its rotation
ANSWER_S = 0.5  # the median: a busy machine may delay one


@pytest.mark.timeout(400)
def test_floods_neither_fill_the_log_nor_delay_the_status() -> None:
    draw = random.Random(secrets.randbits(32))
    with LocalCluster(nodes=2, script=SCRIPT, arguments=["1000000"]) as cluster:
        cluster.train(until=20)
        identity = cluster.node(0).identity
        with contextlib.closing(KeeperClient(identity, "cli")) as client:
            card = client.request(control.WantCard(), control.CardIs, timeout_s=20)[0]
        before, step = log_bytes(identity.directory), cluster.step
        guest = TcpTransport(
            Peer("guest", "x"), identity.run_id, card.secret, PeersConfig(address=card.card.address, dead_s=1.0),
            SilentListener(),
        )  # fmt: skip
        guest.set_peers([Peer(card.card.node_id, card.card.instance, card.card.address, card.card.port)])
        answers, end = [], time.monotonic() + FLOOD_S
        report = Report("guest", "x", Incarnation(cluster.incarnation, 0), 1, "serving", card.card)
        try:
            while time.monotonic() < end:
                for _ in range(50):
                    guest.send(card.card.node_id, draw.choice([messages.encode(report), b"", os.urandom(64)]))
                with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock, contextlib.suppress(OSError):
                    sock.settimeout(5)
                    sock.connect(str(identity.control_socket))
                    sock.sendall(pack(control.Held(["x"])) + os.urandom(32))
                started = time.monotonic()
                status = cluster.node(0).status()
                answers.append(time.monotonic() - started)
        finally:
            guest.close()
        assert status.keeper.pid == cluster.node(0).keeper_pid()
        assert log_bytes(identity.directory) - before < MAX_LOG_BYTES
        assert statistics.median(answers) < ANSWER_S
        cluster.wait_step(step + 20)
        assert cluster.incarnation == 1


def log_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("keeper.log*"))
