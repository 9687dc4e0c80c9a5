"""Nodes lost in random ways at random instants, over all kinds of parallel training: always the same end, bit for bit.

KEEPSTEP_TEST_SEED=<seed> runs one seed again; KEEPSTEP_TEST_SEEDS=<count> says how many are drawn.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
from node_losses import Training, training

UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torch 2.13 hangs in restarts without it, keepstep or not
NODES = 4
STEPS = 30

KINDS: dict[str, dict[str, str]] = {
    "ddp": {},
    "ddp share": {"KEEPSTEP_PARITY_REPLICATED": "share"},
    "hsdp": {},
    "fsdp": {},
    "pipeline": {},
    "hsdp+pipeline": {},
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def seeds() -> list[int]:
    given = os.environ.get("KEEPSTEP_TEST_SEED")
    if given:
        return [int(given)]
    first = random.randrange(1 << 30)  # neighbours have other kinds and other ways: twenty see each of both
    return [first + number for number in range(int(os.environ.get("KEEPSTEP_TEST_SEEDS", "20")))]


# Ways to lose nodes: each begins when a version is protected and ends when the lost nodes have been replaced.


def one_node(job: Training) -> None:
    job.lose(job.rng.randrange(1, NODES), longest_s=1.5)


def the_coordinator(job: Training) -> None:
    job.lose(0, longest_s=1.5)


def one_of_each_group(job: Training) -> None:
    names = [node.node_id for node in job.cluster.nodes]
    group = [names.index(peer.node_id) for peer in job.cluster.status(0).group]
    assert len(group) == 2
    others = [index for index in range(NODES) if index not in group]
    job.lose(job.rng.choice(group), job.rng.choice(others), longest_s=1.5)


def a_second_one_during_the_recovery(job: Training) -> None:
    first, second = job.rng.sample(range(NODES), 2)
    job.lose(first, longest_s=1.0)
    job.lose(second, longest_s=20.0)


def a_trainer_then_a_node(job: Training) -> None:
    first, second = job.rng.randrange(NODES), job.rng.randrange(NODES)
    job.pause(1.0)
    job.cluster.node(first).kill_trainer()
    job.lose(second, longest_s=15.0)


def a_keeper_then_a_node(job: Training) -> None:
    first, second = job.rng.sample(range(NODES), 2)
    job.pause(1.0)
    job.cluster.node(first).kill_keeper()
    job.lose(second, longest_s=2.0)


def the_replacement_too(job: Training) -> None:
    victim = job.rng.randrange(NODES)
    job.lose(victim, longest_s=1.0)
    job.lose(victim, longest_s=15.0)


TWO = {"KEEPSTEP_PARITY_LOSSES": "2"}
WAYS: dict[Callable[[Training], None], dict[str, str]] = {
    one_node: {},
    the_coordinator: {},
    one_of_each_group: {"KEEPSTEP_PARITY_GROUP_SIZE": "2"},
    a_second_one_during_the_recovery: TWO,
    a_trainer_then_a_node: {},
    a_keeper_then_a_node: {},
    the_replacement_too: {},
}


@pytest.mark.parametrize("seed", seeds())
def test_nodes_lost_at_random_cost_steps_and_not_a_bit(seed: int) -> None:
    rng = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    way = list(WAYS)[seed % len(WAYS)]
    print(f"KEEPSTEP_TEST_SEED={seed}: {kind}, {way.__name__}")
    with training(kind.split()[0], steps=STEPS, seed=seed, environ=KINDS[kind] | WAYS[way]) as job:
        job.wait_protected(rng.randrange(8))
        started = time.monotonic()
        way(job)
        restored = job.cluster.restored
        print(f"restored step {restored.step} from {restored.source} after {time.monotonic() - started:.1f} s")
        assert restored.step is not None
        job.finish()


@pytest.mark.parametrize("kind", ["pipeline", "fsdp"])
def test_ranks_that_torchrun_shifts_find_their_state_on_other_nodes(kind: str) -> None:
    """Plain torchrun gives ranks by address: without its first node, every node has another rank than before."""
    with training(kind, steps=STEPS, seed=1, environ=UNSHARED, backend="c10d") as job:
        job.wait_protected(4)
        job.lose(0)
        restored = job.cluster.restored
        assert restored.nodes == ["node1", "node2", "node3", "node0b"]
        assert restored.source == "parity"
        assert restored.step is not None
        job.wait_protected(restored.step)
        job.finish()
