"""A Lightning fit that can be killed anywhere and records every bit of its results. Not a test.

    python lightning_program.py fit '{"out": "/tmp/run", "keep": true, "kills": ["3", "val 1 0"], ...}'
    python lightning_program.py serve      forks a process for each such line, answers with its exit code

It records, one line each: losses of training and validation, everything that the logger receives, and at the end the
parameters, buffers, optimizers, schedulers, callbacks, metrics and random states.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import random
import signal
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from granted import wait_for_grant
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader
from train_exact import end, reap, redirect

from keepstep.frameworks import lightning
from keepstep.frameworks.lightning import Keep, KeptFit

GRANT_S = 60.0
COMPLETE_S = 60.0


@dataclass(frozen=True)
class Fit:
    """One fit. A kill is an update whose snapshot is complete, `val N B` or `batch N`, perhaps behind `rank@`."""

    out: str
    keep: bool = True
    kills: list[str] = field(default_factory=list)
    epochs: int = 3
    samples: int = 50
    accumulate: int = 2
    optimization: str = "automatic"  # or: manual, two (optimizers)
    validation: bool = False
    val_check_interval: float | int = 1.0
    plateau: str = ""  # or: epoch, step
    workers: int = 0
    persistent: bool = False
    ranks: int = 1
    every: int = 1
    metrics: bool = False
    max_steps: int = -1
    checkpoint: str = ""  # where to begin
    save: bool = False


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Draws noise, unless a worker loads it."""

    def __init__(self, size: int, noise: bool) -> None:
        self._size, self._noise = size, noise

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.arange(8.0) * (index + 1) % 7
        return sample + 0.1 * torch.randn(8) if self._noise else sample


class Recorder:
    """Lines of one rank, and the kills that it has still before it."""

    def __init__(self, fit: Fit) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._directory = Path(fit.out)
        self._rows = (self._directory / f"rows-{self.rank}").open("a", buffering=1)
        self._kills = [parse_kill(kill) for kill in fit.kills]
        self.keep: Keep | None = None
        self.muted = False

    def row(self, *words: object) -> None:
        if not self.muted:
            print(*words, file=self._rows)

    def reach(self, moment: str) -> None:
        """Kill this process, if it is to be killed here, and was not."""
        for number, (rank, wanted) in enumerate(self._kills):
            done = self._directory / f"killed-{number}"
            if (rank, wanted) == (self.rank, moment) and not done.exists():
                assert self.keep is not None
                assert isinstance(self.keep._fit, KillingFit)
                self.keep._fit.wait_until_complete()
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def final(self, facts: dict[str, Any]) -> None:
        (self._directory / f"final-{self.rank}.json").write_text(json.dumps(facts))


def parse_kill(kill: str) -> tuple[int, str]:
    rank, at, moment = kill.rpartition("@")
    return (int(rank) if at else 0), moment


class KillingFit(KeptFit):
    """Every snapshot is granted, and its process may be killed when it is complete."""

    recorder: Recorder

    def before_batch(self) -> None:
        assert wait_for_grant(self.snapshots, GRANT_S)
        before = self.pending
        super().before_batch()
        if self.pending is not before and self.pending is not None:
            self.wait_until_complete()
            self.recorder.reach(str(self.pending.step))

    def rehearse(self) -> None:
        self.recorder.muted = True
        super().rehearse()
        self.recorder.muted = False

    def wait_until_complete(self) -> None:
        if self.pending is not None and self.pending.step % self.snapshots.config.every == 0:
            assert not self.pending.skipped, self.pending.reason
            assert self.pending.wait(timeout_s=COMPLETE_S).name != "NOTHING"


