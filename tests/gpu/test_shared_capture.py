"""Streams and their parity, captured from a device beside training. Runs under pytest, or by itself:

    PYTHONPATH=src:.carry python tests/gpu/test_shared_capture.py [--device cpu]

No keeper: what lands in the slot is compared with what the tensors held at `take`, though the optimizer steps at once.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.arena.memfd import Mapping
from keepstep.arena.slots import Arena, plan_header
from keepstep.config import TakeConfig
from keepstep.layout import CHUNK_BYTES, ReplicaSet
from keepstep.parity.code import Code
from keepstep.trainer.capture.capture import Capture
from keepstep.trainer.connection.environment import RankPlace, World
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.plan import arena_size
from keepstep.trainer.plan.copy_plan import CopyPlan, PlanTurns
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.tensor_blocks import build, flat_bytes
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.types import Incarnation, Version

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("KEEPSTEP_TEST_DEVICE", "cuda")
NODES = (0, 1, 2, 3)
STEPS = 8


def make() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    sizes = [3_000_001, 1 << 20, 4 << 20, 777_777, 2 << 20]
    params = [torch.nn.Parameter(torch.randn(size, device=DEVICE)) for size in sizes]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=DEVICE == "cuda")
    step(params, optimizer)
    return params, optimizer


def step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in params:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def stream_bytes(stream: ReplicaSet, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    whole = torch.zeros(stream.size_bytes, dtype=torch.uint8)
    for entry in stream.entries:
        whole[entry.offset : entry.offset + entry.size_bytes] = flat_bytes(tensors[entry.path]).cpu()
    return whole


def check(stream: ReplicaSet, whole: torch.Tensor, payload: torch.Tensor) -> None:
    chunks = [whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES)]
    k = stream.n - stream.m
    for stored in stream.stored():
        landed = payload[stored.offset : stored.offset + stored.size_bytes]
        if stored.chunk >= 0:
            expected = torch.zeros(stored.size_bytes, dtype=torch.uint8)
            expected[: stream.chunk_bytes(stored.chunk)] = chunks[stored.chunk]
        else:
            expected = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
            sources = [c.numpy() for c in chunks[stored.row * k : (stored.row + 1) * k]]
            Code(k, stream.m).encode(stored.code_row, [*sources, *[None] * (k - len(sources))], expected.numpy())
        assert torch.equal(landed, expected), stored


class Outcomes:
    """Collects the outcomes of captures."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[int, str]] = queue.Queue()

    def committed(self, arena_id: str, slot: int, version: Version) -> None:
        self.queue.put((slot, ""))

    def voided(self, arena_id: str, slot: int, version: Version, reason: str) -> None:
        self.queue.put((slot, reason))


def cached_plan(plan: CopyPlan) -> Any:
    reading = SimpleNamespace(values=b"values", least_values_bytes=6)
    return SimpleNamespace(plan=plan, reading=reading)


@pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("mode", "losses"), [("full", 1), ("share", 1), ("share", 2), ("share", 3)])
def test_chunks_and_parity_are_those_of_the_moment_of_take(mode: str, losses: int) -> None:
    params, optimizer = make()
    tensors = {f"p{i}": p.detach() for i, p in enumerate(params)}
    tensors |= {f"{key}{i}": optimizer.state[p][key] for i, p in enumerate(params) for key in ("exp_avg", "exp_avg_sq")}
    sharing = ReplicaShares(World(1, NODES), mode, losses)
    fence = OptimizerFence([("optimizer", optimizer)])
    built = build(list(tensors.values()), dict(enumerate(tensors)), sharing=sharing, ranks_of=lambda t, p: NODES)
    turns = PlanTurns(built, sharing, fence.watched, 65536)
    header = plan_header(
        arena_size.need_of(turns.first, 100, [], sharing), slots=2, local_index=0, run_id="r", node_id="n",
        instance=bytes(16),
    )  # fmt: skip
    arena = Arena.create(header)
    view = ArenaView(arena, Mapping(arena.segment))
    view.prepare(threading.Event())
    outcomes = Outcomes()
    plans: Any = SimpleNamespace(validate=lambda cached: "")
    capture = Capture(RankPlace(1, 4, 0, 1), TakeConfig(budget_ms=60_000), fence, plans, outcomes)
    try:
        for number in range(STEPS):
            if number != 2:  # once without a step: its fence is not trusted, and all is copied inside take
                step(params, optimizer)
            plan = turns.at(number)
            assert plan.schedule(fence.watched).lazy or number == 2
            expected = [stream_bytes(stream, tensors) for stream in plan.layout.replica_sets]
            version = Version(Incarnation(1, 1), number)
            capture.begin(view, number % 2, version, cached_plan(plan), inexact=False)
            step(params, optimizer)  # waits where it must
            slot, reason = outcomes.queue.get(timeout=60)
            assert not reason, reason
            for stream, whole in zip(plan.layout.replica_sets, expected, strict=True):
                check(stream, whole, view.payload(slot))
    finally:
        capture.close()
        fence.close()
        view.close()


if __name__ == "__main__":
    if "--device" in sys.argv:
        DEVICE = sys.argv[sys.argv.index("--device") + 1]
    for case in [("full", 1), ("share", 1), ("share", 2), ("share", 3)]:
        test_chunks_and_parity_are_those_of_the_moment_of_take(*case)
        print("passed", DEVICE, *case)
