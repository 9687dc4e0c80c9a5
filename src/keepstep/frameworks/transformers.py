"""transformers' Trainer with keepstep: `class MyTrainer(KeepTrainer, Trainer)`, or `keep(trainer)` for an instance.

A restore comes before the first epoch, when model, optimizer and scheduler exist. A snapshot is taken when everything
of a step is over, logging, evaluation and checkpoint included; that of an epoch's last step when the epoch has ended. A
snapshot in memory goes before `resume_from_checkpoint`; without one the checkpoint is loaded as ever, never both.

The Trainer has no public seam at these places: the methods that are overridden here are checked by name and argument.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from keepstep.config import Config, resolve
from keepstep.errors import ConfigError
from keepstep.frameworks.transformers_batches import BatchOrder
from keepstep.trainer.results import Restored
from keepstep.trainer.snapshotter import Snapshotter

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ConfigError("transformers is not installed", hint="pip install 'keepstep[transformers]'") from error

from keepstep.frameworks.transformers_progress import EpochPosition, TrainerProgress

IN_MEMORY = "the snapshot in memory"  # stands for a checkpoint directory in the Trainer's own methods
OVERRIDDEN = {
    "set_initial_training_values": ("dataloader",),
    "_init_training_state": ("max_steps", "num_train_epochs", "resume_from_checkpoint", "trial"),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": ("epoch", "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"),
    "_maybe_log_save_evaluate": (),
    "_evaluate": ("skip_scheduler",),
    "_load_rng_state": ("checkpoint",),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
}  # fmt: skip

log = logging.getLogger("keepstep")
_trainings = itertools.count(1)
T = TypeVar("T", bound=Trainer)


class KeepTrainer(Trainer):
    """Keeps every step of a Trainer and goes on at the newest one after a restart. Stands before it in the bases.

    `keepstep_every` takes a snapshot only at steps that are multiples of it; `keepstep_config` has all other settings.
    """

    keepstep_every: int | None = None
    keepstep_config: Config | None = None
    keepstep_attributes: tuple[str, ...] = ()  # of a subclass's own, that change from step to step

    _kept: _KeptTraining | None = None

    def __init__(
        self, *args: Any, keepstep_every: int | None = None, keepstep_config: Config | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.keepstep_every, self.keepstep_config = keepstep_every, keepstep_config

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **options: Any) -> Any:
        _check_arguments(self, trial)
        with _KeptTraining(self, resume_from_checkpoint or None) as self._kept:
            return super().train(resume_from_checkpoint=None, trial=trial, **options)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader)
        if self._kept is not None:
            self._kept.open_loader(dataloader)
        return values

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = super().get_eval_dataloader(eval_dataset)
        if self._kept is not None and self._kept.restored:
            self._kept.progress.separate_seed(loader)
        return loader

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *rest: Any, **options: Any
    ) -> Any:
        initialize = functools.partial(
            super()._init_training_state, max_steps, num_update_steps_per_epoch, num_train_epochs
        )
        if self._kept is None:
            return initialize(*rest, **options)
        initialize(resume_from_checkpoint=None, trial=None)
        # Model and optimizer are needed now: the place of the first epoch is read from the snapshot.
        self._kept.prepared = super()._prepare_for_training(max_steps, self._kept.loader, None)
        if self._kept.restore():
            position = self._kept.progress.position
            return num_train_epochs if position.ended else position.epoch, position.num_batches
        checkpoint = self._kept.find_checkpoint()
        if checkpoint is None:
            return 0, 0
        self._load_from_checkpoint(checkpoint)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        return initialize(resume_from_checkpoint=checkpoint, trial=None)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._kept is not None and self._kept.prepared is not None:
            return self._kept.prepared
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _run_epoch(self, **options: Any) -> Any:
        if self._kept is None:
            return super()._run_epoch(**options)
        super()._run_epoch(**options | self._kept.begin_epoch(options["epoch"]))
        self._kept.end_epoch()
        return None

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **options)
        if self._kept is not None:
            self._kept.end_step()

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self._kept is not None and self._kept.restored:
            return {}  # `eval_on_start` was done before the first step
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != IN_MEMORY:
            super()._load_rng_state(checkpoint)
        elif self._kept is not None:
            self._kept.order.finish_resume()


def keep(trainer: T, *, every: int | None = None, config: Config | None = None, attributes: tuple[str, ...] = ()) -> T:
    """Make this Trainer, of whatever class, keep its steps as a `KeepTrainer` does. Returns the same object."""
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"{type(trainer).__name__} is no transformers.Trainer", hint="keep(trainer)")
    if not isinstance(trainer, KeepTrainer):
        trainer.__class__ = _kept_class(trainer.__class__)
    trainer.keepstep_every, trainer.keepstep_config, trainer.keepstep_attributes = every, config, attributes
    return trainer


@functools.cache
def _kept_class(kind: Any) -> type:
    return type(kind.__name__, (KeepTrainer, kind), {"__module__": kind.__module__})


class _ResumeAtBeginning(TrainerCallback):
    """The last callback: applies a snapshot of an epoch's end, behind what all others set when training begins."""

    def __init__(self, kept: _KeptTraining) -> None:
        self._kept = kept

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self._kept.begin_training()


