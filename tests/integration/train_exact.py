"""A training run that can be killed anywhere, and that writes down every bit of what it did. Not a test.

    python train_exact.py run fused --out /tmp/x --steps 9 --kill 4:backward     one life; run it again to resume
    python train_exact.py serve                                                  lives on demand, forked, over a pipe

Files in --out, per rank: `losses` (a line per executed step), `lives` (what each life restored), `takes` (snapshots
that were skipped), `final.json` (the whole state, bit for bit, and draws from every random generator).
A kill is `[rank@]step:moment`, done once per run however many lives it has. Moments: `backward` (between two
layers' gradients), `step` (some tensors of the optimizer are written, others not), `take` (right after it returned),
`restore` (a life that would have begun with this step).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import gc
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports at its first step: here it is done once for all forked lives
import torch.distributed as dist
from granted import wait_for_grant
from odd_objects import Container, FlatMomentum, FusedProjection
from ports import free_port
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep import Config, Restored, Snapshotter, Survives

WIDTH = 160  # 160 x 160 float32 is above SMALL_BYTES: copied behind `take`, under the fence
BATCH = 8
WAIT_S = 60.0
OPS_INTO_STEP = 6

# The tests run this with `-W error`: a warning that a resumed run gives and an uninterrupted one does not is a fault.
warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's own affair with torch 2.13


class Killer:
    """Ends this process without a word, at the one place that was asked for."""

    def __init__(self, kills: list[str], out: Path, rank: int) -> None:
        self._kills, self._out, self._rank = kills, out, rank
        self.step = -1

    def here(self, moment: str) -> None:
        for index, kill in enumerate(self._kills):
            rank, _, place = kill.rpartition("@")
            if place == f"{self.step}:{moment}" and int(rank or 0) == self._rank and self._is_first(index):
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, index: int) -> bool:
        try:
            (self._out / f"killed-{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def on_backward(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.here("backward"))
        return tensor

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around `optimizer.step()`: dies after some of its operations."""
        if not any(kill.endswith(f"{self.step}:step") for kill in self._kills):
            yield
            return
        with _DieAfter(OPS_INTO_STEP, lambda: self.here("step")):
            yield
        self.here("step")  # fused: the whole step is one operation


class _DieAfter(TorchDispatchMode):
    def __init__(self, operations: int, die: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._die = operations, die

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._left -= 1
        if self._left == 0 or "_fused" in str(func):
            self._die()
        return result


# The cases


class Case:
    """Objects to train, what of them goes into the state, and one step."""

    def __init__(self, killer: Killer) -> None:
        self.killer = killer
        self.state: dict[str, Any] = {}
        self.config = Config()
        self.rehearsal: Callable[[], object] | None = None
        self.epoch_steps = 0
        """steps of one pass through the data; 0: no end"""

    def epoch(self, number: int) -> Iterator[Any]:
        while True:
            yield torch.randn(BATCH, WIDTH)

    def train(self, batch: Any) -> float:
        raise NotImplementedError

    def update(self, optimizer: Any, *args: Any) -> None:
        with self.killer.in_step():
            optimizer.step(*args)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(self.killer.on_backward(batch.requires_grad_())) - batch.detach()).square().mean()


class Net(nn.Module):
    """Dropout (draws), BatchNorm (buffers written in forward), a tied weight, channels_last, a bit of numpy."""

    def __init__(self, killer: Killer, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.killer = killer
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype)
        self.drop = nn.Dropout(0.2)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, dtype=dtype)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.outer.weight = self.inner.weight
        self.register_buffer("late", torch.zeros(WIDTH, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.tanh(self.norm(self.inner(x))))
        image = x.view(-1, 4, 10, WIDTH // 40).contiguous(memory_format=torch.channels_last)
        x = x + self.conv(image).reshape(x.shape)
        self.late = x.detach().mean(0)
        return self.outer(self.killer.on_backward(x))


def simple(killer: Killer, kind: str, schedule: str, **options: str) -> Case:
    """One model, one optimizer, one scheduler, an averaged copy, draws from python, numpy and an own generator."""
    case = Case(killer)
    model = Net(killer)
    if kind != "lbfgs":  # which wants gradients that can be flattened
        model.conv.to(memory_format=torch.channels_last)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = SCHEDULERS[schedule](optimizer)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    case.state = {
        "model": model, "averaged": averaged, "optimizer": optimizer, "scheduler": scheduler, "generator": generator,
    }  # fmt: skip
    with_closure = "closure" in options

    def train(batch: torch.Tensor) -> float:
        batch = batch * random.random() + float(np.random.normal())
        batch = batch + torch.randn(BATCH, WIDTH, generator=generator)
        losses: list[float] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            return loss

        if with_closure:
            case.update(optimizer, closure)
        else:
            closure()
            case.update(optimizer)
        scheduler.step()
        averaged.update_parameters(model)
        return losses[0]

    case.train = train  # type: ignore[method-assign]
    if "rush" in options:
        model.drop.register_forward_hook(lambda *_: time.sleep(0.01))
    return case


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "plain_sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=5, line_search_fn="strong_wolfe"),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "onecycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=40),
    "multistep": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 7], gamma=0.5),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "step": lambda o: schedulers.StepLR(o, 3),
    "constant": lambda o: schedulers.ConstantLR(o, 0.3, 4),
    "linear": lambda o: schedulers.LinearLR(o, 0.3, 1.0, 6),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 20, 2.0),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.05, step_size_up=3, cycle_momentum=False),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=5),
}


