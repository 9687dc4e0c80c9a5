"""torchtitan: a checkpointer that keeps every step in memory, beside torchtitan's own checkpoints on disk.

    torchrun --rdzv-backend=keepstep ... -m torchtitan.train --module llama3 --config llama3_debugmodel \\
        --override.imports keepstep.frameworks.torchtitan.keep

`keep` puts this checkpointer in front of the configured one. A start asks memory first, then the other. All flags
`--checkpoint.*` mean what they meant, and a checkpoint on disk is complete before its step is captured.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config import derive, override

from keepstep.config import Config, resolve
from keepstep.trainer.snapshotter import Snapshotter

TRAIN_STATE = "train_state"  # torchtitan's key of its Trainer among the states


@dataclass(kw_only=True, slots=True)
class MemoryCheckpointConfig(BaseCheckpointManager.Config):
    """The configuration of the checkpointer that was there, and what keepstep does before it."""

    disk: Any
    every: int = 1

    def __post_init__(self) -> None:
        """Check nothing: what both have in common was checked in the configuration that this one replaces."""


class MemoryCheckpointManager(BaseCheckpointManager):
    """Captures every step. What torchtitan asks of a checkpointer goes on to the one for the disk."""

    Config = MemoryCheckpointConfig

    def __init__(
        self,
        config: MemoryCheckpointConfig,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        **others: Any,
    ) -> None:
        self.enable = True
        self._every = config.every
        self._trainer = states[TRAIN_STATE]
        self._state = {
            "model": list(model_parts),
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            **({} if dataloader is None else {"dataloader": dataloader}),
            **states,
        }
        _copy_states_of_workers(dataloader)
        self._snapshots: Snapshotter | None = None
        self._disk = config.disk.build(
            dataloader=dataloader, model_parts=model_parts, optimizers=optimizers,
            lr_schedulers=lr_schedulers, states=states, **others,
        )  # fmt: skip

    @property
    def save_future(self) -> Any:
        return getattr(self._disk, "save_future", None)

    def _load(self, step: int = -1) -> bool:
        self._snapshots = Snapshotter(self._state, Config(every=self._every))
        restored = self._snapshots.restore()
        if restored is None:
            return bool(self._disk.load(step))
        self._repeat_validation()
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # The disk first: a failure in between repeats the step and its checkpoint, and skips neither.
        saved = bool(self._disk.save(curr_step, last_step))
        assert self._snapshots is not None
        self._snapshots.take(curr_step)
        return saved

    def _maybe_wait_for_staging(self) -> None:
        self._disk.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self._disk.maybe_wait_for_saving()

    def _close(self) -> None:
        if self._snapshots is not None:
            self._snapshots.close()  # In torchtitan's `except` clause this is the end of a run that has not finished.
        self._disk.close()

    def _repeat_validation(self) -> None:
        """Validate again where it was due after the step: torchtitan saves before, and its loader draws a seed."""
        trainer = self._trainer
        if trainer.config.validator.enable and trainer.validator.should_validate(trainer.step):
            trainer.validator.validate(trainer.model_parts, trainer.step)


def _copy_states_of_workers(loader: Any) -> None:
    """Let loader workers report copies of their position.

    torchtitan's datasets report their live buffers. torchdata, which sends what changed since the last report, then
    compares them with themselves, and what it sends is wrong.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if getattr(loader, "num_workers", 0) and hasattr(dataset, "state_dict"):
        dataset.state_dict = functools.partial(_copy_of, dataset.state_dict)


def _copy_of(state_dict: Callable[[], Any]) -> Any:
    return copy.deepcopy(state_dict())


@override(target=BaseCheckpointManager.Config, description="every step in memory, by keepstep")
def keep(config: Any, every: int = 0) -> Any:
    """Put keepstep in front of the configured checkpointer. `every`: capture only steps that are multiples of it."""
    if config.create_seed_checkpoint:  # Nothing is trained.
        return config
    every = resolve(Config(every=every) if every else None).every
    # `interval` tells torchtitan's loaders after how many steps their workers report their position.
    return derive(config, MemoryCheckpointConfig, disk=config, every=every, enable=True, interval=every)
