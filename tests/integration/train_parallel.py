"""A training script over several nodes: `train_parallel.py KIND STEPS [SLEEP_S]`. Not a test.

    ddp       replicated everywhere          hsdp      replicated over pairs of nodes, sharded inside a pair
    fsdp      sharded over all nodes         pipeline  every rank has other parameters; activations go round

Each step depends on all ranks; what is written at the end is every bit of parameters, optimizer state, RNG and losses.
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.testing.facts import tell, tell_restored

WIDTH = 640  # 640 x 640 float32 is above 1 MiB: large enough to be kept as replicated state


def model_of(kind: str) -> nn.Module:
    rank = dist.get_rank()
    torch.manual_seed(100 + rank if kind == "pipeline" else 7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    return model


def loss_of(kind: str, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if kind == "pipeline":
        # The next stage's input is made of what all stages have: a stage that restored other bytes shows everywhere.
        shared = model(batch).detach().mean(0)
        dist.all_reduce(shared)
        batch = batch + shared
    return (model(batch) - batch.roll(1, -1)).square().mean()


def main(kind: str, steps: int, sleep_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    losses: list[float] = []

    def rehearse() -> None:
        loss_of(kind, model, torch.zeros(4, WIDTH)).backward()

    state = {"model": model, "optimizer": optimizer, "generator": generator, "losses": losses}
    with keepstep.Snapshotter(state) as snapshots:
        restored = snapshots.restore(rehearsal=rehearse if kind == "ddp" else None)
        tell_restored(restored)
        for step in range(restored.step + 1 if restored else 0, steps):
            optimizer.zero_grad()
            loss = loss_of(kind, model, torch.randn(4, WIDTH, generator=generator))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            pending = snapshots.take(step)
            tell("step", step=step, skipped=pending.reason)
            time.sleep(sleep_s)
        tell("result", digest=digest_of({**state, "rng": torch.get_rng_state()}), last=losses[-1])
    dist.destroy_process_group()


def digest_of(state: dict[str, Any]) -> str:
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

    add(state)
    return digest.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
