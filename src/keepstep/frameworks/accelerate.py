"""accelerate: loops of one's own around `accelerator.prepare`, exact after a restore. Tested with accelerate 1.15.

    with resume(accelerator, model, optimizer, loader, scheduler) as run:
        for epoch in run.epochs(3):
            for batch in run.batches():
                with accelerator.accumulate(model):
                    ...

A snapshot is taken when the loop asks for the next batch, if an optimizer has stepped since the last one: all that the
loop does with a batch is then done. What comes after an epoch, such as an evaluation, follows the snapshot of its last
batch; a restore repeats it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader

from keepstep.config import Config
from keepstep.errors import ConfigError
from keepstep.frameworks.accelerate_loader import (
    RepeatableBatches,
    Replay,
    batches_of_a_fetch,
    check_loader,
    install_batches,
    read_loader,
    repeat_without_workers,
    start_stateful,
    write_loader,
)
from keepstep.frameworks.gradient_order import FEW_RANKS, orders_of
from keepstep.trainer.results import Restored
from keepstep.trainer.snapshotter import Snapshotter
from keepstep.trainer.state.objects import GENERATOR, StateObjects, unwrap_optimizer

log = logging.getLogger("keepstep")

PROVEN = ("NO", "MULTI_CPU", "MULTI_GPU")
STATEFUL_HOOKS = ("POWER_SGD", "BATCHED_POWER_SGD")
OWN_NAME = "accelerator"  # of the adapter's own objects in the state


def resume(
    accelerator: Any, *prepared: Any, state: Mapping[str, Any] | None = None, config: Config | None = None
) -> AccelerateLoop:
    """Restore the newest snapshot of this run, if there is one, and return the loop that goes on from it.

    `prepared`: models, optimizers, schedulers and the training loader, as `accelerator.prepare` returned them, in any
    order. Whatever else the accelerator has prepared or registered for checkpointing belongs to the state as well.
    `state`: objects of the program, as `Snapshotter` takes them. Raises ConfigError where exactness is not proven.
    """
    check_accelerator(accelerator)
    loader = _training_loader(accelerator, prepared)
    check_loader(loader)
    for other in accelerator._dataloaders:
        if other is not loader and other.persistent_workers:
            raise ConfigError(
                "a loader that is not trained on has persistent_workers=True, which is not proven: its first pass in a "
                "process draws a random number more than the others",
                hint="use persistent_workers for the training loader only",
            )
    return AccelerateLoop(accelerator, prepared, loader, dict(state or {}), config)


class LoopPosition:
    """Where the loop is, as an object with a state. `taken` changes just before each snapshot."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state


