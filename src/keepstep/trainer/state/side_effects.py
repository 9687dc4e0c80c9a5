"""What calling `state_dict()` of the user's objects changes, found out at the first call.

Some make missing state by a step of an optimizer, or draw random numbers: training then goes on otherwise than without
keepstep. So foreign objects are never asked before the first `take`, where stock checkpointing would ask them too, and
the first time they are asked twice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from keepstep import values as codec
from keepstep.errors import CaptureError
from keepstep.trainer.state.dtensors import local_tensor
from keepstep.trainer.state.objects import LOADER, MODULE, StateObject, StateObjects, is_foreign
from keepstep.trainer.state.rng import GlobalEncoder, GlobalState

log = logging.getLogger("keepstep")


class FirstQuestions:
    """Asks each foreign object twice the first time, and warns when that changes anything."""

    def __init__(self, items: StateObjects) -> None:
        self._items = items
        self._asked: set[str] = set()

    def ask(self, item: StateObject) -> Any:
        """Its `state_dict()`. Loaders are asked once: preparing an iterator is what theirs is known for."""
        if item.path in self._asked or item.kind == LOADER or not is_foreign(item):
            return item.thing.state_dict()
        self._asked.add(item.path)
        before = _random_states(), self._writes()
        first = _values_of(item.thing.state_dict())
        state = item.thing.state_dict()
        after = _random_states(), self._writes()
        effects = [text for text, changed in (
            ("draws random numbers", before[0] != after[0]),
            ("writes parameters or optimizer state", before[1] != after[1]),
            ("gives another state when it is asked again", first != _values_of(state)),
        ) if changed]  # fmt: skip
        if effects:
            log.warning(
                "%s.state_dict() %s: a run with keepstep, which calls it at every take, differs from one without",
                item.path,
                " and ".join(effects),
            )
        return state

    def _writes(self) -> list[Any]:
        """Marks of parameters and optimizer states; fused optimizers show in their counters of steps."""
        modules = [item.thing for item in self._items.of(MODULE)]
        tensors = [parameter for module in modules for parameter in module.parameters()]
        for optimizer in self._items.optimizers:
            for inner in optimizer.state.values():
                tensors += [t for t in inner.values() if isinstance(t, torch.Tensor)] if type(inner) is dict else []
        return [(id(tensor), tensor._version, local_tensor(tensor)._version) for tensor in tensors]


def _random_states() -> dict[str, bytes]:
    return GlobalEncoder().encode(GlobalState.now())


def _values_of(state: Any) -> bytes:
    """The values of a state without its tensors, which are the same memory at both questions."""
    try:
        return codec.encode(_without_tensors(state))
    except CaptureError:
        return b""  # It is refused by path when it is captured.


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return {str(key): _without_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item) for item in value]
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else value
