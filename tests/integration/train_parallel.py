"""A training script over several nodes. Not a test.

    train_parallel.py KIND STEPS [PACE_S] [--width N] [--hold] [--flip STEP:RANK]
    train_parallel.py --reference KIND STEPS [--width N] [--flip STEP:RANK]

    ddp       replicated everywhere          hsdp      replicated over pairs of nodes, sharded inside a pair
    fsdp      sharded over all nodes         pipeline  every rank has other parameters; activations go round

KIND may be several of them, joined by `+`: each is a model of its own, trained side by side. Each step depends on all
ranks; what is told at the end is every bit of parameters, optimizer state, RNG and losses.

--hold        the last steps wait for a file `go` beside the facts, so that a slow test does not miss the training
--flip        after that step that rank has one wrong bit in its first parameter, as broken memory would
--reference   the same training without keepstep, without a launcher and without failures: prints the digests by rank
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from granted import wait_for_grant
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH = 640  # 640 x 640 float32 is above 1 MiB: large enough to be kept as replicated state
RANKS = 4
HELD_STEPS = 4
HOLD_S = 180.0


@dataclass
class Part:
    """One model of one kind, and how it is trained."""

    kind: str
    width: int
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self._make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(1000 + dist.get_rank())

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "generator", "losses")
        return {f"{self.kind}_{name}": getattr(self, name) for name in names}

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self._loss(torch.randn(4, self.width, generator=self.generator))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def rehearse(self) -> None:
        self._loss(torch.zeros(4, self.width)).backward()

    def flip(self) -> None:
        first = next(iter(self.model.parameters())).detach()
        local = first.to_local() if isinstance(first, DTensor) else first
        local.view(torch.int32)[0, 0] ^= 1 << 18

    def _make(self) -> nn.Module:
        torch.manual_seed(100 + dist.get_rank() if self.kind == "pipeline" else 7)
        width = self.width
        model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
        if self.kind == "ddp":
            return DistributedDataParallel(model)
        if self.kind == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)
        if self.kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
            return fully_shard(model, mesh=mesh)
        assert self.kind == "pipeline", self.kind
        return model

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.kind == "pipeline":
            # The next stage's input is made of what all stages have: one that restored other bytes shows everywhere.
            shared = self.model(batch).detach().mean(0)
            dist.all_reduce(shared)
            batch = batch + shared
        return (self.model(batch) - batch.roll(1, -1)).square().mean()


@dataclass(frozen=True)
class Course:
    """What is trained, as the command line says it."""

    kinds: list[str]
    steps: int
    pace_s: float
    width: int
    hold: bool
    flip: tuple[int, int] | None

    def train(self, parts: list[Part], first: int, taken: Callable[[int], None]) -> None:
        for step in range(first, self.steps):
            if self.hold and step == max(first, self.steps - HELD_STEPS):
                wait_for_go()
            for part in parts:
                part.step()
            if self.flip == (step, dist.get_rank()):
                parts[0].flip()
            taken(step)
            time.sleep(self.pace_s)


def under_keepstep(course: Course) -> None:
    import keepstep
    from keepstep.testing.facts import tell, tell_restored

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parts = [Part(kind, course.width) for kind in course.kinds]
    parallel = [part for part in parts if part.kind == "ddp"]

    def rehearse() -> None:
        for part in parallel:
            part.rehearse()

    with keepstep.Snapshotter(state_of(parts)) as snapshots:
        os.environ.setdefault("KEEPSTEP_INCARNATION", f"{snapshots.status().incarnation}:0")  # for `tell`
        restored = snapshots.restore(rehearsal=rehearse if parallel else None)
        wait_for_grant(snapshots)
        tell_restored(restored)

        def taken(step: int) -> None:
            tell("step", step=step, skipped=snapshots.take(step).reason)

        course.train(parts, restored.step + 1 if restored else 0, taken)
        tell("result", digest=digest_of(parts))
    dist.destroy_process_group()


def reference(course: Course) -> None:
    """Ranks are forks of this process: torch is imported once."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        told = [Path(directory) / f"digest{rank}" for rank in range(RANKS)]
        children = [fork_rank(course, rank, Path(directory) / "store", told[rank]) for rank in range(RANKS)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), f"ranks ended with {codes}"
        print(json.dumps([path.read_text() for path in told]))


def fork_rank(course: Course, rank: int, store: Path, told: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
        parts = [Part(kind, course.width) for kind in course.kinds]
        course.train(parts, 0, lambda step: None)
        told.write_text(digest_of(parts))
        dist.destroy_process_group()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for_go() -> None:
    go, deadline = Path(os.environ["KEEPSTEP_TEST_FACTS"]) / "go", time.monotonic() + HOLD_S
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def state_of(parts: list[Part]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.state.items()}


def digest_of(parts: list[Part]) -> str:
    """Every bit."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        elif isinstance(value, torch.Generator):
            add(value.get_state())
        elif hasattr(value, "state_dict"):
            add(value.state_dict())
        else:
            digest.update(repr(value).encode())

    add({**state_of(parts), "rng": torch.get_rng_state()})
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("steps", type=int)
    parser.add_argument("pace_s", type=float, nargs="?", default=0.0)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--flip", default="")
    parser.add_argument("--reference", action="store_true")
    given = parser.parse_args()
    step, _, rank = given.flip.partition(":")
    flip = (int(step), int(rank)) if given.flip else None
    course = Course(given.kind.split("+"), given.steps, given.pace_s, given.width, given.hold, flip)
    (reference if given.reference else under_keepstep)(course)


if __name__ == "__main__":
    main()