class RowLogger(Logger):
    """Records what is logged."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    name = "rows"
    version = "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._recorder.row("log", step, name, "=", float(value).hex())


class Module(pl.LightningModule):
    def __init__(self, fit: Fit, recorder: Recorder) -> None:
        super().__init__()
        self._fit, self._recorder = fit, recorder
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8)
        )
        self.head = torch.nn.Linear(8, 1)
        self.automatic_optimization = fit.optimization == "automatic"
        self.spread = torchmetrics.MeanMetric() if fit.metrics else None

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(batch)) - batch.sum(dim=1, keepdim=True) / 10).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        loss = self._loss(batch)
        self._recorder.row("train", self.current_epoch, batch_idx, "=", float(loss).hex())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch.max(), on_epoch=True, on_step=False, reduce_fx="max")
        if self.spread is not None:
            self.spread(batch.std())
            self.log("spread", self.spread, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            self._step(loss, batch_idx)
        self._recorder.reach(f"batch {self.current_epoch} {batch_idx}")
        return loss if self.automatic_optimization else None

    def _step(self, loss: torch.Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()

    def on_train_start(self) -> None:
        torch.rand(3)  # at every start

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            return
        loss = self._loss(batch + 0.01 * torch.randn_like(batch))
        where = (self.current_epoch, self.trainer.global_step, batch_idx)
        self._recorder.row("val", *where, "=", float(loss).hex())
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self._recorder.reach(f"val {self.trainer.global_step} {batch_idx}")

    def configure_optimizers(self) -> Any:
        if self._fit.optimization == "two":
            one = torch.optim.AdamW(self.body.parameters(), lr=0.01)
            two = torch.optim.SGD(self.head.parameters(), lr=0.01, momentum=0.9)
            return [one, two], [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in (one, two)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self._fit.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
            monitor = "val_loss_epoch" if self._fit.validation else "loss_epoch"
            config = {"scheduler": scheduler, "interval": self._fit.plateau, "monitor": monitor, "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": config}
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def run(fit: Fit) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(7)
    recorder = Recorder(fit)
    module = Module(fit, recorder)
    stored = ModelCheckpoint(dirpath=Path(fit.out) / "checkpoints", monitor="loss_epoch", save_last=True)
    stopping = EarlyStopping("loss_epoch", patience=50, strict=False)
    callbacks: list[pl.Callback] = [stopping, *([stored] if fit.save else [])]
    if fit.keep:
        KillingFit.recorder = recorder
        lightning.KeptFit = KillingFit  # type: ignore[misc]
        recorder.keep = Keep(every=fit.every)
        callbacks.append(recorder.keep)
    trainer = pl.Trainer(
        max_epochs=fit.epochs, max_steps=fit.max_steps, accelerator="cpu", devices=fit.ranks, callbacks=callbacks,
        strategy="ddp" if fit.ranks > 1 else "auto", logger=RowLogger(recorder), log_every_n_steps=3,
        accumulate_grad_batches=fit.accumulate if module.automatic_optimization else 1,
        limit_val_batches=3 if fit.validation else 0, val_check_interval=fit.val_check_interval,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=fit.save,
        default_root_dir=fit.out,
    )  # fmt: skip
    workers = {"num_workers": fit.workers, "persistent_workers": fit.persistent}
    train = DataLoader(Samples(fit.samples, noise=not fit.workers), batch_size=4, shuffle=True, **workers)
    val = DataLoader(Samples(12, noise=not fit.workers), batch_size=4, **workers)
    trainer.fit(module, train, val if fit.validation else None, ckpt_path=fit.checkpoint or None)
    recorder.final(facts(trainer, module, stored, stopping))


def facts(trainer: pl.Trainer, module: Module, stored: ModelCheckpoint, stopping: EarlyStopping) -> dict[str, Any]:
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return {
        "model": digest(module.state_dict()),
        "optimizers": digest(optimizers),
        "schedulers": digest([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "metrics": {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())},
        "logged": {name: float(value).hex() for name, value in sorted(trainer.logged_metrics.items())},
        "torch": digest(torch.get_rng_state()),
        "python": digest(random.getstate()),
        "numpy": digest(np.random.get_state()),
        "stored": digest({**stored.state_dict(), "dirpath": ""}),
        "best": {Path(path).name: float(score).hex() for path, score in stored.best_k_models.items()},
        "stopping": digest(stopping.state_dict()),
        "step": [trainer.global_step, trainer.current_epoch],
    }


def digest(value: Any) -> str:
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().cpu().contiguous().view(-1).numpy().tobytes()]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {str(key).rpartition("/")[2]: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "You're resuming from a checkpoint that ended before the epoch ended")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run(Fit(**json.loads(argv[0])))


def serve() -> None:
    """A life costs a fork instead of an interpreter with Lightning in it. The parent imports, and does nothing else."""
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(request["env"])
            redirect(Path(request["fit"]["out"]) / "log")
            end(main, [json.dumps(request["fit"])])
        print(json.dumps(reap({pid: 0})), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        end(main, sys.argv[2:])  # three ranks that take their process group apart sometimes hang