class AccelerateLoop:
    """The epochs and batches of a training run. Made by `resume`; use as a context manager, or call `close()`."""

    def __init__(
        self, accelerator: Any, prepared: tuple[Any, ...], loader: Any, state: dict[str, Any], config: Config | None
    ) -> None:
        self._accelerator, self._loader = accelerator, loader
        self._carried = state
        objects = _objects(accelerator, prepared, state)
        self._models = objects["models"]
        self._position = LoopPosition()
        self._orders = orders_of(self._models, accelerator.num_processes)
        generators = [item.thing for item in StateObjects(state).of(GENERATOR)]
        self._batches: RepeatableBatches = install_batches(loader, generators)
        self._loaders = list(accelerator._dataloaders)
        self._epoch, self._batch, self._ended, self._open = 0, 0, False, False
        self._step, self._stepped = 0, False
        for optimizer in objects["optimizers"]:
            unwrap_optimizer(optimizer).register_step_post_hook(self._note_step)
        own = {name: things for name, things in objects.items() if things}
        self.snapshots = Snapshotter({OWN_NAME: {**own, "position": self._position}, **state}, config)
        try:
            self.restored: Restored | None = self.snapshots.restore(rehearsal=_nothing if self._orders else None)
        except BaseException:
            self.snapshots.close(finished=False)
            raise
        self._resumed = self.restored is not None
        self._workers_missing = self._resumed and loader.persistent_workers
        self._carried_values: dict[str, Any] = {}
        self._warned = False
        if self._resumed:
            self._go_to(self._position.taken)
        else:
            start_stateful(loader)
            for order in self._orders:
                order.note()

    # Where the loop is

    @property
    def step(self) -> int:
        """Updates of the parameters that are done, over all lives of the run."""
        return self._step

    @property
    def batch(self) -> int:
        """The index of the current batch in its epoch; before `batches()`, of the batch that it begins with."""
        return self._batch

    # The loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs that are left, from the one in which the snapshot was taken."""
        for epoch in range(self._epoch, num_epochs):
            if epoch != self._epoch:
                self._epoch, self._batch, self._ended = epoch, 0, False
            self._open = True
            yield epoch
            self._open = False

    def batches(self) -> Iterator[Any]:
        """The batches of the loader that are left of this epoch. Takes a snapshot when the next one is asked for."""
        if not self._open:
            raise ConfigError("batches() must be called once in each epoch", hint="for epoch in run.epochs(num_epochs)")
        self._open = False
        replay = self._begin_replay() if self._resumed else None
        if self._ended:
            return
        if replay is None and self._workers_missing:
            replay = repeat_without_workers(self._batches)
        self._workers_missing = False
        iteration = self._loader.iteration
        self._batches.replay = replay
        for batch in self._loader:
            if replay is not None:
                replay.finish()
                replay = None
            yield batch
            self._batch += 1
            self._ended = bool(self._loader.end_of_dataloader)
            self._take(iteration)

    def _begin_replay(self) -> Replay | None:
        """Continue in the middle of the epoch, or at its end. What the program did since `resume` does not count."""
        assert self.restored is not None
        self._resumed = False
        for name, value in self._carried_values.items():
            _put_back(self._carried[name], value)
        self._carried_values.clear()
        for model, training in zip(self._models, self._position.taken["training"], strict=True):
            if model.training != training:
                model.train(training)
        taken = self._position.taken
        for model, sync in zip(self._models, taken["broadcasts"], strict=True):
            if sync is not None:
                model.require_forward_param_sync = sync
        if self._ended:
            self.restored.restore_rng()
            return None
        self._loader.iteration = taken["iteration"]
        fetched = taken["batch"] * batches_of_a_fetch(self._loader)
        if taken["stateful"] is not None:
            self._loader.load_state_dict(taken["stateful"])
        skips = taken["stateful"] is None
        return Replay(taken["order"], taken["ahead"], fetched, self.restored.restore_rng, skips=skips)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _take(self, iteration: int) -> None:
        if not (self._stepped and self._accelerator.sync_gradients):
            return
        self._stepped = False
        if self._is_interrupted():
            return
        for order in self._orders:
            order.finish()
        self._position.taken = {
            "step": self._step,
            "epoch": self._epoch,
            "batch": self._batch,
            "ended": self._ended,
            "iteration": iteration,
            "accumulated": self._accelerator.step,
            "order": self._batches.order,
            "ahead": self._batches.ahead,
            "loaders": [read_loader(loader) for loader in self._loaders],
            "training": [model.training for model in self._models],
            "broadcasts": [getattr(model, "require_forward_param_sync", None) for model in self._models],
            "stateful": self._loader.state_dict() if self._loader.use_stateful_dataloader else None,
            "gradient_orders": [order.encoded for order in self._orders],
        }
        self.snapshots.take(self._step)
        self._step += 1

    def _is_interrupted(self) -> bool:
        """Whether another prepared loader is in the middle of its batches: its position is nobody's to restore."""
        active = self._accelerator.gradient_state.active_dataloader
        if active is self._loader or active is None:
            return False
        if not self._warned:
            self._warned = True
            log.warning(
                "no snapshot is taken: another prepared loader was left before its last batch, and accelerate takes "
                "its end for that of the training loader. Iterate it to its end, or do not prepare it"
            )
        return True

    def _go_to(self, taken: dict[str, Any]) -> None:
        self._step = taken["step"] + 1
        self._epoch, self._batch, self._ended = taken["epoch"], taken["batch"], taken["ended"]
        self._accelerator.step = taken["accumulated"]
        for loader, saved in zip(self._loaders, taken["loaders"], strict=True):
            write_loader(loader, saved)
        if self._ended:
            self._loader.iteration = taken["iteration"] + 1
            if taken["stateful"] is not None:
                self._loader.dl_state_dict = taken["stateful"]
        for order, encoded in zip(self._orders, taken["gradient_orders"], strict=True):
            order.rehearse(encoded)
        plain = {name: value for name, value in self._carried.items() if isinstance(value, (dict, list))}
        self._carried_values = {name: copy.deepcopy(value) for name, value in plain.items()}

    # The end

    def close(self, *, finished: bool = True) -> None:
        """End. `finished`: training is over, and nothing is kept."""
        self.snapshots.close(finished=finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.snapshots.__exit__(kind, error, trace)


def check_accelerator(accelerator: Any) -> None:
    """Raise ConfigError for ways to train whose exactness is not proven."""
    kind = accelerator.distributed_type.name
    if kind not in PROVEN:
        raise ConfigError(
            f"accelerate with {kind} is not proven: its state lies where this adapter does not look",
            hint="use one process or DDP; for FSDP2 use a loop of your own with keepstep.Snapshotter",
        )
    if accelerator.parallelism_config is not None:
        raise ConfigError("accelerate with a ParallelismConfig is not proven", hint="use one process or DDP")
    if accelerator.num_processes > 1 and not accelerator.even_batches:
        raise ConfigError(
            "even_batches=False gives the processes different numbers of batches, so their snapshots do not match",
            hint="leave even_batches at its default",
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook.name in STATEFUL_HOOKS:
        raise ConfigError(
            f"the communication hook {handler.comm_hook.name} keeps errors of earlier steps where nobody can read them",
            hint="use another hook, or none",
        )
    if handler is not None and handler.static_graph and accelerator.num_processes > FEW_RANKS:
        raise ConfigError("static_graph with three or more processes is not proven", hint="leave static_graph out")


def _training_loader(accelerator: Any, prepared: tuple[Any, ...]) -> Any:
    loaders = [each for each in prepared if isinstance(each, DataLoader)]
    if len(loaders) != 1:
        raise ConfigError(
            f"resume() needs the one loader that is trained on, and was given {len(loaders)}",
            hint="leave loaders for evaluation out: iterate them as always",
        )
    is_prepared = any(loaders[0] is each for each in accelerator._dataloaders)
    if not is_prepared or not isinstance(loaders[0], (DataLoaderShard, DataLoaderDispatcher)):
        raise ConfigError(
            "the training loader was not prepared by this accelerator", hint="loader = accelerator.prepare(loader)"
        )
    return loaders[0]


def _objects(accelerator: Any, prepared: tuple[Any, ...], state: dict[str, Any]) -> dict[str, list[Any]]:
    """Whatever the accelerator has prepared, and what was given beside it, by kind."""
    if OWN_NAME in state:
        raise ConfigError(f"the name {OWN_NAME!r} in the state is taken", hint="use another name")
    models = [each for each in prepared if isinstance(each, torch.nn.Module)]
    optimizers = [each for each in prepared if isinstance(each, torch.optim.Optimizer)]
    others = [each for each in prepared if not isinstance(each, (torch.nn.Module, torch.optim.Optimizer, DataLoader))]
    objects = {
        "models": _unite(accelerator._models, models),
        "optimizers": _unite(accelerator._optimizers, optimizers),
        "schedulers": _unite(accelerator._schedulers, others),
        "registered": list(accelerator._custom_objects),
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    if not objects["optimizers"]:
        raise ConfigError("no optimizer was prepared, so no step can be seen", hint="accelerator.prepare(optimizer)")
    return objects


def _unite(known: list[Any], given: list[Any]) -> list[Any]:
    """Both lists, each object once. A wrapper and what it wraps are one."""
    inside = [getattr(each, name, None) for each in known for name in ("optimizer", "scheduler", "module")]
    return [*known, *(each for each in given if not any(each is other for other in [*known, *inside]))]


def _nothing() -> None:
    """The rehearsal that `restore` asks for is made afterwards, from the state: the order of the gradients is in it."""


def _put_back(container: Any, value: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(value)
    else:
        container.extend(value)
