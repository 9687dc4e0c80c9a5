"""Recognising a module or an optimizer as unchanged, without asking it for its state.

A skeleton remembers every place where a tensor (or a submodule) hangs. While each place still holds
the same object, and no place was added or removed, `state_dict()` would give the same structure with
the same tensors. It is made only for objects whose `state_dict()` is torch's own, without hooks; all
others are asked every time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

_values: Callable[[dict[Any, Any]], Iterable[Any]] = operator.methodcaller("values")


@dataclass
class Skeleton:
    """The places of one object, the tensors in the order of its state, and that state's encoded structure."""

    containers: list[dict[Any, Any]]
    """where tensors and submodules hang"""
    rules: list[Any]
    """hooks and the like that change what a state is: as many as before"""
    tensors: list[torch.Tensor]
    encoded: bytes
    optimizer: torch.optim.Optimizer | None = None
    indices: list[list[int]] | None = None
    """per parameter group, what `state_dict()` writes for its parameters"""
    parameters: list[list[int]] | None = None
    """per parameter group, who they are: the indices are counted in this order"""

    def __post_init__(self) -> None:
        self._lengths = self._measure()
        self._keys = list(chain.from_iterable(self.containers))
        self._things = list(chain.from_iterable(map(_values, self.containers)))

    def holds(self) -> bool:
        """Whether everything is still where it was. By calls that run outside the interpreter: it is long."""
        if self._measure() != self._lengths:
            return False
        if not all(map(operator.is_, chain.from_iterable(map(_values, self.containers)), self._things)):
            return False
        if not all(map(operator.is_, chain.from_iterable(self.containers), self._keys)):
            return False
        return self.optimizer is None or self._same_groups()

    def _measure(self) -> list[int]:
        return [*map(len, self.containers), *map(len, self.rules)]

    def _same_groups(self) -> bool:
        assert self.optimizer is not None
        # `optimizer.load_state_dict` puts another dict there, and leaves the old one as it was.
        return self.optimizer.state is self.containers[0] and _identities(self.optimizer) == self.parameters

    def param_groups(self) -> list[dict[str, Any]]:
        """As `optimizer.state_dict()` writes them."""
        assert self.optimizer is not None
        assert self.indices is not None
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": indices}
            for group, indices in zip(self.optimizer.param_groups, self.indices, strict=True)
        ]


def of_module(module: torch.nn.Module, state: Any, encoded: bytes) -> Skeleton | None:
    """None when the module's state is more than its parameters and buffers."""
    containers: list[dict[Any, Any]] = []
    rules: list[Any] = []
    tensors: list[torch.Tensor] = []
    for part in module.modules():
        if not _is_ordinary(part):
            return None
        containers += (part._parameters, part._buffers, part._modules)
        rules += (part._state_dict_hooks, part._state_dict_pre_hooks, part._non_persistent_buffers_set)
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            return None
    live = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name in state:
        if name not in live:
            return None
        tensors.append(live[name])
    return Skeleton(containers, rules, tensors, encoded)


def _is_ordinary(part: torch.nn.Module) -> bool:
    base = torch.nn.Module
    own = type(part)
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    if any(getattr(own, name) is not getattr(base, name) for name in methods) or "state_dict" in part.__dict__:
        return False
    return not (part._state_dict_hooks or part._state_dict_pre_hooks)


def of_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], tensors: list[torch.Tensor], encoded: bytes
) -> Skeleton | None:
    """None when the state holds values besides tensors: those must be read every time."""
    hooked = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    if hooked or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer):
        return None
    for parameter, inner in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(inner, dict):
            return None
        if not all(isinstance(value, torch.Tensor) for value in inner.values()):
            return None
    containers = [optimizer.state, *optimizer.state.values()]
    hooks = [optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks]
    indices = [list(group["params"]) for group in state["param_groups"]]
    return Skeleton(containers, hooks, list(tensors), encoded, optimizer, indices, _identities(optimizer))


def _identities(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
