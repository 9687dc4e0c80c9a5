"""Recognising a module or an optimizer as unchanged, without asking it for its state.

A skeleton remembers every place where a tensor (or a submodule) hangs. While each place still holds
the same object, and no place was added or removed, `state_dict()` would give the same structure with
the same tensors. It is made only for objects whose `state_dict()` is torch's own, without hooks; all
others are asked every time. Places are dealt into shares (`stillness`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch

from keepstep.trainer.plan.stillness import Check, deal

_values: Callable[[dict[Any, Any]], Iterable[Any]] = operator.methodcaller("values")
_attributes: Callable[[torch.nn.Module], tuple[dict[Any, Any], ...]] = operator.attrgetter("_parameters", "_buffers")
# Whoever has one of these of its own gives another state than its class does.
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


@dataclass(frozen=True)
class StructurePart:
    """One module, or the state of one parameter."""

    containers: tuple[dict[Any, Any], ...]
    """where tensors and submodules hang"""
    rules: tuple[Any, ...] = ()
    """hooks and the like that change what a state is: as many as before"""
    module: torch.nn.Module | None = None
    """whose containers these are"""


class StructureParts:
    """Some parts, and what they held."""

    def __init__(self, parts: list[StructurePart]) -> None:
        self._containers = [container for part in parts for container in part.containers]
        self._rules = [rule for part in parts for rule in part.rules]
        self._modules = [part.module for part in parts if part.module is not None]
        self._types = list(map(type, self._modules))
        self._owned = [container for part in parts if part.module is not None for container in part.containers]
        self._hidden = [part._non_persistent_buffers_set for part in self._modules if part._non_persistent_buffers_set]
        self._hidden_names = [set(names) for names in self._hidden]
        self._lengths = self._measure()
        # What is empty shows by its length when it is not any more.
        self._full = [container for container in self._containers if container]
        self._keys = list(chain.from_iterable(self._full))
        self._things = list(chain.from_iterable(map(_values, self._full)))

    def hold(self) -> bool:
        """Whether everything is still where it was. By calls that run outside the interpreter: it is long."""
        return (
            self._measure() == self._lengths
            and self._same_modules()
            and all(map(operator.is_, chain.from_iterable(map(_values, self._full)), self._things))
            and all(map(operator.is_, chain.from_iterable(self._full), self._keys))
        )

    def _same_modules(self) -> bool:
        """They are what they were, with the same dicts, and none got a method of its own."""
        if not all(map(operator.is_, map(type, self._modules), self._types)) or self._hidden != self._hidden_names:
            return False
        own = list(map(vars, self._modules))
        if any(any(map(operator.contains, own, repeat(name))) for name in _METHODS):
            return False
        return all(map(operator.is_, chain.from_iterable(map(_attributes, self._modules)), self._owned))

    def _measure(self) -> list[int]:
        return [*map(len, self._containers), *map(len, self._rules)]


@dataclass
class StateStructure:
    """The places of one object, the tensors in the order of its state, and that state's encoded structure."""

    top: list[StructurePart]
    """how the object is put together"""
    parts: list[StructurePart]
    """where its tensors hang"""
    tensors: list[torch.Tensor]
    encoded: bytes
    optimizer: torch.optim.Optimizer | None = None
    indices: list[list[int]] | None = None
    """per parameter group, what `state_dict()` writes for its parameters"""
    parameters: list[list[int]] | None = None
    """per parameter group, who they are: the indices are counted in this order"""

    def __post_init__(self) -> None:
        self._shares = [StructureParts(parts) for parts in deal(self.parts)]
        # What holds others is always looked at in full: of a model that was made anew the old modules did not change.
        self._joints = StructureParts([part for part in self.top if any(part.containers)])
        self._tips = [StructureParts(parts) for parts in deal([part for part in self.top if not any(part.containers)])]
        self._state = self.optimizer.state if self.optimizer is not None else None

    def holds(self, share: int | None = None) -> bool:
        """Whether everything is still where it was; with a share, whether that is."""
        if share is None:
            return all(places.hold() for places in self._shares) and self._same_top()
        some = (self._shares[share % len(self._shares)], self._tips[share % len(self._tips)])
        return self._same_state() and self._joints.hold() and all(places.hold() for places in some)

    def checks(self) -> list[Check]:
        """All of `holds`, piece by piece."""
        return [*(places.hold for places in self._shares), self._same_top]

    def _same_top(self) -> bool:
        """The same submodules; or the same parameters in the same groups, each with the same dict of its own."""
        if not (self._same_state() and self._joints.hold() and all(places.hold() for places in self._tips)):
            return False
        return self.optimizer is None or _identities(self.optimizer) == self.parameters

    def _same_state(self) -> bool:
        """`optimizer.load_state_dict` puts another dict there, and leaves the old one as it was."""
        own = self.optimizer
        return own is None or (own.state is self._state and "state_dict" not in vars(own))

    def param_groups(self) -> list[dict[str, Any]]:
        """As `optimizer.state_dict()` writes them."""
        assert self.optimizer is not None
        assert self.indices is not None
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": indices}
            for group, indices in zip(self.optimizer.param_groups, self.indices, strict=True)
        ]


def of_module(module: torch.nn.Module, state: Any, encoded: bytes) -> StateStructure | None:
    """None when the module's state is more than its parameters and buffers."""
    top: list[StructurePart] = []
    parts: list[StructurePart] = []
    tensors: list[torch.Tensor] = []
    for part in module.modules():
        if not _is_ordinary(part):
            return None
        top.append(StructurePart((part._modules,)))
        rules = (part._state_dict_hooks, part._state_dict_pre_hooks, part._non_persistent_buffers_set)
        parts.append(StructurePart((part._parameters, part._buffers), rules, part))
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
    return StateStructure(top, parts, tensors, encoded)


def _is_ordinary(part: torch.nn.Module) -> bool:
    base = torch.nn.Module
    own = type(part)
    if any(getattr(own, name) is not getattr(base, name) or name in vars(part) for name in _METHODS):
        return False
    return not (part._state_dict_hooks or part._state_dict_pre_hooks)


def of_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], tensors: list[torch.Tensor], encoded: bytes
) -> StateStructure | None:
    """None when the state holds values besides tensors: those must be read every time."""
    hooked = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    if hooked or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer):
        return None
    for parameter, inner in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(inner, dict):
            return None
        if not all(isinstance(value, torch.Tensor) for value in inner.values()):
            return None
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    top, parts = (
        [StructurePart((optimizer.state,), hooks)],
        [StructurePart((inner,)) for inner in optimizer.state.values()],
    )
    indices = [list(group["params"]) for group in state["param_groups"]]
    return StateStructure(top, parts, list(tensors), encoded, optimizer, indices, _identities(optimizer))


def _identities(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