class _KeptTraining:
    """One `train()`: its Snapshotter, and where the data stands."""

    order: BatchOrder
    progress: TrainerProgress

    def __init__(self, trainer: KeepTrainer, checkpoint: str | bool | None) -> None:
        self._trainer, self._checkpoint = trainer, checkpoint
        self._resume_dir: str | None = None  # of the first epoch, by the Trainer itself
        self._snapshots: Snapshotter | None = None
        self._restored: Restored | None = None
        self._callback = _ResumeAtBeginning(self)
        self._expected = EpochPosition(accumulation=trainer.args.gradient_accumulation_steps, training=next(_trainings))
        self._epoch: int | None = None  # the one that runs
        self.loader: Any = None
        self.prepared: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trainer._kept = None
        if self._snapshots is not None:
            self._trainer.remove_callback(self._callback)
            self._snapshots.__exit__(kind, error, trace)

    @property
    def restored(self) -> bool:
        return self._restored is not None

    # Before the first step

    def open_loader(self, loader: Any) -> None:
        """The loader of this training, and the number of its batches."""
        _check_loader(loader)
        self.loader, self.order = loader, BatchOrder(loader)
        self._expected = replace(self._expected, batches_in_epoch=len(loader))

    def restore(self) -> bool:
        """Restore the newest snapshot into the objects that are prepared now. False where there is none."""
        trainer = self._trainer
        _check_prepared(trainer)
        self.progress = TrainerProgress(trainer, self.order, trainer.keepstep_attributes)
        self.progress.position = self._expected
        state = {
            "model": trainer.model_wrapped, "optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler,
            "progress": self.progress,
        }  # fmt: skip
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        settings = resolve(trainer.keepstep_config)
        if trainer.keepstep_every is not None:
            settings = replace(settings, every=trainer.keepstep_every)
        self._snapshots = Snapshotter(state, settings)
        trainer.add_callback(self._callback)
        self._restored = self._snapshots.restore(rehearsal=self._rehearsal())
        if self._restored is not None:
            self.progress.check_position(self._expected)
            self.progress.apply_trainer_state()
        return self.restored

    def find_checkpoint(self) -> str | None:
        """The directory that the Trainer resumes from, there being nothing in memory."""
        if self._checkpoint is True:
            self._resume_dir = get_last_checkpoint(self._trainer.args.output_dir)
            if self._resume_dir is None:
                raise ValueError(f"No valid checkpoint found in output directory ({self._trainer.args.output_dir})")
        elif self._checkpoint:
            self._resume_dir = str(self._checkpoint)
        return self._resume_dir

    def begin_training(self) -> None:
        """The snapshot of an epoch's end is applied before the callbacks of the next epoch's beginning."""
        if self._restored is not None and not self.progress.position.num_batches:
            self.progress.apply()
            self._restored.restore_rng()

    def _rehearsal(self) -> Callable[[], object] | None:
        """DDP of three ranks or more sums its first step in another order: it is done once before the restore."""
        trainer = self._trainer
        parallel = isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        return self._rehearse if parallel and trainer.args.world_size > 2 else None

    def _rehearse(self) -> None:
        trainer, loader = self._trainer, self.loader
        size = min(trainer._train_batch_size, len(loader.dataset))
        samples = loader.collate_fn([loader.dataset[index] for index in range(size)])
        batches, num_items = trainer.get_batch_samples(iter([samples]), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1
        trainer.training_step(trainer.model_wrapped, batches[0], num_items)

    # Each epoch

    def begin_epoch(self, epoch: int) -> dict[str, Any]:
        """Arguments for the Trainer's own epoch, which skips batches where it resumes."""
        self._epoch = epoch
        resume_dir, self._resume_dir = self._resume_dir, None
        restored, position = self._restored, self.progress.position
        if restored is None or not position.num_batches or epoch != position.epoch or not self.progress.is_pending:
            self.order.begin_epoch()
            return {"resume_from_checkpoint": resume_dir}
        self.progress.apply()
        self.order.resume_epoch(position.num_batches, restored.restore_rng)
        return {
            "resume_from_checkpoint": IN_MEMORY, "epochs_trained": epoch,
            "steps_trained_in_current_epoch": position.num_batches,
        }  # fmt: skip

    def end_step(self) -> None:
        """Take a snapshot, unless the epoch ends with this step: then what follows belongs to it."""
        trainer, size = self._trainer, self._expected.batches_in_epoch
        if self._epoch is None or trainer.control.should_epoch_stop or trainer.control.should_training_stop:
            return
        num_batches = round((trainer.state.epoch - self._epoch) * size)
        if num_batches < size:
            self._take(replace(self._expected, epoch=self._epoch, num_batches=num_batches))

    def end_epoch(self) -> None:
        assert self._epoch is not None
        self.order.end_epoch()
        ended = self._trainer.control.should_training_stop
        self._take(replace(self._expected, epoch=self._epoch + 1, ended=ended))
        self._epoch = None

    def _take(self, position: EpochPosition) -> None:
        assert self._snapshots is not None
        self.progress.position = position
        self._snapshots.take(self._trainer.state.global_step)


# What is refused


def _check_version() -> None:
    for name, needed in OVERRIDDEN.items():
        method = getattr(Trainer, name, None)
        if method is None or not {*needed} <= inspect.signature(method).parameters.keys():
            raise ConfigError(
                f"this transformers has no Trainer.{name}({', '.join(needed)})",
                hint="pip install 'keepstep[transformers]' installs a version that was tested",
            )


def _check_arguments(trainer: Any, trial: Any) -> None:
    args = trainer.args
    for is_refused, what, hint in (
        (trainer.is_deepspeed_enabled, "DeepSpeed keeps the state in its own engine", "use DDP"),
        (args.fsdp or trainer.is_fsdp_enabled, "FSDP inside the Trainer was not proven exact", "use DDP"),
        (args.auto_find_batch_size, "auto_find_batch_size changes the batches", "set the size that it found"),
        (args.ignore_data_skip, "ignore_data_skip begins the data anew after a restart", "leave it out"),
        (trial is not None, "a hyperparameter search is many runs in one", "give each trial a process"),
        (
            args.parallel_mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.DISTRIBUTED),
            f"{args.parallel_mode} was not proven exact", "start it with torchrun, one process for each device",
        ),
        (
            getattr(trainer.accelerator, "parallelism_config", None) is not None
            or getattr(trainer, "is_distributed_loading_by_transformers", False),
            "tensor, context and expert parallelism were not proven exact", "use DDP",
        ),
        (
            hasattr(trainer, "_buffered_inputs"),
            f"{type(trainer).__name__} generates batches and uses them for several steps", "use it without keepstep",
        ),
    ):  # fmt: skip
        if is_refused:
            raise ConfigError(f"keepstep does not work with this Trainer: {what}", hint=hint)


def _check_loader(loader: Any) -> None:
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise ConfigError(
            "keepstep does not work with this Trainer: one rank reads the batches of all (dispatch_batches)",
            hint='accelerator_config={"dispatch_batches": False}',
        )


def _check_prepared(trainer: Any) -> None:
    if type(trainer.optimizer).__name__ == "LayerWiseDummyOptimizer" or not isinstance(
        getattr(trainer.optimizer, "optimizer", trainer.optimizer), torch.optim.Optimizer
    ):
        raise ConfigError(
            f"{type(trainer.optimizer).__name__} is no optimizer whose state can be captured", hint="use another optim"
        )


_check_version()
