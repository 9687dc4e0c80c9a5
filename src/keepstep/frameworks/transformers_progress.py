"""What transformers' Trainer knows about its progress: attributes, TrainerState, control, callbacks, place in the data.

Everything is read when a snapshot is taken. A restore only hands it over: it is applied where the training goes on,
behind what the Trainer and its callbacks set at the beginning of `train()`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerState

from keepstep import values as codec
from keepstep.errors import RecoveryError
from keepstep.frameworks.transformers_batches import BatchOrder
from keepstep.types import Stateful

log = logging.getLogger("keepstep")

# What the Trainer sums up and remembers between two steps, and what TRL's trainers do.
RUNNING = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip
RUNNING_IN_TRL = ("_metrics", "_total_train_tokens")
# Follows from the arguments and the place of this process, or is kept elsewhere.
NOT_KEPT = frozenset({
    "log_history",  # kept by block
    "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
    "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
})  # fmt: skip
RECORDS_IN_BLOCK = 256
OPEN_RECORDS = 64  # Callbacks may still write into the newest records.
PLAIN = (bool, int, float, str, type(None))
SIZED = (list, dict, set, deque)


@dataclass(frozen=True)
class EpochPosition:
    """The place in the data, counted as the Trainer does."""

    epoch: int = 0
    num_batches: int = 0  # used in this epoch
    ended: bool = False  # no step is left
    batches_in_epoch: int = 0
    accumulation: int = 1  # batches of one step
    training: int = 1  # the how-many-th `train()` of the program


class TrainerProgress:
    """Stateful: reads the progress of a Trainer, and applies a restored one."""

    def __init__(self, trainer: Any, order: BatchOrder, names: tuple[str, ...]) -> None:
        self._trainer, self._order = trainer, order
        self._names = (*RUNNING, *RUNNING_IN_TRL, *names)
        self._restored: Mapping[str, Any] | None = None  # and not applied yet
        self._eval_loaders: set[str] = set()  # of workers that stay, made before the restart and not yet after it
        self._history = HistoryBlocks()
        self._watch = _UncapturedState(trainer, self._names)
        self.position = EpochPosition()

    @property
    def is_pending(self) -> bool:
        """Whether a restored progress waits to be applied."""
        return self._restored is not None

    def state_dict(self) -> Mapping[str, Any]:
        if self._restored is not None:
            return self._restored
        self._watch.warn_about_changes()
        trainer, state = self._trainer, self._trainer.state
        return {
            "position": asdict(self.position),
            "attributes": {name: getattr(trainer, name) for name in self._names if hasattr(trainer, name)},
            "state": {field: getattr(state, field) for field in _state_fields()},
            "history": self._history.state_of(state.log_history),
            "control": trainer.control.state()["args"],
            "callbacks": [[name, _state_of(callback)] for name, callback in self._stateful_callbacks()],
            "order": self._order.state_dict(self.position.num_batches),
            "eval_loaders": sorted({*self._eval_loaders, *getattr(trainer, "_eval_dataloaders", {})}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._restored = saved
        self.position = EpochPosition(**saved["position"])

    def check_position(self, expected: EpochPosition) -> None:
        """Refuse a snapshot of another data loader, or of another `train()`."""
        saved = self.position
        if saved.training != expected.training:
            raise RecoveryError(
                f"the snapshot is of train() number {saved.training} of the program, and this is number "
                f"{expected.training}",
                hint="give each train() a run of its own: keepstep_config=Config(run_id=...)",
            )
        if (saved.batches_in_epoch, saved.accumulation) != (expected.batches_in_epoch, expected.accumulation):
            raise RecoveryError(
                f"an epoch had {saved.batches_in_epoch} batches, {saved.accumulation} for each step, and has "
                f"{expected.batches_in_epoch} now, {expected.accumulation} for each step",
                hint="start with the data and arguments that saved it, or discard it with keepstep release",
            )

    def apply_trainer_state(self) -> None:
        """Set `trainer.state`, which callbacks read when training begins."""
        assert self._restored is not None
        for name, value in self._restored["state"].items():
            setattr(self._trainer.state, name, value)
        self._trainer.state.log_history = records_of(self._restored["history"])

    def apply(self) -> None:
        """Set everything else: the next thing is what followed the snapshot."""
        assert self._restored is not None
        saved, self._restored = self._restored, None
        trainer = self._trainer
        for name, value in saved["attributes"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        for name, value in saved["control"].items():
            setattr(trainer.control, name, value)
        callbacks = list(self._stateful_callbacks())
        for name, state in saved["callbacks"]:
            callback = next((each for known, each in callbacks if known == name), None)
            if callback is None:
                log.warning("the callback %s was saved and is missing now", name)
            else:
                callbacks.remove((name, callback))
                _load(callback, state)
        self._order.load_state_dict(saved["order"])
        self._eval_loaders = set(saved["eval_loaders"])
        self._watch.reset()

    def separate_seed(self, loader: Any) -> None:
        """Let the workers of an evaluation draw no seed when they start: in the undisturbed run they ran already."""
        cached = getattr(self._trainer, "_eval_dataloaders", {})
        for name in [name for name in self._eval_loaders if cached.get(name) is loader]:
            self._eval_loaders.discard(name)
            loader.base_dataloader.generator = torch.Generator()

    def _stateful_callbacks(self) -> Iterator[tuple[str, Any]]:
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, (ExportableState, Stateful)):
                yield _name(callback), callback


class HistoryBlocks:
    """Encodes each record of a history once: what has long been logged changes no more."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._last: Any = None  # the last record in a block

    def state_of(self, history: list[Any]) -> dict[str, Any]:
        size = len(self._blocks) * RECORDS_IN_BLOCK
        if self._blocks and (size > len(history) or history[size - 1] is not self._last):
            self._blocks.clear()  # another list
            size = 0
        while size + RECORDS_IN_BLOCK + OPEN_RECORDS <= len(history):
            block = history[size : size + RECORDS_IN_BLOCK]
            self._blocks.append(codec.encode(block, path="trainer.state.log_history"))
            self._last, size = block[-1], size + RECORDS_IN_BLOCK
        return {"blocks": list(self._blocks), "rest": history[size:]}


