"""A small character-level GPT, sharded over its ranks (FSDP2), that keeps every step: one file, CPU, twenty seconds.

Two ranks under torchrun; kill any trainer with `kill -9` while it runs, and it goes on from the step it was at:

    torchrun --nnodes=1 --nproc-per-node=2 --rdzv-backend=keepstep --rdzv-id=gpt-1 \\
        --rdzv-endpoint=localhost:0 --max-restarts=20 examples/gpt.py

Several nodes; kill a whole one, start its line again there or elsewhere, and its shards are rebuilt from parity. The
store is best served by a machine that does not train (`keepstep store --bind HOST:29400`); on every node:

    torchrun --nnodes=4 --nproc-per-node=1 --rdzv-backend=keepstep --rdzv-id=gpt-1 \\
        --rdzv-endpoint=HOST:29400 --max-restarts=100 examples/gpt.py

One process without a launcher; after a kill, the same command again goes on:

    KEEPSTEP_RUN_ID=gpt-1 python examples/gpt.py

What keepstep asks of a training loop is in `train`. The rest is the model, the data, and the evidence: with
`--log-file` rank 0 appends a JSON line per event, with `--result` every rank writes a digest of its final state.
Two runs with the same seed give the same digests, whatever was killed in between. `keepstep demo` runs this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import keepstep


def train(options: argparse.Namespace) -> None:
    rank, world_size = join()
    text = Path(options.text).read_text(encoding="ascii")
    shape = Shape(vocabulary=len(set(text)))
    make_reproducible(options.seed)
    model = GPT(shape)
    if world_size > 1:
        shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.steps, eta_min=1e-4)
    batches = Batches(text, context=shape.context, size=options.batch, seed=options.seed * 1000 + rank)
    torch.manual_seed(options.seed * 1000 + rank)  # from here on each rank draws its own dropout masks
    log = Log(options.log_file, silent=rank != 0)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    with keepstep.Snapshotter(state) as snapshots:
        restored = snapshots.restore()  # None on a first start
        log.begin(incarnation=snapshots.status().incarnation, ranks=gather_ranks(restored), restored=restored)
        for step in range(restored.step + 1 if restored else 0, options.steps):
            loss = train_one_step(model, optimizer, scheduler, batches)
            snapshots.take(step)  # returns before the copy has finished
            log.step(step, loss)

    if options.result:
        write_result(Path(f"{options.result}.rank{rank}"), state)
    if dist.is_initialized():
        dist.destroy_process_group()


def train_one_step(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, batches: Batches) -> float:
    """One update; returns the loss, averaged over the ranks."""
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor = model(*batches.draw())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all shards
    optimizer.step()
    scheduler.step()
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


# The model


@dataclass(frozen=True, kw_only=True)
class Shape:
    vocabulary: int
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 96
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attend = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.project(self.attention(self.norm_1(x))))
        return x + self.drop(self.contract(F.gelu(self.expand(self.norm_2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attend(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return mixed.transpose(1, 2).reshape(batch, length, width)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.dropout = shape.dropout
        self.apply(self.initialize)
        self.head.weight = self.characters.weight  # tied: keepstep stores it once

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.characters(inputs) + self.positions(torch.arange(inputs.shape[1]))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shard(model: GPT) -> None:
    """Every rank keeps its own part of each parameter, of its gradient and of what the optimizer makes of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # the default is a GPU where there is one
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


# The data


class Batches:
    """Random windows of a text. Its state is how many were drawn and the generator that draws the next."""

    def __init__(self, text: str, *, context: int, size: int, seed: int) -> None:
        index = {character: i for i, character in enumerate(sorted(set(text)))}
        self.data = torch.tensor([index[character] for character in text])
        self.context = context
        self.size = size
        self.position = 0
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - self.context, (self.size, 1), generator=self.generator)
        windows = self.data[starts + torch.arange(self.context + 1)]
        self.position += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position = state_dict["position"]
        self.generator.set_state(state_dict["generator"])


# The processes


def join() -> tuple[int, int]:
    """This process's rank and the number of ranks, with a process group where there is more than one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def make_reproducible(seed: int) -> None:
    torch.set_num_threads(1)  # the number of threads changes the order of sums
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def gather_ranks(restored: keepstep.Restored | None) -> list[tuple[int, str, str]]:
    """By rank: process, node, and where its state came from ("" on a first start)."""
    mine = (os.getpid(), os.environ.get("KEEPSTEP_NODE_ID", ""), restored.source.value if restored else "")
    everyone = [mine] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return everyone


# The evidence


class Log:
    """What rank 0 tells: steps on the terminal, and every event as a JSON line in a file that restarts append to."""

    def __init__(self, path: str | None, *, silent: bool) -> None:
        self.path = path
        self.silent = silent
        self.incarnation = 0

    def begin(self, *, incarnation: int, ranks: list[tuple[int, str, str]], restored: keepstep.Restored | None) -> None:
        self.incarnation = incarnation
        pids, nodes, sources = map(list, zip(*ranks, strict=True))
        self.write(event="started", pids=pids, nodes=nodes)
        if restored:
            seconds = restored.duration_s
            self.say(f"restored step {restored.step} from {' '.join(sources)} in {seconds:.2f} s")
            self.write(event="restored", step=restored.step, sources=sources, seconds=seconds)

    def step(self, step: int, loss: float) -> None:
        self.say(f"step {step:4d}  loss {loss:.4f}")
        self.write(event="step", step=step, loss=loss, loss_hex=loss.hex())

    def say(self, text: str) -> None:
        if not self.silent:
            print(text, flush=True)

    def write(self, **fields: Any) -> None:
        if self.path and not self.silent:
            line = {**fields, "incarnation": self.incarnation, "time": time.time()}
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def write_result(path: Path, state: Mapping[str, Any]) -> None:
    """A sha256 per part of the final state of this rank, and one over all of them."""
    everything = {name: part.state_dict() for name, part in state.items()}
    everything["rng"] = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    parts = {name: digest(part) for name, part in everything.items()}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"sha256": digest(parts), "parts": parts}, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def digest(value: Any) -> str:
    """sha256 over every bit of a nested value: names, types, shapes and bytes."""
    if isinstance(value, Mapping):
        content = "".join(f"{key!r}:{digest(item)}," for key, item in sorted(value.items(), key=lambda kv: repr(kv[0])))
        return sha256("mapping", content.encode())
    if isinstance(value, list | tuple):
        return sha256(type(value).__name__, "".join(digest(item) for item in value).encode())
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return sha256(f"{value.dtype}{value.shape}", value.tobytes())
    return sha256(type(value).__name__, repr(value).encode())


def sha256(kind: str, content: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level GPT that keeps every step.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=10, help="windows of text per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", default=Path(keepstep.__file__).parent / "demo" / "demo.txt")
    parser.add_argument("--log-file", metavar="FILE", help="rank 0 appends a JSON line per event to this file")
    parser.add_argument("--result", help="each rank writes the digest of its final state to RESULT.rankN")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
