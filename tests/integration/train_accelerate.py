"""A loop around accelerate as its users write it, which can be killed at named instants. Not a test.

    python train_accelerate.py serve            lives on demand, forked, one JSON request per line
    python train_accelerate.py run '{"out": "/tmp/x", "kills": ["1.3:step"], "workers": 2}'      one life

Without `kills` and with `"bare": true` it is the same program without keepstep. Files in `out`, per rank: `losses` (a
line for each batch, with what was drawn), `lives` (the step that each life restored), `final.json` (the whole state).
A kill is `[rank@]epoch.batch:moment`, done once per run. Moments: `backward` (between the gradients and the step),
`step` (everything of the batch is done), `evaluation` (in its middle; `epoch.end:evaluation` for that of the epoch).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from granted import wait_for_grant
from ports import free_port
from torch import nn
from torch.utils.data import DataLoader, Dataset
from train_exact import end, reap, redirect

from keepstep import Snapshotter
from keepstep.frameworks.accelerate import AccelerateLoop, resume

SAMPLES, BATCH = 38, 4
KEPT: list[Program] = []  # torch sometimes deadlocks when it destroys a DDP and its gloo group, and nobody needs that
COMPLETE_S = 60.0

warnings.filterwarnings("ignore", "'set_vital' is deprecated")


@dataclass
class Options:
    """One program: how it loads, evaluates and accumulates, and where it is killed."""

    out: str
    kills: list[str] = field(default_factory=list)
    bare: bool = False
    epochs: int = 2
    accumulate: int = 1
    workers: int = 0
    persistent: bool = False
    shuffle: bool = True
    own_generator: bool = False
    noise: bool = True  # the dataset draws from the global random states
    seedable: bool = False
    stateful: bool = False
    dispatch: bool = False
    drop_last: bool = False
    samples: int = SAMPLES
    evaluate_every: int = 0  # batches
    across_epochs: bool = False  # accumulation goes on over the end of an epoch


class Noisy(Dataset):
    def __init__(self, samples: int, draws: bool) -> None:
        self.inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5))
        self.draws = draws

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.draws:
            return self.inputs[index]
        return self.inputs[index] + 0.1 * torch.randn(6) + random.random() + np.random.random()


class Network(nn.Module):
    """Its parameters are registered in another order than that in which their gradients come."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.input = nn.Linear(32, 1), nn.Linear(6, 32)
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(0.2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.output(self.dropout(self.norm(self.input(batch)).relu()))


class Average:
    """An average of the weights, registered for checkpointing."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for value, parameter in zip(self.values, model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


class Program:
    """The training, written as a user would, but for records and kills."""

    def __init__(self, options: Options) -> None:
        self.options, self.out = options, Path(options.out)
        self.rank = int(os.environ.get("RANK", "0"))
        lives = self.out / f"lives-{self.rank}"
        seed = len(lives.read_text().splitlines()) if lives.exists() else 0
        self.seed = 7 + self.rank + 1000 * seed  # a later life that is right by chance would not be
        for function in (torch.manual_seed, random.seed, np.random.seed):
            function(self.seed)
        plugin = GradientAccumulationPlugin(
            num_steps=options.accumulate, sync_with_dataloader=not options.across_epochs
        )  # fmt: skip
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_plugin=plugin,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=options.seedable, use_stateful_dataloader=options.stateful,
                dispatch_batches=options.dispatch or None,
            ),
        )  # fmt: skip
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        loader = DataLoader(
            Noisy(options.samples, options.noise), batch_size=BATCH, shuffle=options.shuffle,
            num_workers=options.workers, persistent_workers=options.persistent, drop_last=options.drop_last,
            generator=torch.Generator().manual_seed(self.seed) if options.own_generator else None,
        )  # fmt: skip
        held_out = DataLoader(Noisy(9, True), batch_size=BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.held_out, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, held_out, scheduler
        )
        self.average = Average(model)
        self.accelerator.register_for_checkpointing(self.average)
        self.totals: dict[str, Any] = {"loss": 0.0, "history": []}

    def train(self) -> None:
        if self.options.bare:
            self.record("lives", "None")
            for epoch in range(self.options.epochs):
                self.totals["loss"] = 0.0
                self.model.train()
                for index, batch in enumerate(self.loader):
                    self.train_batch(epoch, index, batch)
                self.evaluate(epoch, "end")
            return
        with self.resume() as run:
            for epoch in run.epochs(self.options.epochs):
                self.totals["loss"] = 0.0
                self.model.train()
                for index, batch in enumerate(run.batches(), start=run.batch):
                    self.train_batch(epoch, index, batch)
                self.evaluate(epoch, "end")
            self.check_steps(run)

    def resume(self) -> AccelerateLoop:
        Snapshotter.take = waiting(Snapshotter.take)
        run = resume(
            self.accelerator, self.model, self.optimizer, self.loader, self.scheduler, state={"totals": self.totals}
        )
        self.record("lives", str(run.restored.step if run.restored else None))
        return run

    def check_steps(self, run: AccelerateLoop) -> None:
        steps = next(iter(self.optimizer.optimizer.state.values()))["step"]
        assert run.step == int(steps), f"{run.step} updates were counted, {steps} were made"

    def train_batch(self, epoch: int, index: int, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = (self.model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
            self.accelerator.backward(loss)
            self.kill(f"{epoch}.{index}", "backward")
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.average.update(self.accelerator.unwrap_model(self.model))
        self.totals["loss"] += loss.item()
        gathered = self.accelerator.gather_for_metrics(batch)
        self.record("losses", f"{epoch}.{index} {loss.item().hex()} {len(gathered)} {self.totals['loss'].hex()}")
        if self.options.evaluate_every and (index + 1) % self.options.evaluate_every == 0:
            self.evaluate(epoch, str(index))
        self.kill(f"{epoch}.{index}", "step")

    def evaluate(self, epoch: int, where: str) -> None:
        self.model.eval()
        losses = []
        with torch.no_grad():
            for number, batch in enumerate(self.held_out):
                losses.append(float(self.model(batch + 0.1 * torch.randn_like(batch)).mean()))
                if number == 0:
                    self.kill(f"{epoch}.{where}", "evaluation")
        self.totals["history"].append(sum(losses))
        self.record("losses", f"{epoch}.{where}.evaluation {sum(losses).hex()}")
        self.model.train()

    def record(self, name: str, line: str) -> None:
        with (self.out / f"{name}-{self.rank}").open("a") as file:
            file.write(line + "\n")

    def kill(self, at: str, moment: str) -> None:
        for kill in self.options.kills:
            rank, _, where = kill.rpartition("@")
            marker = self.out / f"killed-{kill.replace('@', '-')}"
            if where == f"{at}:{moment}" and int(rank or 0) == self.rank and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        optimizer = self.optimizer.optimizer
        final = {
            "model": [digest(value) for value in self.model.state_dict().values()],
            "average": [digest(value) for value in self.average.values],
            "optimizer": [digest(value) for state in optimizer.state.values() for value in state.values()],
            "scheduler": {key: repr(value) for key, value in self.scheduler.state_dict().items()},
            "totals": repr(self.totals),
            "iterations": [self.loader.iteration, self.held_out.iteration],
            "accumulated": self.accelerator.step,
            "random": [digest(torch.get_rng_state()), random.random(), np.random.random(), float(torch.rand(()))],
        }
        (self.out / f"final-{self.rank}.json").write_text(json.dumps(final))


def digest(value: Any) -> str:
    tensor = torch.as_tensor(value).detach().contiguous()
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def waiting(take: Any) -> Any:
    """A `take` that has its grant and is complete when it returns: what a kill restores does not depend on time."""

    def take_complete(self: Snapshotter, step: int) -> Any:
        assert wait_for_grant(self, COMPLETE_S)
        pending = take(self, step)
        assert pending.wait(timeout_s=COMPLETE_S), pending
        return pending

    return take_complete


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    program = Program(Options(**json.loads(arguments[0])))
    KEPT.append(program)
    program.train()
    program.finish()
    program.accelerator.wait_for_everyone()


def serve() -> None:
    """As `train_exact.py serve`, with accelerate imported."""
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        environ = dict(request["env"], MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
        pids = {}
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                if (ranks := request["ranks"]) > 1:
                    environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                    environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
                os.environ.update(environ)
                redirect(Path(request["log"]) / f"log-{rank}")
                end(main, request["argv"])
            pids[pid] = rank
        print(json.dumps(reap(pids, grace_s=3.0)), flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else main(sys.argv[2:])