def records_of(saved: Mapping[str, Any]) -> list[Any]:
    """The history that `HistoryBlocks` encoded."""
    return [*(record for block in saved["blocks"] for record in codec.decode(block)), *saved["rest"]]


class _UncapturedState:
    """Warns once about attributes that change while training and that nothing captures."""

    def __init__(self, trainer: Any, captured: tuple[str, ...]) -> None:
        self._trainer = trainer
        methods = [method for kind in Trainer.__mro__ for method in vars(kind).values() if hasattr(method, "__code__")]
        self._known = {*captured, *(name for method in methods for name in method.__code__.co_names)}
        self._before: dict[tuple[str, str], Any] = {}
        self._warned: set[tuple[str, str]] = set()

    def reset(self) -> None:
        """Attributes were written by a restore."""
        self._before = {}

    def warn_about_changes(self) -> None:
        now = dict(self._read())
        for key in now.keys() & self._before.keys() - self._warned:
            if now[key] != self._before[key]:
                self._warned.add(key)
                owner, name = key
                remedy = "give it state_dict() and load_state_dict(), or make it an ExportableState"
                if owner == _name(self._trainer):
                    remedy = f"name it: keepstep_attributes = ({name!r},) in the class of the trainer"
                log.warning("%s.%s changes while training and is not restored after a restart: %s", owner, name, remedy)
        self._before = now

    def _read(self) -> Iterator[tuple[tuple[str, str], Any]]:
        trainer = self._trainer
        for name, value in vars(trainer).items():
            if name not in self._known and (mark := _mark(value)) is not None:
                yield (_name(trainer), name), mark
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, (ExportableState, Stateful)) or _is_of_transformers(callback):
                continue
            for name, value in vars(callback).items():
                if (mark := _mark(value)) is not None:
                    yield (_name(callback), name), mark


def _mark(value: Any) -> Any:
    """What changes when a plain value does; None for what is no plain value."""
    if isinstance(value, PLAIN):
        return (value,)
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    return (len(value),) if isinstance(value, SIZED) else None


def _is_of_transformers(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] in ("transformers", "keepstep")


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _state_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(TrainerState) if field.name not in NOT_KEPT]


def _state_of(callback: Any) -> Any:
    return callback.state()["attributes"] if isinstance(callback, ExportableState) else callback.state_dict()


def _load(callback: Any, state: Any) -> None:
    if not isinstance(callback, ExportableState):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)
