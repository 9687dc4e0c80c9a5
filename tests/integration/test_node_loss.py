"""Nodes that are lost while a job trains, under torchrun: it ends bit for bit as if nothing had happened.

Each test is one cluster of four nodes and several failures, because starting torch is what costs here. The
reference is the same training without keepstep. The seed (KEEPSTEP_TEST_SEED) chooses the instants.
"""

from __future__ import annotations

import os

import pytest
from node_losses import Training, training

from keepstep.types import Status

SEED = int(os.environ.get("KEEPSTEP_TEST_SEED", "7"))

pytestmark = pytest.mark.timeout(500)  # each round starts a torch per trainer, on as few as two cores


def state_bytes(width: int) -> int:
    """Parameters and AdamW's two moments of the two layers of train_parallel.py."""
    return 2 * width * width * 4 * 3


def exchanged_per_version(status: Status) -> float:
    return status.counters["exchanged_bytes"] / status.counters["protected_versions"]


def step_rebuilt_from_parity(job: Training, names: list[str]) -> int:
    """What the job came back to when other nodes were lost; `names` are those that it has now, by rank."""
    restored = job.cluster.restored
    assert restored.source == "parity", restored
    assert restored.nodes == names
    assert restored.step is not None
    return restored.step


def test_sharded_and_staged_training_survives_the_loss_of_a_node_and_then_of_the_coordinator() -> None:
    with training("hsdp+fsdp+pipeline", steps=24, seed=SEED) as job:
        protected = job.wait_protected(2).protected_step
        job.lose(2)
        step = step_rebuilt_from_parity(job, ["node0", "node1", "node2b", "node3"])
        assert step >= (protected or 0)
        job.wait_protected(step)
        job.lose(0)
        assert step_rebuilt_from_parity(job, ["node0b", "node1", "node2b", "node3"]) > step
        job.finish()


def test_replicated_training_survives_a_node_then_a_flipped_bit_then_two_nodes_at_once() -> None:
    flip = 16
    environ = {"KEEPSTEP_PARITY_LOSSES": "2"}
    with training("ddp", steps=28, seed=SEED, course=["--flip", f"{flip}:1"], environ=environ) as job:
        status = job.wait_protected(2)
        assert status.losses_covered == 2
        assert exchanged_per_version(status) < 0.02 * state_bytes(640), "replicated state was exchanged"
        job.lose(3)
        step_rebuilt_from_parity(job, ["node0", "node1", "node2", "node3b"])
        job.wait_protected(flip)  # one void version, then every rank keeps its own
        for index in range(4):
            (problem,) = [text for text in job.cluster.status(index).problems if "diverged" in text]
            assert "ddp_model.module.0.weight" in problem
            assert ": rank 1 differ" in problem
        assert f"is void: {problem}" in job.cluster.node(1).log.read_text()
        job.lose(0, 1)
        assert step_rebuilt_from_parity(job, ["node0b", "node1b", "node2", "node3b"]) > flip
        job.finish()


@pytest.mark.chaos
def test_shared_replicas_take_their_part_of_the_memory_and_come_back_whole() -> None:
    environ = {"KEEPSTEP_PARITY_REPLICATED": "share"}
    with training("ddp", steps=24, seed=SEED, course=["--width", "1280"], environ=environ) as job:
        status = job.wait_protected()
        assert exchanged_per_version(status) < 0.02 * state_bytes(1280), "replicated state was exchanged"
        share = state_bytes(1280) / 3
        for index in range(4):
            (rank,) = job.cluster.status(index).ranks
            stored = max(slot.size_bytes for slot in rank.slots)
            print(f"node {index} stores {stored / share:.2f} of S/(n-m), arena {rank.arena_bytes / share:.2f}")
            assert stored < share + (6 << 20)
            assert rank.arena_bytes < len(rank.slots) * (share + (8 << 20))
        for node in job.cluster.nodes:
            node.kill_trainer()
        assert job.cluster.restored.source == "memory"
        job.wait_protected(job.cluster.restored.step or 0)
        job.lose(2)
        step_rebuilt_from_parity(job, ["node0", "node1", "node2b", "node3"])
        job.finish()


@pytest.mark.chaos
def test_flipped_bit_in_a_share_is_found_by_the_code_and_its_node_may_still_be_lost() -> None:
    flip = 8
    environ = {"KEEPSTEP_PARITY_REPLICATED": "share", "KEEPSTEP_PARITY_LOSSES": "2"}
    course = ["--width", "1280", "--flip", f"{flip}:1"]
    with training("ddp", steps=60, seed=SEED, course=course, environ=environ) as job:
        problem = job.wait_problem("diverged")
        assert "ddp_model.module.0.weight" in problem
        assert ": rank 1 differs" in problem
        # Protected per rank from then on. Versions before it may hold the other replicas' bytes for all of them.
        found_at = job.cluster.status(0).step or 0
        job.wait_protected(found_at + 4)
        job.lose(1)
        assert step_rebuilt_from_parity(job, ["node0", "node1b", "node2", "node3"]) > flip
        job.finish()
