"""Warns of a loop that fetches ahead of `take`: what it holds then is lost at a restore.

Looks at the first steps only: random numbers that are drawn, and batches that a Loader gives, between the end of
`optimizer.step()` and `take`; and whether the first step had a batch more than the following ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from keepstep.trainer.data.loader import Loader
from keepstep.trainer.data.order_state import note_state

log = logging.getLogger("keepstep")

NUM_STEPS = 3  # What is done once, as an evaluation is, tells nothing.
REMEDY = "use snapshots.batches(), or keep what is fetched ahead in the state"


class FetchWatch:
    """Watches the first steps of one Snapshotter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], loaders: Sequence[Loader]) -> None:
        self._optimizers, self._loaders = set(map(id, optimizers)), list(loaders)
        self._at_step: tuple[bytes, int] | None = None  # states and batches at the end of the last step
        self._num_before = 0  # batches until the last `take`
        self._draws: list[bool] = []  # for each step, whether something was drawn behind it
        self._fetches: list[bool] = []
        self._batches: list[int] = []  # that each step had
        self._handle: RemovableHandle | None = None
        if self._optimizers:
            outside = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
            self._handle = register_optimizer_step_post_hook(outside)

    def check(self) -> None:
        """Look at one step, at the beginning of its `take`."""
        if self._handle is None or self._at_step is None:
            return
        states, num_batches = self._at_step
        self._at_step = None
        now = self._num_batches()
        self._draws.append(note_state(()) != states)
        self._fetches.append(now > num_batches)
        self._batches.append(now - self._num_before)
        self._num_before = now
        if len(self._draws) == NUM_STEPS:
            self._warn()
            self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _warn(self) -> None:
        first, *others = self._batches
        if all(self._fetches) or (self._loaders and set(others) == {first - 1} and first > 1):
            log.warning(
                "the loader is ahead of take(): it had given the batch of the next step at each of the first %d takes, "
                "and that batch is lost at a restore: %s",
                NUM_STEPS,
                REMEDY,
            )
        elif all(self._draws):
            log.warning(
                "random numbers were drawn between optimizer.step() and take() at each of the first %d steps. If that "
                "was the batch of the next step, it is lost at a restore: %s. An evaluation before take() is exact",
                NUM_STEPS,
                REMEDY,
            )

    def _num_batches(self) -> int:
        return sum(loader.num_given for loader in self._loaders)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._optimizers:
            self._at_step = (note_state(()), self._num_batches())
