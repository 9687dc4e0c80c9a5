"""A training with transformers' Trainer that can be killed anywhere and records every bit of what it did. Not a test.

    python train_transformers.py serve                                      lives on demand, forked, over a pipe
    torchrun ... train_transformers.py run '{"out": "/tmp/x", ...}'         one life; the fields are those of `Life`

A kill is `[rank@]step:moment`, done once per run however many lives it has, when `global_step` is `step`. Moments:
`took` (the snapshot of the step is complete), `begin` (of the next step), `substep` (between two batches of it),
`evaluating`, `epoch_end`, `save`, `end` (of training). Files in `out`, per rank: `losses` (a line per batch), `lives`,
`final.json` (the whole state and history, bit for bit).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports at its first step: here it is done once for all forked lives
from granted import wait_for_grant
from torch import nn
from train_exact import end, free_port, reap, redirect
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from keepstep import Survives
from keepstep.frameworks.transformers import KeepTrainer, keep
from keepstep.trainer.snapshotter import Snapshotter

WIDTH = 24
WAIT_S = 90.0
TIMES = ("runtime", "_per_second")  # Measured times differ from run to run.


@dataclass
class Life:
    """One start of the program."""

    out: str
    kept: str = "class"  # class, instance, or "" for a run without keepstep
    kills: tuple[str, ...] = ()
    epochs: float = 3
    samples: int = 52
    accumulation: int = 2
    workers: int = 0
    noise: bool = False  # drawn where samples are loaded
    seedable: bool = True
    every: int | None = None
    resume: bool | None = None
    stop_epoch_at: int = 0  # a callback ends the epoch after this step
    patience: int = 0
    options: tuple[tuple[str, Any], ...] = ()  # of TrainingArguments


class Killer(TrainerCallback):
    """Ends this process without a word, at the one place that was asked for."""

    def __init__(self, life: Life) -> None:
        self._kills, self._out, self._rank = life.kills, Path(life.out), int(os.environ.get("RANK", 0))

    def here(self, step: int, moment: str) -> None:
        for index, kill in enumerate(self._kills):
            rank, _, place = kill.rpartition("@")
            if place == f"{step}:{moment}" and int(rank or 0) == self._rank:
                try:
                    (self._out / f"killed-{index}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.here(state.global_step, "begin")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.here(state.global_step, "substep")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.here(state.global_step, "evaluating")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.here(state.global_step, "epoch_end")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.here(state.global_step, "save")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.here(state.global_step, "end")


class Counting(TrainerCallback, ExportableState):
    """Counts epochs and steps, and draws where it does."""

    def __init__(self) -> None:
        self.epochs, self.steps, self.drawn = 0, 0, 0.0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": dict(vars(self))}

    def on_epoch_begin(self, *args: Any, **_: Any) -> None:
        self.epochs += 1
        self.drawn += random.random()

    def on_step_end(self, *args: Any, **_: Any) -> None:
        self.steps += 1
        self.drawn += float(np.random.normal())

    def on_epoch_end(self, *args: Any, **_: Any) -> None:
        self.drawn += torch.rand(()).item()


class EpochStop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == self._at


class TinyConfig(PreTrainedConfig):
    model_type = "tiny-for-keepstep"


class Tiny(PreTrainedModel):
    """Dropout, a buffer that is written in forward, and evaluations that draw."""

    config_class = TinyConfig
    main_input_name = "x"

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Tanh())
        self.outer = nn.Linear(WIDTH, 1)
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> dict[str, torch.Tensor]:
        hidden = self.inner(x)
        if not self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        logits = self.outer(hidden).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int, *, noise: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.noise = torch.randn(size, WIDTH, generator=generator), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.randn(WIDTH) + random.random() + float(np.random.normal())
        return {"x": x, "labels": self.x[index].sum()}


class Recorded(Trainer):
    """Appends the loss of every batch to a file."""

    losses: Path
    is_in_step = True

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        if self.is_in_step:
            with self.losses.open("a") as file:
                file.write(f"{self.state.global_step} {loss.item().hex()}\n")
        return loss


class RecordedKept(KeepTrainer, Recorded):
    pass


def patch_take(killer: Killer, lives: Path) -> None:
    """Wait for the grant before each snapshot, and until it is complete."""
    take, restore = Snapshotter.take, Snapshotter.restore

    def take_and_wait(self: Snapshotter, step: int) -> Any:
        due = step % self.config.every == 0 and step > self._rank.step
        if due:
            wait_for_grant(self, WAIT_S)
        pending = take(self, step)
        if due:
            assert pending.wait(timeout_s=WAIT_S) >= Survives.PROCESS, pending
        killer.here(step, "took")
        return pending

    def restore_and_note(self: Snapshotter, *args: Any, **options: Any) -> Any:
        Recorded.is_in_step = False  # a rehearsal is none
        restored = restore(self, *args, **options)
        Recorded.is_in_step = True
        with lives.open("a") as file:
            file.write(f"{restored.step if restored else None}\n")
        return restored

    Snapshotter.take, Snapshotter.restore = take_and_wait, restore_and_note  # type: ignore[method-assign]


def train(life: Life) -> None:
    rank = os.environ.get("RANK", "0")
    out = Path(life.out)
    torch.set_num_threads(1)
    killer = Killer(life)
    patch_take(killer, out / f"lives-{rank}")
    options: dict[str, Any] = {
        "output_dir": str(out / "checkpoints"), "num_train_epochs": life.epochs, "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 8, "gradient_accumulation_steps": life.accumulation, "logging_steps": 3,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 7,
        "dataloader_num_workers": life.workers, "lr_scheduler_type": "cosine", "warmup_steps": 4, "learning_rate": 1e-2,
        "accelerator_config": {"use_seedable_sampler": life.seedable}, **dict(life.options),
    }  # fmt: skip
    args = TrainingArguments(**options)
    torch.manual_seed(3)
    model = Tiny(TinyConfig())
    callbacks: list[TrainerCallback] = [killer, Counting()]
    if life.stop_epoch_at:
        callbacks.append(EpochStop(life.stop_epoch_at))
    if life.patience:
        callbacks.append(EarlyStoppingCallback(life.patience))
    kind = RecordedKept if life.kept == "class" else Recorded
    trainer = kind(
        model=model, args=args, train_dataset=Samples(life.samples, noise=life.noise),
        eval_dataset=Samples(20, noise=False), callbacks=callbacks,
        **({"keepstep_every": life.every} if life.kept == "class" else {}),
    )  # fmt: skip
    trainer.losses = out / f"losses-{rank}"
    if life.kept == "instance":
        keep(trainer, every=life.every)
    result = trainer.train(resume_from_checkpoint=life.resume)
    final = describe(trainer, result)
    (out / f"final-{rank}.json").write_text(json.dumps(final, indent=1, sort_keys=True, default=str))


def describe(trainer: Trainer, result: Any) -> dict[str, Any]:
    numpy = np.random.get_state()
    history = [{k: v for k, v in record.items() if not k.endswith(TIMES)} for record in trainer.state.log_history]
    state = {k: v for k, v in vars(trainer.state).items() if k not in ("log_history", "stateful_callbacks")}
    state["best_model_checkpoint"] = Path(trainer.state.best_model_checkpoint or "").name
    counting = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Counting))
    return {
        "model": digest(trainer.model.state_dict()), "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()), "history": history, "state": state,
        "loss": float(result.training_loss).hex(), "flos": trainer.state.total_flos, "counting": vars(counting),
        "rng": [digest(torch.get_rng_state()), str(random.getstate()), str(numpy[2:]), digest(numpy[1].tolist())],
        "control": vars(trainer.control),
    }  # fmt: skip


def digest(value: Any) -> str:
    return hashlib.sha256(text(value).encode()).hexdigest()


def text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.detach().contiguous().view(-1).numpy().tobytes().hex()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(text, value)) + "]"
    return repr(value)


def serve() -> None:
    """One JSON request per line: {"life", "env", "ranks", "log"}; forks a process per rank, answers with exit codes."""
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        environ = dict(request["env"], MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
        pids = {}
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                ranks = str(request["ranks"])
                if request["ranks"] > 1:
                    environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
                os.environ.update(environ)
                redirect(Path(request["log"]) / f"log-{rank}")
                end(lambda request: train(Life(**request["life"])), request)
            pids[pid] = rank
        print(json.dumps(reap(pids)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        train(Life(**json.loads(sys.argv[2])))
