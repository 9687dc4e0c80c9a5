"""How each step begins, for `keepstep check`: hooks on the modules and optimizers of the state.

A difference is found at `take`; where it comes from is seen earlier. Between a `take` and the first forward pass after
it lies what a program does outside its steps (validation, fetching a batch, a scheduler). So the state is read again at
that forward pass, together with the tensors that the modules are called with. A forward pass without gradients is an
evaluation. Without modules in the state the step begins at the optimizer's own step.
"""

from __future__ import annotations

from typing import Any, Self

import torch

from keepstep.control.check_events import EVALUATION, StepTrace
from keepstep.trainer.check.digests import random_digest, read_state, tensor_digest
from keepstep.trainer.check.event_log import KillSwitch
from keepstep.trainer.check.surroundings import read_surroundings
from keepstep.trainer.state.objects import MODULE, OPTIMIZER, STATEFUL, StateObjects

MAX_INPUTS = 32  # tensors of one step: a step may have many micro-batches
MAX_INPUT_DEPTH = 4
_ALL_BUT_LOADERS = ("plain", "generator", MODULE, OPTIMIZER, STATEFUL)  # asking a loader may build its iterator


class StepWatch:
    """Watches the steps of one trainer, one after the other."""

    def __init__(self, objects: StateObjects, kills: KillSwitch) -> None:
        self._objects, self._kills = objects, kills
        self._begun: StepTrace | None = None
        self._inputs: list[str] = []
        self._evaluations, self._after = 0, -1
        self._random_after_step = ""
        for item in objects.of(MODULE):
            item.thing.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        for optimizer in objects.optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)

    def open(self, step: int) -> None:
        """Wait for the step after `step`, which was taken or restored; -1: for the first."""
        self._after, self._begun, self._inputs, self._evaluations = step, None, [], 0
        self._random_after_step = ""

    def finish(self, in_batches: bool = False) -> StepTrace:
        """What was seen since `open`."""
        begun = self._begun or StepTrace()
        stepped = bool(self._random_after_step)
        return StepTrace(
            begun.state,
            begun.around,
            inputs=tuple(self._inputs),
            evaluations=self._evaluations,
            evaluated_first=begun.evaluated_first,
            stepped=stepped or not self._objects.optimizers,
            drawn=stepped and self._random_after_step != random_digest(),
            in_batches=in_batches,
        )

    # Hooks

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled():
            self._evaluations += 1
            self._kills.strike(self._after, EVALUATION)
            return
        self._begin()
        if len(self._inputs) < MAX_INPUTS:
            self._inputs += _digests_of((args, kwargs), 0)[: MAX_INPUTS - len(self._inputs)]

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._begin()

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._random_after_step = random_digest()

    def _begin(self) -> None:
        if self._begun is not None:
            return
        # Before the first step only memory is read: asking objects for their state may create it.
        kinds = _ALL_BUT_LOADERS if self._after >= 0 else (MODULE,)
        try:
            state = read_state(self._objects, kinds)
        except Exception:  # FSDP between two passes: the state has another form
            state = {}
        around = read_surroundings(self._objects)
        self._begun = StepTrace(state, around, evaluated_first=self._evaluations > 0)

    # The hooks are part of modules, which a program may copy or pickle.

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        return (InactiveWatch, ())


class InactiveWatch:
    """Stands in for the watch in a module that was pickled."""

    def _before_forward(self, *args: Any) -> None:
        return None


def _digests_of(value: Any, depth: int) -> list[str]:
    if isinstance(value, torch.Tensor):
        try:
            return [tensor_digest(value)]
        except Exception:  # no plain bytes
            return []
    if depth < MAX_INPUT_DEPTH and isinstance(value, dict):
        value = list(value.values())
    if depth < MAX_INPUT_DEPTH and isinstance(value, (list, tuple)):
        return [digest for item in value for digest in _digests_of(item, depth + 1)]
    return []