def zoo(killer: Killer) -> Case:
    """Every optimizer of torch.optim on a layer of its own, every scheduler on one of them, in lists."""
    case = Case(killer)
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax,
        torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop,
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
        OPTIMIZERS["sgd"], OPTIMIZERS["sgd_fused"], OPTIMIZERS["tensor_lr"], OPTIMIZERS["plain_sgd"],
    ]  # fmt: skip
    if hasattr(torch.optim, "Muon"):
        kinds.append(torch.optim.Muon)
    names = [name for name in SCHEDULERS if name != "onecycle"]
    layers = nn.ModuleList(nn.Linear(WIDTH, 20, bias=False) for _ in range(max(len(kinds), len(names))))
    embedding = nn.Embedding(30, 8, sparse=True)
    pairs = zip(layers, [*kinds, *[OPTIMIZERS["plain_sgd"]] * len(layers)], strict=False)
    optimizers = [kind(layer.parameters()) for layer, kind in pairs]
    many = [SCHEDULERS[name](optimizer) for name, optimizer in zip(names, optimizers, strict=False)]
    plateau = schedulers.ReduceLROnPlateau(optimizers[3], patience=1, factor=0.5)
    sparse = torch.optim.SparseAdam(list(embedding.parameters()))
    case.state = {
        "layers": layers, "embedding": embedding, "optimizers": {"all": optimizers, "sparse": (sparse,)},
        "schedulers": [*many, plateau],
    }  # fmt: skip

    def train(batch: torch.Tensor) -> float:
        loss = torch.stack([killer.on_backward(layer(batch)).square().mean() for layer in layers]).sum()
        loss = loss + embedding(torch.randint(30, (4,))).mean()
        for optimizer in (*optimizers, sparse):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (*optimizers, sparse):
            case.update(optimizer)
        for scheduler in many:
            scheduler.step()
        plateau.step(round(loss.item(), 1))
        return float(loss.item())

    case.train = train  # type: ignore[method-assign]
    return case


def adversaries(killer: Killer) -> Case:
    """Two optimizers; the second steps only every other time. Both share nothing but the noise."""
    case = Case(killer)
    first, second = Net(killer), Net(killer)
    one = torch.optim.AdamW(first.parameters(), lr=1e-2, fused=True)
    two = torch.optim.SGD(second.parameters(), lr=1e-2, momentum=0.9)
    case.state = {
        "models": [first, second], "optimizers": {"one": one, "two": two}, "counter": {"calls": 0, "history": []},
        "schedulers": [schedulers.ExponentialLR(one, 0.9), schedulers.StepLR(two, 2)],
    }  # fmt: skip

    def train(batch: torch.Tensor) -> float:
        counter = case.state["counter"]
        counter["calls"] += 1
        loss = case.loss(first, batch)
        one.zero_grad()
        loss.backward()
        case.update(one)
        if counter["calls"] % 2 == 0:
            two.zero_grad()
            case.loss(second, first(batch).detach()).backward()
            case.update(two)
            case.state["schedulers"][1].step()
        case.state["schedulers"][0].step()
        counter["history"].append(loss.item())
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


