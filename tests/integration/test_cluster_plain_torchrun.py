"""Several nodes under torchrun's own rendezvous: trainers agree among themselves, and keepers learn their peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.testing.cluster import LocalCluster

SCRIPT = Path(__file__).with_name("cluster_trainer.py")
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torch 2.13 hangs in restarts without it, keepstep or not

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("order", [pytest.param("early", marks=pytest.mark.chaos), "late"])
def test_trainers_of_two_nodes_agree_on_each_incarnation_before_or_after_they_have_a_group(order: str) -> None:
    arguments = ["60", "0.05", "1", *(["early"] if order == "early" else [])]
    with LocalCluster(
        nodes=2, trainers=2, script=SCRIPT, arguments=arguments, environ=UNSHARED, backend="c10d"
    ) as cluster:
        cluster.train(until=20)
        assert cluster.restored.step is None
        assert cluster.restored.incarnation == 1
        cluster.node(1).kill_trainer(1)
        restored = cluster.restored
        assert restored.incarnation == 2
        assert restored.step is not None
        assert restored.step >= 10
        cluster.wait_step(restored.step + 10)
        assert {status.incarnation for status in (cluster.status(0), cluster.status(1))} == {2}
        assert len(set(cluster.result())) == 4


def test_a_node_that_never_comes_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from keepstep.config import Config
    from keepstep.errors import KeeperError
    from keepstep.testing.run import LocalRun
    from keepstep.trainer.connection import agreement
    from keepstep.trainer.connection.environment import RankPlace

    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(agreement, "REQUEST_S", 6)
    with LocalRun() as run, pytest.raises(KeeperError, match="the trainers of all nodes did not arrive within 6 s"):
        agreement.meet(run.identity, Config(), RankPlace(0, 2, 0, 1))
