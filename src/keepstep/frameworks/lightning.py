"""keepstep in Lightning: `Trainer(callbacks=[Keep()])`.

`on_fit_start` restores, and Lightning begins in the middle of an epoch. A snapshot is taken when the training loop asks
for its next batch: everything of the last one is done then (logging, validation, schedulers, the end of an epoch), and
nothing of the next one has begun. What hooks may have touched since the restore is put back at the same point.

Tested with Lightning 2.6.6: automatic and manual optimization, one device and DDP.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import OrderedDict

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from typing_extensions import override

from keepstep.config import Config
from keepstep.errors import ConfigError
from keepstep.frameworks.lightning_loader import LoaderPosition, TrainLoader, wrap_train_loader
from keepstep.frameworks.lightning_state import FitState
from keepstep.trainer.connection.environment import find_place
from keepstep.trainer.results import PendingSnapshot, Restored
from keepstep.trainer.snapshotter import Snapshotter

log = logging.getLogger("keepstep")

LAST_SNAPSHOT_S = 60.0
LOST_POSITION = "You're resuming from a checkpoint that ended before the epoch ended"
REHEARSED_RANKS = 3  # Two ranks sum in the same order, whatever the buckets are.

# They exchange parts of the model or the optimizer while it trains, or keep parameters outside of the module.
_UNKNOWN_CALLBACKS = frozenset({"BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging"})


class Keep(pl.Callback):
    """Keeps the steps of a fit in memory, and goes on with a fit that was killed. One for each fit.

    `every`: take a snapshot of every so many updates. `config`: all other settings.
    """

    def __init__(self, *, every: int | None = None, config: Config | None = None) -> None:
        self._config = _with_every(config, every)
        self._fit: KeptFit | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            raise ConfigError("this Keep has kept another fit", hint="a new process, with a new Keep, for each fit")
        _refuse(trainer, pl_module)
        self._fit = KeptFit(trainer, self, self._config)
        self._fit.restore()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.check_loader()
            self._fit.hold_validation()
            self._fit.hold_warning()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.wait()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.close(None)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.close(exception)


class KeptFit:
    """One fit: restored at its start, captured at requests for batches."""

    def __init__(self, trainer: pl.Trainer, keep: Keep, config: Config | None) -> None:
        self._trainer = trainer
        self._position = LoaderPosition()
        self._state = FitState(trainer, keep, self._position)
        state = {
            "model": trainer.strategy.model,
            "optimizers": trainer.optimizers,
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "fit": self._state,
        }
        self.snapshots = Snapshotter(state, config)
        self.pending: PendingSnapshot | None = None  # the one that was taken last
        self._restored: Restored | None = None
        self._global_step: int | None = None  # at the last request; None before the first one
        self._limit_val_batches: int | float | None = None
        self._process_dataloader = trainer.strategy.process_dataloader

    def restore(self) -> None:
        trainer = self._trainer
        has_buckets = isinstance(trainer.strategy, DDPStrategy) and trainer.world_size >= REHEARSED_RANKS
        self._restored = self.snapshots.restore(rehearsal=self.rehearse if has_buckets else None)
        if self._restored is not None:
            # Memory is newer than the checkpoint of `fit(ckpt_path=...)`, which would be loaded next.
            trainer._checkpoint_connector._loaded_checkpoint = {}
        # The loader is wrapped when Lightning has done to it what it does to each. That of a rehearsal was not.
        trainer.strategy.process_dataloader = self._wrap

    def before_batch(self) -> None:
        """The training loop asks for its next batch."""
        trainer = self._trainer
        if self._global_step is None:
            self._begin()
        elif trainer.global_step != self._global_step and not trainer.fit_loop._should_accumulate():
            self.pending = self.snapshots.take(self._state.step)
        self._global_step = trainer.global_step

    def _begin(self) -> None:
        self._state.begin()
        if self._limit_val_batches is not None:
            self._trainer.limit_val_batches = self._limit_val_batches
        if self._restored is not None:
            self._restored.restore_rng()

    def hold_validation(self) -> None:
        """Switch validation off until the first batch: a fit that goes on would go through its last end again."""
        if self._restored is not None:
            self._limit_val_batches = self._trainer.limit_val_batches
            self._trainer.limit_val_batches = 0

    def hold_warning(self) -> None:
        """Keep Lightning from warning in mid-epoch that the position of the dataloader is lost: it is restored."""
        if self._restored is not None:
            self._trainer.fit_loop.epoch_loop.reset = self._reset_epoch

    def _reset_epoch(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        del loop.reset
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOST_POSITION, PossibleUserWarning)
            loop.reset()

    def rehearse(self) -> None:
        """Make one update, before the state is written: DDP then has its buckets in their final order.

        Progress, metrics and random states are overwritten too. Hooks of the module are called once more.
        """
        trainer = self._trainer
        fit, connector = trainer.fit_loop, trainer._logger_connector
        loop = fit.epoch_loop
        fit.setup_data()
        batch, _, _ = next(fit._data_fetcher)
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        loop.batch_progress.increment_ready()
        loop.batch_progress.is_last_batch = True  # So gradients are not only accumulated.
        connector.on_batch_start(batch)
        arguments = loop._build_kwargs(OrderedDict(), batch, 0)
        if trainer.lightning_module.automatic_optimization:
            loop.automatic_optimization.run(trainer.optimizers[0], 0, arguments)
        else:
            loop.manual_optimization.run(arguments)
        connector.reset_results()
        connector.reset_metrics()
        fit.teardown()
        fit._combined_loader = None

    def _wrap(self, dataloader: object) -> object:
        loader = self._process_dataloader(dataloader)
        return wrap_train_loader(loader, self._position, self) if self._trainer.training else loader

    def check_loader(self) -> None:
        trainer = self._trainer
        if not isinstance(trainer.train_dataloader, TrainLoader):
            raise ConfigError(
                "keepstep keeps the position of one train dataloader, and this fit has several",
                hint="one dataloader over a dataset that combines them",
            )
        if trainer.num_training_batches == float("inf"):
            raise ConfigError(
                "the train dataloader has no length, so Lightning fetches each batch before the last one is done",
                hint="Trainer(limit_train_batches=<batches in an epoch>), or a dataset with __len__",
            )

    def wait(self) -> None:
        """Wait for the last snapshot: the strategy is about to move the model to the host."""
        if self.pending is not None:
            self.pending.wait(timeout_s=LAST_SNAPSHOT_S)

    def close(self, error: BaseException | None) -> None:
        self._trainer.strategy.process_dataloader = self._process_dataloader
        if error is None:
            self.snapshots.close()
        else:
            self.snapshots.__exit__(type(error), error, error.__traceback__)


def _with_every(config: Config | None, every: int | None) -> Config | None:
    if every is None:
        return config
    given = {name: getattr(config, name) for name in config.given} if config is not None else {}
    return Config(**{**given, "every": every})


def _refuse(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse whatever would not go on exactly after a restore."""
    strategy = type(trainer.strategy)
    if strategy not in (SingleDeviceStrategy, DDPStrategy):
        raise ConfigError(
            f"keepstep does not restore a fit under {strategy.__name__}",
            hint='strategy="ddp" or one device; for sharded models keepstep.Snapshotter in a loop of your own',
        )
    if trainer.world_size != find_place().world_size:
        raise ConfigError(
            f"Lightning started {trainer.world_size} ranks by itself, and nobody restarts them",
            hint="torchrun --rdzv-backend=keepstep --nproc-per-node=<ranks> train.py",
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(
            "training_step(dataloader_iter) fetches batches inside a step", hint="training_step(batch, batch_idx)"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "with reload_dataloaders_every_n_epochs the position in the data of an earlier epoch is unknown",
            hint="reload_dataloaders_every_n_epochs=0, and a dataset or sampler that looks at the epoch",
        )
    for callback in trainer.callbacks:
        if _UNKNOWN_CALLBACKS & {base.__name__ for base in type(callback).__mro__}:
            raise ConfigError(
                f"{type(callback).__name__} changes or keeps parameters where keepstep does not see them",
                hint="train without it, or without Keep()",
            )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        log.warning("val_check_interval is a time: validations come at other steps in each run, killed or not")