class MasterSGD(torch.optim.Optimizer):
    """bf16 parameters, fp32 masters and momentum, and an int64 index: all of them in the state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["index"] = torch.tensor([1 << 40, 0])
                    state["seen"] = 0
                state["index"][1] += 1
                state["seen"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"])
                parameter.copy_(state["master"])


def masters(killer: Killer) -> Case:
    case = Case(killer)
    model = Net(killer, torch.bfloat16)
    optimizer = MasterSGD(model.parameters())
    scheduler = schedulers.LinearLR(optimizer, 0.1, 1.0, 5)
    case.state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def train(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = case.loss(model, batch.bfloat16())
        loss.backward()
        case.update(optimizer)
        scheduler.step()
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


def scaled(killer: Killer, kind: str) -> Case:
    """Gradients overflow at two steps: the scaler skips the update (no hook fires, or one that changes nothing)."""
    case = Case(killer)
    model = Net(killer)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    case.state = {"model": model, "optimizer": optimizer, "scaler": scaler, "calls": {"number": 0}}

    def train(batch: torch.Tensor) -> float:
        calls = case.state["calls"]
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        scaler.scale(loss * (math.inf if calls["number"] in (3, 4, 7) else 1.0)).backward()
        with killer.in_step():
            scaler.step(optimizer)
        scaler.update()
        calls["number"] += 1
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


def handmade(killer: Killer) -> Case:
    """No optimizer and no scheduler: tensors, values and generators of the user's own, updated by hand."""
    case = Case(killer)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(3)]
    momenta = tuple(torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in weights)
    values = {"weights": weights, "momenta": momenta, "lr": 0.01, "history": np.zeros(40), 7: ("seven", [])}
    generators = {
        "numpy": np.random.default_rng(torch.initial_seed()), "python": random.Random(torch.initial_seed()),
    }  # fmt: skip
    case.state = {"values": values, "generators": generators}

    def train(batch: torch.Tensor) -> float:
        batch = batch * generators["python"].random() + float(generators["numpy"].normal())
        leaves = [weight.requires_grad_() for weight in values["weights"]]
        out = batch
        for leaf in leaves:
            out = killer.on_backward(torch.tanh(out @ leaf))
        loss = (out - batch).square().mean()
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad(), killer.in_step():
            for weight, momentum, grad in zip(leaves, values["momenta"], grads, strict=True):
                momentum.mul_(0.9).add_(grad)
                weight.sub_(momentum, alpha=values["lr"])
                weight.requires_grad_(False)
        values["lr"] *= 0.9
        values["history"][killer.step] = loss.item()
        values[7][1].append(loss.item())
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


def in_backward(killer: Killer) -> Case:
    """An optimizer per parameter that steps inside backward, as soon as its gradient is there."""
    case = Case(killer)
    model = Net(killer)
    optimizers = {name: torch.optim.AdamW([p], lr=1e-2, fused=True) for name, p in model.named_parameters()}

    def step(name: str, parameter: torch.Tensor) -> None:
        case.update(optimizers[name])
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: step(name, p))
    case.state = {"model": model, "optimizers": optimizers}

    def train(batch: torch.Tensor) -> float:
        loss = case.loss(model, batch)
        loss.backward()
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


