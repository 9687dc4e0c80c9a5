"""Whole nodes lost, frozen, replaced and waited for, under `torchrun --rdzv-backend=keepstep`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.testing.cluster import LocalCluster
from keepstep.testing.network import Namespaces
from keepstep.testing.node import Node

SCRIPT = Path(__file__).with_name("cluster_trainer.py")
LONG = "100000"

pytestmark = pytest.mark.timeout(400)  # each round starts a torch per trainer, on as few as two cores


def wait_until(condition: Callable[[], Any], cluster: LocalCluster, timeout_s: float = 60.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, cluster.tails()
        time.sleep(0.05)
    return time.monotonic() - started


def log_has(node: Node, text: str) -> Callable[[], bool]:
    return lambda: text in node.log.read_text(errors="replace")


@pytest.mark.chaos
def test_a_lost_node_is_replaced_and_the_job_ends_as_if_nothing_had_happened() -> None:
    with LocalCluster(nodes=3, script=SCRIPT, arguments=["60"]) as undisturbed:
        undisturbed.train(until=0)
        assert undisturbed.restored.step is None
        expected = undisturbed.result()
    with LocalCluster(nodes=3, script=SCRIPT, arguments=["60"]) as cluster:
        cluster.train(until=30)
        assert cluster.restored.nodes == ["node0", "node1", "node2"]
        cluster.node(0).kill()  # the coordinator, and the node that serves the trainers' store
        cluster.replace(0)
        restored = cluster.restored
        assert restored.nodes == ["node0b", "node1", "node2"]
        assert restored.step is not None
        assert restored.step >= 15
        assert cluster.result() == expected


def test_a_killed_keeper_disturbs_nobody_and_learns_who_its_peers_are() -> None:
    with LocalCluster(nodes=2, script=SCRIPT, arguments=[LONG]) as cluster:
        cluster.train(until=20)
        before = cluster.node(1).status().keeper
        cluster.node(1).kill_keeper()
        cluster.wait_step(cluster.step + 60)
        assert cluster.incarnation == 1
        after = cluster.node(1).status()
        assert after.keeper.instance != before.instance
        wait_until(lambda: cluster.status(0).survives == "node", cluster)
        newest = cluster.status(0).step or 0
        wait_until(lambda: (cluster.status(0).step or 0) > newest + 20, cluster)


@pytest.mark.chaos
def test_two_spares_wait_until_a_node_is_lost_and_one_of_them_gets_its_place() -> None:
    with LocalCluster(nodes=3, spares=2, script=SCRIPT, arguments=[LONG, "0.05", "1", "plain"]) as cluster:
        cluster.train(until=20)
        members = cluster.restored.nodes
        assert len(members) == 3
        every = [*cluster.nodes, *cluster.spares]
        lost = next(node for node in every if node.node_id == members[2])
        lost.kill()
        restored = cluster.restored
        assert restored.incarnation == 2
        assert restored.nodes[:2] == members[:2]
        assert restored.nodes[2] in {node.node_id for node in every} - set(members)
        cluster.wait_step(150)
        assert cluster.incarnation == 2, "one loss, one round"


@pytest.mark.chaos
def test_a_spare_that_was_not_needed_ends_with_the_job() -> None:
    with LocalCluster(nodes=2, script=SCRIPT, arguments=["200", "0.05", "1", "plain"]) as cluster:
        cluster.train(until=5)
        spare = cluster.add_spare()
        assert len(cluster.result()) == 2
        assert cluster.incarnation == 1
        assert spare.agent is not None
        assert spare.agent.wait(30) == 0, spare.log.read_text()
        assert "this spare was not needed" in spare.log.read_text()


@pytest.mark.chaos
def test_a_frozen_node_is_given_up_and_waits_as_a_spare_when_it_thaws() -> None:
    with LocalCluster(nodes=2, spares=1, script=SCRIPT, arguments=[LONG, "0.05", "1", "plain"]) as cluster:
        cluster.train(until=20)
        members = cluster.restored.nodes
        frozen = next(node for node in [*cluster.nodes, *cluster.spares] if node.node_id == members[1])
        frozen.freeze()
        restored = cluster.restored  # no connection was reset: only a verdict can have done this
        assert restored.nodes[0] == members[0]
        assert restored.nodes[1] != members[1]
        frozen.thaw()
        wait_until(log_has(frozen, "the job has gone on without this node"), cluster)
        wait_until(lambda: not frozen.trainers(), cluster)
        cluster.wait_step(cluster.step + 60)
        assert cluster.incarnation == 2


@pytest.mark.chaos
def test_without_its_store_a_job_goes_on_until_it_needs_a_round() -> None:
    with LocalCluster(nodes=2, script=SCRIPT, arguments=[LONG]) as cluster:
        cluster.train(until=10)
        cluster.kill_store()
        cluster.wait_step(100)
        cluster.node(0).kill_trainer()
        for node in cluster.nodes:
            assert node.agent is not None
            assert node.agent.wait(90) == 1, cluster.tails()
            assert "no quorum" in node.log.read_text()
            assert node.status().memory_bytes > 0, "the keeper holds the state"


@pytest.mark.chaos
def test_a_node_that_is_cut_off_is_replaced_and_stops_by_itself() -> None:
    network = Namespaces()
    arguments = [LONG, "0.05", "1", "plain"]
    with LocalCluster(nodes=2, spares=1, script=SCRIPT, arguments=arguments, network=network) as cluster:
        try:
            cluster.train(until=20)
        except ConfigError as error:
            pytest.skip(str(error))
        members = cluster.restored.nodes
        alone = next(node for node in [*cluster.nodes, *cluster.spares] if node.node_id == members[1])
        cluster.disturbed()
        network.cut(alone.node_id)
        restored = cluster.restored  # no connection was reset here either
        assert restored.nodes[0] == members[0]
        assert restored.nodes[1] != members[1]
        network.mend(alone.node_id)
        wait_until(lambda: not alone.trainers(), cluster)
        cluster.wait_step(cluster.step + 60)
        assert cluster.incarnation == 2
