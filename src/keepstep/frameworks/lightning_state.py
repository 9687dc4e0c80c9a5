"""The state of a Lightning fit that is in no module, optimizer or scheduler.

Captured while the training loop waits for its next batch, and put back at the same point of the loop: everything in
between (hooks of the start, loops that begin their epoch) has then happened as in any other start, and is overwritten.
Lightning also needs its part of it before it begins, to go the way of a resumed fit.

Tested with Lightning 2.6. Loops and loggers have public state; the fields named with an underscore here have none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from keepstep.frameworks.lightning_loader import LoaderPosition
from keepstep.frameworks.lightning_metrics import put_back_metrics, read_metrics
from keepstep.types import Stateful

# What hooks find in a checkpoint. What they add is kept.
_OWN_KEYS = ("epoch", "global_step", "state_dict")
_CHECKPOINT_FIELDS = (
    "dirpath", "current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation",
)  # fmt: skip


class FitState:
    """Loops, position in the data, callbacks, metrics, loggers, and what hooks add to a checkpoint."""

    def __init__(self, trainer: Trainer, keep: Callback, position: LoaderPosition) -> None:
        self._trainer, self._keep, self._position = trainer, keep, position
        self._restored: Mapping[str, Any] | None = None
        self._begun = False  # Hooks that write checkpoints are not called before the first batch.

    @property
    def step(self) -> int:
        """The number of the last update, from 0 on: with several optimizers that of the batch they stepped on."""
        steps: int = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        return steps - 1

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:
            return dict(self._restored)
        trainer = self._trainer
        return {
            "loops": _read_loops(trainer),
            "loader": self._position.state_dict(),
            "trainer": {
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "should_stop": trainer.should_stop,
            },
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {name: callback.state_dict() for name, callback in self._callbacks()},
            "checkpoints": self._read_checkpoint_fields(),
            "datamodule": self._datamodule.state_dict() if self._datamodule is not None else {},
            "loggers": [logger.state_dict() for logger in self._loggers()],
            "hooks": self._read_hooks() if self._begun else {},
            "metrics": read_metrics(trainer),
            "validation": _read_validation(trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state
        self._trainer.fit_loop.load_state_dict(dict(state["loops"]))
        self._position.load_state_dict(state["loader"])
        self._load(copy.deepcopy(state))  # Whoever keeps a part of it may change it before the first batch.

    def begin(self) -> None:
        """Begin where the training loop asks for its first batch: what was restored is written once more."""
        self._begun = True
        if self._restored is None:
            return
        state, self._restored = self._restored, None
        trainer = self._trainer
        _put_back_validation(trainer, state["validation"])
        trainer.fit_loop.load_state_dict(dict(state["loops"]))
        for loop in _loops(trainer.fit_loop):
            loop.on_iteration_done()  # From here on nothing is being resumed.
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["trainer"].items():
            setattr(trainer, name, value)
        trainer.precision_plugin.load_state_dict(state["precision"])
        self._load_callbacks(state["callbacks"], state["checkpoints"])
        if self._datamodule is not None:
            self._datamodule.load_state_dict(state["datamodule"])
        for logger, saved in zip(self._loggers(), state["loggers"], strict=True):
            logger.load_state_dict(saved)
        self._load_hooks(state["hooks"])
        put_back_metrics(trainer, state["metrics"])

    # Callbacks and hooks

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        callbacks: list[Any] = self._trainer.callbacks
        return ((callback.state_key, callback) for callback in callbacks if callback is not self._keep)

    def _read_checkpoint_fields(self) -> dict[str, dict[str, Any]]:
        """What `ModelCheckpoint` forgets: which save waits for a validation, and where it wrote last."""
        return {
            name: {field: getattr(callback, field) for field in _CHECKPOINT_FIELDS if hasattr(callback, field)}
            for name, callback in self._callbacks()
            if isinstance(callback, ModelCheckpoint)
        }

    def _load_callbacks(self, saved: Mapping[str, Any], checkpoints: Mapping[str, Mapping[str, Any]]) -> None:
        for name, callback in self._callbacks():
            # Its directory first: with that of a new version of the logger it would forget the best model.
            for field, value in checkpoints.get(name, {}).items():
                setattr(callback, field, value)
            if saved.get(name):
                callback.load_state_dict(saved[name])

    @property
    def _datamodule(self) -> Any:
        return self._trainer.datamodule

    def _loggers(self) -> list[Any]:
        return [logger for logger in self._trainer.loggers if isinstance(logger, Stateful)]

    def _hooks(self) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """Objects that add to a checkpoint: name, object, and what their hooks take before the checkpoint."""
        module = self._trainer.lightning_module
        for name, callback in self._callbacks():
            if is_overridden("on_save_checkpoint", callback, Callback):
                yield name, callback, (self._trainer, module)
        if self._datamodule is not None and is_overridden("on_save_checkpoint", self._datamodule, LightningDataModule):
            yield "datamodule", self._datamodule, ()
        if is_overridden("on_save_checkpoint", module, LightningModule):
            yield "module", module, ()

    def _read_hooks(self) -> dict[str, dict[str, Any]]:
        added: dict[str, dict[str, Any]] = {}
        for name, thing, arguments in self._hooks():
            checkpoint = self._checkpoint()
            thing.on_save_checkpoint(*arguments, checkpoint)
            added[name] = {key: value for key, value in checkpoint.items() if key not in _OWN_KEYS}
        return added

    def _load_hooks(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for name, thing, arguments in self._hooks():
            thing.on_load_checkpoint(*arguments, {**self._checkpoint(), **saved[name]})

    def _checkpoint(self) -> dict[str, Any]:
        """A checkpoint as hooks expect it. What they change of the model has no effect: the snapshot has all of it."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.strategy.lightning_module_state_dict(),
        }


def _read_loops(trainer: Trainer) -> dict[str, Any]:
    """`fit_loop.state_dict()` without the loaders: theirs may draw random numbers."""
    loop = trainer.fit_loop
    return {"epoch_progress": loop.epoch_progress.state_dict(), **loop.epoch_loop.state_dict({}, "epoch_loop.")}


def _loops(loop: Any) -> Iterator[Any]:
    yield loop
    for name in ("epoch_loop", "val_loop", "automatic_optimization", "manual_optimization"):
        if (inner := getattr(loop, name, None)) is not None:
            yield from _loops(inner)


# Validation inside the fit


def _read_validation(trainer: Trainer) -> dict[str, Any]:
    loop = trainer.fit_loop.epoch_loop.val_loop
    loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
    return {
        "seen": dict(loop._seen_batches_per_dataloader),
        "workers": [getattr(loader, "_iterator", None) is not None for loader in loaders],
    }


def _put_back_validation(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """The count by which steps of validation are logged, and workers that wait for the next validation."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if saved["seen"] and loop._combined_loader is None:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
    loop._seen_batches_per_dataloader.update(saved["seen"])
    if loop._combined_loader is not None:
        for loader, waits in zip(loop._combined_loader.flattened, saved["workers"], strict=False):
            if waits and getattr(loader, "_iterator", loader) is None:
                iter(loader)  # A loader that keeps its workers draws less when it begins again.
