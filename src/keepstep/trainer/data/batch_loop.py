"""The loop of `Snapshotter.batches`: which batch comes next, and which step the last one has ended.

A step ends when the next batch is asked for: logging, schedulers and evaluation belong to it, whatever they draw. With
gradient accumulation a step has several batches, and ends with the one in which an optimizer stepped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from keepstep.errors import ConfigError
from keepstep.trainer.data.loader import Loader
from keepstep.trainer.state.objects import LOADER, StateObjects

log = logging.getLogger("keepstep")

LOADER_KEY = "loader"
MAX_UNSTEPPED = 1000  # Batches without a step, before a warning.


class UpdateWatch(Protocol):
    """Sees updates of the state."""

    @property
    def stepped(self) -> bool:
        """Whether the state was updated since the last `take`."""


def training_state(state: Mapping[str, Any], loader: Any) -> tuple[StateObjects, Loader | None]:
    """The objects of the state with the loader among them, and the loader that `batches` reads."""
    if loader is not None:
        if LOADER_KEY in state:
            raise ConfigError('both the state and the argument `loader` have a "loader"', hint="give it once")
        state = {**state, LOADER_KEY: loader if isinstance(loader, Loader) else Loader(loader)}
    objects = StateObjects(state)
    loaders = [item.thing for item in objects.of(LOADER) if isinstance(item.thing, Loader)]
    return objects, loaders[0] if len(loaders) == 1 else None


class BatchLoop:
    """Gives the batches of a loader, epoch after epoch, and numbers the steps."""

    def __init__(self, loader: Loader | None, watch: UpdateWatch, step: int) -> None:
        """`step`: the number of the first one."""
        if loader is None:
            raise ConfigError(
                "batches() needs a loader", hint="keepstep.Snapshotter(state, loader=loader)"
            )  # fmt: skip
        self._loader, self._watch = loader, watch
        self._batches: Iterator[Any] | None = None
        self._step = step  # that the next batches belong to
        self._num_unstepped = 0  # batches since the last step

    def ended_step(self) -> int | None:
        """The step that the last batch has ended; None while an optimizer has yet to step."""
        if not self._num_unstepped:
            return None
        if not self._watch.stepped:
            if self._num_unstepped == MAX_UNSTEPPED:
                log.warning(
                    "no optimizer of the state has stepped for %d batches, so batches() takes no snapshot: give it the "
                    "optimizer that steps, or call take(step) after each step",
                    MAX_UNSTEPPED,
                )
            return None
        self._num_unstepped = 0
        self._step += 1
        return self._step - 1

    def next_batch(self, epochs: int | None, steps: int | None) -> tuple[int, Any] | None:
        """The next batch and its epoch; None when so many epochs or steps are done."""
        while (epochs is None or self._loader.epoch < epochs) and (steps is None or self._step < steps):
            resumes = self._batches is not None or self._loader.resumes
            if self._batches is None:
                self._batches = self._begin_pass()
            elif not self._loader.is_newest(self._batches):
                raise ConfigError("the loader was iterated beside snapshots.batches()", hint="use one of the two")
            for batch in self._batches:
                self._num_unstepped += 1
                return self._loader.epoch, batch
            if not resumes:
                raise ConfigError("the loader gives no batch", hint="is its dataset empty?")
            self._batches = None
            self._loader.epoch += 1
        return None

    def _begin_pass(self) -> Iterator[Any]:
        if not self._loader.resumes:
            self._loader.set_epoch(self._loader.epoch)
        return self._loader.begin_pass()