def normed(killer: Killer) -> Case:
    """An embedding with max_norm writes its weight in the forward pass, where no optimizer says so."""
    case = Case(killer)
    embedding = nn.Embedding(2000, WIDTH, max_norm=0.5)
    optimizer = OPTIMIZERS["sgd"](embedding.parameters())
    case.state = {"embedding": embedding, "optimizer": optimizer}

    def train(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = (killer.on_backward(embedding(torch.randint(2000, (64,)))) * 3).square().mean()
        loss.backward()
        time.sleep(0.01)
        case.update(optimizer)
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


def accumulating(killer: Killer) -> Case:
    """Takes between micro-batches: gradients are part of the state."""
    case = Case(killer)
    case.config = Config(grads=True)
    model = Net(killer)
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    optimizer.zero_grad()
    case.state = {"model": model, "optimizer": optimizer, "calls": {"number": 0}}

    def train(batch: torch.Tensor) -> float:
        calls = case.state["calls"]
        calls["number"] += 1
        loss = case.loss(model, batch)
        loss.backward()
        if calls["number"] % 3 == 0:
            case.update(optimizer)
            optimizer.zero_grad()
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


class Rows(Dataset[torch.Tensor]):
    """Row n is a function of n, with noise drawn in whatever process reads it."""

    def __init__(self, rows: int, *, noisy: bool) -> None:
        self.rows, self.noisy = rows, noisy

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.linspace(-1, 1, WIDTH) * (index + 1) / self.rows
        if self.noisy:
            row = row + torch.randn(WIDTH) * random.random() + float(np.random.rand())
        return row


def loading(
    killer: Killer,
    workers: str = "0",
    own: str = "0",
    shuffle: str = "1",
    late: str = "0",
    persistent: str = "0",
    validate: str = "0",
) -> Case:
    """A StatefulDataLoader of five batches an epoch. `late`: the epoch's last take comes after the loop has ended."""
    case = Case(killer)
    model = Net(killer)
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    generator = torch.Generator().manual_seed(torch.initial_seed()) if own == "1" else None
    # Randomness inside workers is re-seeded at a restart, which keepstep cannot help: only the main process is noisy.
    data = Rows(5 * BATCH - 3, noisy=workers == "0")
    loader = StatefulDataLoader(
        data, batch_size=BATCH, shuffle=shuffle == "1", num_workers=int(workers), generator=generator,
        persistent_workers=persistent == "1",
    )  # fmt: skip
    case.state = {"model": model, "optimizer": optimizer, "loader": loader}
    validation = StatefulDataLoader(data, batch_size=BATCH, shuffle=True, num_workers=int(workers))
    if validate == "1":
        case.state |= {"validation": validation, "calls": {"number": 0}}
    case.epoch_steps = len(loader)
    case.late = late == "1"  # type: ignore[attr-defined]

    def train(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = case.loss(model, batch + torch.randn_like(batch) * random.random() + float(np.random.rand()))
        loss.backward()
        case.update(optimizer)
        if validate == "1":
            case.state["calls"]["number"] += 1
            if case.state["calls"]["number"] % 3 == 0:
                return loss.item() + sum(model(batch).mean().item() * n for n, batch in enumerate(validation))
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    case.epoch = lambda number: iter(loader)  # type: ignore[method-assign]
    return case


def data_parallel(killer: Killer, rehearse: str = "0", bucket_mb: str = "25") -> Case:
    """DDP with BatchNorm and dropout that differ by rank, a sampler by rank, and a scaler."""
    case = Case(killer)
    rank = dist.get_rank()
    model = Net(killer)
    model._non_persistent_buffers_set.add("late")  # DDP broadcasts buffers; this one is rank 0's for nobody
    body = nn.Sequential(model, nn.Linear(WIDTH, 97), nn.Tanh(), nn.Linear(97, WIDTH))
    parallel = DistributedDataParallel(body, bucket_cap_mb=float(bucket_mb))
    optimizer = OPTIMIZERS["fused"](parallel.parameters())
    scheduler = SCHEDULERS["cosine"](optimizer)
    data = Rows(6 * BATCH * dist.get_world_size(), noisy=True)
    sampler = DistributedSampler(data, shuffle=True)
    loader = StatefulDataLoader(data, batch_size=BATCH, sampler=sampler)
    case.state = {"model": parallel, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    case.epoch_steps = len(loader)
    torch.manual_seed(torch.initial_seed() + 100 * rank)  # dropout and noise of its own on every rank
    random.seed(torch.initial_seed())

    def train(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = case.loss(parallel, batch + torch.randn_like(batch))
        loss.backward()
        case.update(optimizer)
        scheduler.step()
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    case.epoch = lambda number: iter(loader)  # type: ignore[method-assign]
    if rehearse == "1":
        case.rehearsal = lambda: parallel(torch.zeros(BATCH, WIDTH)).sum().backward()
    return case


def sharded(killer: Killer, **only: str) -> Case:
    """FSDP2 in all its settings side by side: uneven shards, an empty one, resharding or not, three kinds of AdamW."""
    case = Case(killer)
    settings = [(True, "loop"), (False, "foreach"), (True, "fused"), (False, "loop"), (True, "foreach")]
    models, optimizers = [], []
    for reshard, kind in settings:
        layers = [nn.Linear(WIDTH, 1), nn.Linear(1, 131), nn.Linear(131, 129, bias=False), nn.Linear(129, WIDTH)]
        model = nn.Sequential(*layers, nn.Dropout(0.1))
        for layer in layers[1:]:
            fully_shard(layer, reshard_after_forward=reshard)
        models.append(fully_shard(model, reshard_after_forward=reshard))
        parameters = list(model.parameters())
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}]
        optimizers.append(OPTIMIZERS[kind](groups))
    scheduler = SCHEDULERS["onecycle"](optimizers[0])
    case.state = {"models": models, "optimizers": optimizers, "scheduler": scheduler}
    torch.manual_seed(torch.initial_seed() + 100 * dist.get_rank())

    def train(batch: torch.Tensor) -> float:
        total = 0.0
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = case.loss(model, batch.detach().clone())
            loss.backward()
            case.update(optimizer)
            total += loss.item()
        scheduler.step()
        return total

    case.train = train  # type: ignore[method-assign]
    return case


def frameworks(killer: Killer) -> Case:
    """Objects as frameworks have them: optimizers in an Optimizer, flat states, weights that hooks show in parts."""
    case = Case(killer)
    models = [nn.Sequential(FusedProjection(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    other = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.BatchNorm1d(WIDTH))
    container, flat = Container(*models), FlatMomentum(other.parameters(), lr=1e-2, momentum=0.9)
    case.state = {
        "models": models, "other": other, "container": container, "flat": flat,
        "scheduler": schedulers.ExponentialLR(container, 0.9),
    }  # fmt: skip

    def train(batch: torch.Tensor) -> float:
        container.zero_grad()
        flat.zero_grad()
        loss = case.loss(nn.Sequential(*models, other), batch)
        loss.backward()
        case.update(container)
        case.update(flat)
        case.state["scheduler"].step()
        return loss.item()

    case.train = train  # type: ignore[method-assign]
    return case


def flat_sharded(killer: Killer, original: str = "1") -> Case:
    """FSDP1, and a forward pass without gradients before each take, which leaves the root unsharded."""
    case = Case(killer)
    wrap = functools.partial(FSDP, use_orig_params=original == "1", device_id=torch.device("cpu"))
    model = wrap(nn.Sequential(wrap(nn.Linear(WIDTH, 131)), nn.Linear(131, WIDTH)))
    optimizer = OPTIMIZERS["loop"](model.parameters())
    case.state = {"model": model, "optimizer": optimizer}
    torch.manual_seed(torch.initial_seed() + 100 * dist.get_rank())

    def train(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        case.update(optimizer)
        with torch.no_grad():
            return loss.item() + model(batch).sum().item()

    case.train = train  # type: ignore[method-assign]
    return case


CASES: dict[str, Callable[..., Case]] = {
    "simple": simple, "zoo": zoo, "adversaries": adversaries, "masters": masters, "scaled": scaled,
    "handmade": handmade, "in_backward": in_backward, "normed": normed,
    "accumulating": accumulating, "loading": loading, "ddp": data_parallel, "fsdp": sharded,
    "frameworks": frameworks, "fsdp1": flat_sharded,
}  # fmt: skip


# One life


def run(arguments: argparse.Namespace) -> None:
    rank = begin_process_group(arguments)
    out = Path(arguments.out)
    killer = Killer(arguments.kill, out, rank)
    seed = fresh_seed(out, rank, rush=arguments.rush)
    torch.manual_seed(seed)
    random.seed(seed + 1)
    np.random.seed(seed + 2)
    case = make(arguments.case, killer)
    if arguments.bare:
        train(case, None, None, arguments, rank)
    else:
        with Snapshotter(case.state, case.config) as snapshots:
            restored = snapshots.restore(rehearsal=case.rehearsal)
            wait_for_grant(snapshots)
            train(case, snapshots, restored, arguments, rank)
    (out / f"final-{rank}.json").write_text(json.dumps(whole(case)))
    if dist.is_initialized():
        dist.destroy_process_group()


def fresh_seed(out: Path, rank: int, *, rush: bool) -> int:
    """Once there is a snapshot a new life begins with other weights and other draws: all must come from there."""
    losses = out / f"losses-{rank}"
    executed = losses.read_text().splitlines() if losses.exists() else []
    return 1 if rush or len(executed) < 2 else 1000 + len(executed)


def make(text: str, killer: Killer) -> Case:
    """`name:key=value,key=value` → that case."""
    name, _, options = text.partition(":")
    return CASES[name](killer, **dict(option.split("=") for option in options.split(",") if option))


def begin_process_group(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return 0
    dist.init_process_group("gloo")
    return dist.get_rank()


def train(
    case: Case, snapshots: Snapshotter | None, restored: Restored | None, arguments: argparse.Namespace, rank: int
) -> None:
    out = Path(arguments.out)
    step = restored.step + 1 if restored else 0
    note(out / f"lives-{rank}", str(restored.step if restored else None))
    case.killer.step = step
    case.killer.here("restore")
    empty = 0
    while step < arguments.steps and empty < 3:
        empty += 1
        last = -1
        for batch in case.epoch(step):
            empty = 0
            case.killer.step = step
            loss = case.train(batch)
            note(out / f"losses-{rank}", f"{step} {float(loss).hex()}")
            last = step
            if not (getattr(case, "late", False) and (step + 1) % case.epoch_steps == 0):
                take(case, snapshots, step, arguments, rank)
                last = -1
            step += 1
            if step >= arguments.steps:
                break
        if last >= 0:
            take(case, snapshots, last, arguments, rank)
    assert step == arguments.steps, "the data ended"


def take(case: Case, snapshots: Snapshotter | None, step: int, arguments: argparse.Namespace, rank: int) -> None:
    if snapshots is None:
        return
    pending = snapshots.take(step)
    case.killer.here("take")
    if not arguments.rush and pending.wait(timeout_s=WAIT_S) is not Survives.PROCESS:
        note(Path(arguments.out) / f"takes-{rank}", f"{step} {pending.reason}")


def note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


# What is compared


def whole(case: Case) -> dict[str, Any]:
    """Everything, bit for bit; then what every generator draws next."""
    found: dict[str, Any] = {}
    for name, thing in flatten(case.state):
        if isinstance(thing, torch.Generator):
            found[name] = described(thing.get_state())
        elif isinstance(thing, (random.Random, np.random.Generator)):
            found[name] = described(thing.random())
        else:
            found[name] = described(thing.state_dict() if hasattr(thing, "state_dict") else thing)
        if isinstance(thing, torch.optim.Optimizer):
            found[f"{name}.grads"] = [described(p.grad) for group in thing.param_groups for p in group["params"]]
    found["draws"] = described([torch.rand(4), random.random(), random.gauss(0, 1), np.random.rand(3)])
    return found


def flatten(state: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        children: Any = state.items()
    elif isinstance(state, (list, tuple)):
        children = enumerate(state)
    else:
        yield path, state
        return
    for key, child in children:
        yield from flatten(child, f"{path}.{key}")


def described(value: Any) -> Any:
    """JSON that two values share only if they have the same types, order, strides and bits."""
    if isinstance(value, torch.Tensor):
        kind = "DTensor " if isinstance(value, DTensor) else ""
        local = value._local_tensor if isinstance(value, DTensor) else value
        if local.layout is not torch.strided:
            local = local.to_dense()
        data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
        digest = hashlib.sha256(data).hexdigest()[:24]
        return f"{kind}{tuple(value.shape)} {local.dtype} {tuple(local.shape)} {tuple(local.stride())} {digest}"
    if isinstance(value, dict):
        return [type(value).__name__, [[repr(key), described(item)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [described(item) for item in value]]
    if isinstance(value, float):
        return f"{type(value).__name__} {value.hex()}"
    if isinstance(value, np.ndarray):
        return f"ndarray {value.dtype} {value.shape} {value.tobytes().hex()}"
    return f"{type(value).__name__} {value!r}"


# Lives on demand


def serve() -> None:
    """One JSON request per line: {"argv", "env", "ranks"}; forks a process per rank, answers with their exit codes.

    A life costs a fork instead of an interpreter with torch in it. The parent imports, and does nothing else.
    """
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        environ = dict(request["env"], MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
        pids = {}
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                ranks = str(request["ranks"])
                environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
                os.environ.update(environ)
                redirect(Path(request["log"]) / f"log-{rank}")
                end(main, request["argv"])
            pids[pid] = rank
        print(json.dumps(reap(pids)), flush=True)


def end(function: Callable[[list[str]], None], argv: list[str]) -> NoReturn:
    """Run it and exit as an interpreter does, without taking every module apart: that is most of a short life."""
    try:
        function(argv)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reap(pids: dict[int, int], grace_s: float = 60.0) -> list[int]:
    """Exit codes by rank; once one has failed the others get some time to notice."""
    codes: dict[int, int] = {}
    failed_at = math.inf
    while len(codes) < len(pids):
        for pid, rank in pids.items():
            if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
                failed_at = min(failed_at, time.monotonic()) if codes[rank] else failed_at
        if time.monotonic() > failed_at + grace_s:
            for pid in [pid for pid, rank in pids.items() if rank not in codes]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[rank] for rank in sorted(codes)]


def redirect(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        os.dup2(target, stream)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve")
    life = commands.add_parser("run")
    life.add_argument("case")
    life.add_argument("--out", required=True)
    life.add_argument("--steps", type=int, default=10)
    life.add_argument("--kill", action="append", default=[])
    life.add_argument("--bare", action="store_true", help="without keepstep")
    life.add_argument("--rush", action="store_true", help="go on without waiting for snapshots")
    arguments = parser.parse_args(argv)
    if arguments.command == "serve":
        serve()
    else:
        run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
