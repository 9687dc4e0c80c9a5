"""Tensors → replica sets → chunks on ranks and nodes → tensors is the identity, whoever stores what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.layout import CHUNK_BYTES, Layout, ReplicaSet, decode
from keepstep.parity.code import Code
from keepstep.trainer.connection.environment import Ranks, World
from keepstep.trainer.plan.copy_plan import CopyPlan, PlanTurns
from keepstep.trainer.plan.parity_ops import ParityOp
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.tensor_blocks import build
from keepstep.trainer.restore.replica_chunks import Chunks
from keepstep.trainer.restore.saved_snapshot import SavedSnapshot
from keepstep.values import TensorRef

some = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


@dataclass(frozen=True)
class Job:
    """Nodes of equal size; all ranks hold `tensors`, and `classes` says which ranks hold each of them alike."""

    num_nodes: int
    per_node: int
    tensors: list[torch.Tensor]
    classes: list[Ranks | None]

    def capture(self, rank: int, mode: str = "full", losses: int = 1, step: int = 0) -> tuple[CopyPlan, torch.Tensor]:
        """What a rank's slot holds: the copies of its plan over memory full of leftovers."""
        world = World(rank, tuple(r // self.per_node for r in range(self.num_nodes * self.per_node)))
        paths = {index: f"t{index}" for index in range(len(self.tensors))}
        known = {id(tensor): ranks for tensor, ranks in zip(self.tensors, self.classes, strict=True)}
        sharing = ReplicaShares(world, mode, losses)
        built = build(
            self.tensors, paths, sharing=sharing, ranks_of=lambda tensor, path: sharing.holders(known[id(tensor)])
        )
        plan = PlanTurns(built, sharing, [], 65536).at(step)
        assert decode(plan.encoded, payload_bytes=plan.payload_bytes) == plan.layout
        payload = torch.full((plan.payload_bytes,), 0xA5, dtype=torch.uint8)
        for offset, size in plan.gaps:
            payload[offset : offset + size] = 0
        for unit in plan.ops:
            target = payload[unit.offset : unit.offset + unit.size_bytes]
            if isinstance(unit, ParityOp):
                unit.compute(target)
            else:
                target.copy_(unit.source)
        return plan, payload


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    num_nodes, per_node = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    everyone = tuple(range(num_nodes * per_node))
    # HSDP: the ranks at one place of their nodes; here that of rank 0.
    column = tuple(node * per_node for node in range(num_nodes))
    sizes = st.sampled_from(
        [1, 63, 64, 100_000, 1 << 20, CHUNK_BYTES - 64, CHUNK_BYTES, CHUNK_BYTES + 8]
    ) | st.integers(1, 3 * CHUNK_BYTES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors, classes = [], []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        count = max(1, draw(sizes) // dtype.itemsize)
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors.append(raw.view(dtype).clone())
        classes.append(draw(st.sampled_from([None, everyone, column])))
    return Job(num_nodes, per_node, tensors, classes)


def stored_chunks(layout: Layout, payload: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (replica_set.class_id, place.chunk): payload[place.offset : place.offset + replica_set.chunk_bytes(place.chunk)]
        for replica_set in layout.replica_sets
        for place in replica_set.stored()
        if place.chunk >= 0
    }


def assert_restored(job: Job, layout: Layout, payload: torch.Tensor, held: dict[tuple[str, int], torch.Tensor]) -> None:
    chunks: dict[str, Chunks] = {
        replica_set.class_id: [held[replica_set.class_id, q] for q in range(replica_set.num_chunks)]
        for replica_set in layout.replica_sets
    }
    saved = SavedSnapshot({}, layout, payload, chunks)
    for index, tensor in enumerate(job.tensors):
        here = torch.zeros_like(tensor)
        saved.write(here, TensorRef(index))
        assert torch.equal(here.view(torch.uint8), tensor.view(torch.uint8))
        strided = torch.zeros(len(tensor), 2, dtype=tensor.dtype)[:, 0]
        saved.write(strided, TensorRef(index))
        assert torch.equal(torch.cat([strided]).view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(saved.tensor(TensorRef(index)).view(torch.uint8), tensor.view(torch.uint8))


@some
@given(jobs())
def test_ranks_of_each_node_hold_all_of_every_class_once_and_give_it_back(job: Job) -> None:
    seen: dict[tuple[str, int], torch.Tensor] = {}
    for node in range(job.num_nodes):
        ranks = range(node * job.per_node, (node + 1) * job.per_node)
        # Ranks beside the first of their node are not in the column class, so that one is theirs alone.
        relevant = [r for r in ranks if all(c is None or r in c for c in job.classes)]
        parts = [job.capture(rank) for rank in relevant]
        held: dict[tuple[str, int], torch.Tensor] = {}
        for plan, payload in parts:
            for key, chunk in stored_chunks(plan.layout, payload).items():
                if len(relevant) == len(ranks):
                    assert key not in held, "stored twice on one node"
                held[key] = chunk
                assert torch.equal(seen.setdefault(key, chunk), chunk), "nodes store the same bytes"
        if len(relevant) == len(ranks):
            for plan, payload in parts:
                assert_restored(job, plan.layout, payload, held)


@some
@given(jobs())
def test_shared_part_is_no_larger_than_a_fair_part_and_a_chunk_per_class(job: Job) -> None:
    plan, payload = job.capture(0)
    for replica_set in plan.layout.replica_sets:
        local = sum(node == 0 for node in replica_set.nodes)
        assert replica_set.stored_bytes <= -(-replica_set.size_bytes // local) + CHUNK_BYTES
        assert (replica_set.offset - plan.layout.shared_offset) % CHUNK_BYTES == 0
        assert 0 in replica_set.ranks
    assert payload.numel() == plan.layout.payload_bytes


# Shares with parity


def everywhere(job: Job) -> Job:
    """The same job where everything is held by all ranks, or by this one alone."""
    everyone = tuple(range(job.num_nodes * job.per_node))
    return Job(job.num_nodes, job.per_node, job.tensors, [everyone if c else None for c in job.classes])


@some
@given(jobs(), st.integers(1, 2), st.integers(0, 40), st.data())
def test_shares_give_everything_back_after_any_loss_that_they_cover(
    job: Job, losses: int, step: int, data: st.DataObject
) -> None:
    job = everywhere(job)
    slots = [job.capture(rank, "share", losses, step) for rank in range(job.num_nodes * job.per_node)]
    replica_sets = slots[0][0].layout.replica_sets
    m = min(losses, job.num_nodes - 1)
    lost = set(data.draw(st.permutations(range(job.num_nodes)))[:m])
    held: dict[tuple[str, int], torch.Tensor] = {}
    parity: dict[tuple[str, int, int], torch.Tensor] = {}
    for rank, (plan, payload) in enumerate(slots):
        assert [replica_set.class_id for replica_set in plan.layout.replica_sets] == [
            replica_set.class_id for replica_set in replica_sets
        ]
        if rank // job.per_node in lost:
            continue
        chunks = stored_chunks(plan.layout, payload)
        assert not chunks.keys() & held.keys()
        held |= chunks
        for replica_set in plan.layout.replica_sets:
            assert (replica_set.n, replica_set.m) == (job.num_nodes, m)
            for place in replica_set.stored():
                if place.chunk < 0:
                    parity[replica_set.class_id, place.row, place.code_row] = payload[place.offset :][:CHUNK_BYTES]
                elif place.size_bytes > (used := replica_set.chunk_bytes(place.chunk)):
                    assert not payload[place.offset + used : place.offset + place.size_bytes].any(), "padding"
    for replica_set in replica_sets:
        rebuild(replica_set, held, parity)
    for rank, (plan, payload) in enumerate(slots):
        if rank in (0, len(slots) - 1):
            assert_restored(job, plan.layout, payload, held)


def rebuild(
    replica_set: ReplicaSet, held: dict[tuple[str, int], torch.Tensor], parity: dict[tuple[str, int, int], torch.Tensor]
) -> None:
    """As a keeper would: what is missing of a stripe row, from what is left of it."""
    k = replica_set.n - replica_set.m
    code = Code(k, replica_set.m)
    for chunk in range(replica_set.num_chunks):
        if (replica_set.class_id, chunk) in held:
            continue
        row = chunk // k
        pieces: dict[int, Any] = {
            k + code_row: found.numpy()
            for (name, at, code_row), found in parity.items()
            if (name, at) == (replica_set.class_id, row)
        }
        for source in range(k):
            there = held.get((replica_set.class_id, row * k + source))
            if there is not None or row * k + source >= replica_set.num_chunks:
                pieces[source] = None if there is None else there.numpy()
        out = torch.empty(replica_set.chunk_bytes(chunk), dtype=torch.uint8)
        code.rebuild(chunk % k, pieces, out.numpy())
        held[replica_set.class_id, chunk] = out


@some
@given(jobs(), st.integers(1, 2))
def test_share_of_a_rank_is_never_larger_than_the_room_that_is_foreseen_for_it(job: Job, losses: int) -> None:
    job = everywhere(job)
    world = World(0, tuple(rank // job.per_node for rank in range(job.num_nodes * job.per_node)))
    sharing = ReplicaShares(world, "share", losses)
    for step in range(4):
        for replica_set in job.capture(0, "share", losses, step)[0].layout.replica_sets:
            assert replica_set.stored_bytes <= sharing.stored_bytes(replica_set.ranks, replica_set.size_bytes)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_class_smaller_than_the_number_of_local_ranks_times_a_chunk_leaves_some_ranks_without_any(
    per_node: int,
) -> None:
    everyone = tuple(range(2 * per_node))
    job = Job(2, per_node, [torch.arange(1 << 20, dtype=torch.int64)], [everyone])  # two chunks
    stored = [job.capture(rank)[0].layout.replica_sets[0].chunks for rank in range(per_node)]
    assert sorted(chunk for chunks in stored for chunk in chunks) == [0, 1]
    assert len([chunks for chunks in stored if not chunks]) == max(0, per_node - 2)
