"""Structural fingerprint of a module or an optimizer: recognises it as unchanged without calling `state_dict()`.

It records every place (attribute or dict entry) that holds a tensor or a submodule. While each place holds the same
object, and no place was added or removed, its state has the same structure with the same tensors. Made only for
modules that are their parameters and buffers, and for optimizers whose `state_dict()` is torch's own, without hooks.
All others are read again every time.

Places are spread over subsets, so that `take` can check one of them (`plan_cache` has the rule).
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Check = Callable[[], bool]

MAX_SUBSETS = 32
MIN_SUBSET_ITEMS = 8  # Fewer are not worth a subset of their own.

_values: Callable[[dict[Any, Any]], Iterable[Any]] = operator.methodcaller("values")
_attributes: Callable[[torch.nn.Module], tuple[dict[Any, Any], ...]] = operator.attrgetter("_parameters", "_buffers")
# An instance with one of these of its own has another state than its class.
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


@dataclass(frozen=True)
class StructurePart:
    """One module, or the state of one parameter."""

    containers: tuple[dict[Any, Any], ...]  # dicts that hold tensors and submodules
    rules: tuple[Any, ...] = ()  # hooks and the like that change the state: compared by their number
    module: torch.nn.Module | None = None  # the owner of the containers


class StructureParts:
    """Some parts, and the objects that they held."""

    def __init__(self, parts: list[StructurePart]) -> None:
        self._containers = [container for part in parts for container in part.containers]
        self._rules = [rule for part in parts for rule in part.rules]
        self._modules = [part.module for part in parts if part.module is not None]
        self._types = list(map(type, self._modules))
        self._owned = [container for part in parts if part.module is not None for container in part.containers]
        self._hidden = [part._non_persistent_buffers_set for part in self._modules if part._non_persistent_buffers_set]
        self._hidden_names = [set(names) for names in self._hidden]
        self._lengths = self._measure()
        # A change of an empty one shows in its length.
        self._full = [container for container in self._containers if container]
        self._keys = list(chain.from_iterable(self._full))
        self._things = list(chain.from_iterable(map(_values, self._full)))

    def unchanged(self) -> bool:
        """Whether every place holds the same object. In few long calls of C: there are thousands of places."""
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

    top: list[StructurePart]  # places that hold other parts
    parts: list[StructurePart]  # places that hold tensors
    tensors: list[torch.Tensor]
    encoded: bytes
    optimizer: torch.optim.Optimizer | None = None
    indices: list[list[int]] | None = None  # per parameter group, what `state_dict()` writes for its parameters
    parameters: list[list[int]] | None = None  # per parameter group, their identities: indices count in this order

    def __post_init__(self) -> None:
        self._subsets = [StructureParts(parts) for parts in spread(self.parts)]
        # Parents are always checked in full: when a model is built again, its old modules stay unchanged.
        self._parents = StructureParts([part for part in self.top if any(part.containers)])
        leaves = [part for part in self.top if not any(part.containers)]
        self._leaves = [StructureParts(parts) for parts in spread(leaves)]
        self._state = self.optimizer.state if self.optimizer is not None else None

    def unchanged(self, subset: int | None = None) -> bool:
        """Whether every place holds the same object; with a subset, every place of that one and all parents."""
        if subset is None:
            return all(places.unchanged() for places in self._subsets) and self._same_top()
        chosen = (self._subsets[subset % len(self._subsets)], self._leaves[subset % len(self._leaves)])
        return self._same_state() and self._parents.unchanged() and all(places.unchanged() for places in chosen)

    def checks(self) -> list[Check]:
        """All of `unchanged`, in short calls."""
        return [*(places.unchanged for places in self._subsets), self._same_top]

    def _same_top(self) -> bool:
        """The same submodules; or the same parameters in the same groups, each with the same dict of its own."""
        if not (self._same_state() and self._parents.unchanged() and all(map(StructureParts.unchanged, self._leaves))):
            return False
        return self.optimizer is None or _identities(self.optimizer) == self.parameters

    def _same_state(self) -> bool:
        """`optimizer.load_state_dict` replaces the dict, and leaves the old one unchanged."""
        own = self.optimizer
        if own is None or self.indices is None:
            return True
        same_groups = len(own.param_groups) == len(self.indices)
        return same_groups and own.state is self._state and "state_dict" not in vars(own)

    def param_groups(self) -> list[dict[str, Any]]:
        """As `optimizer.state_dict()` writes them."""
        assert self.optimizer is not None
        assert self.indices is not None
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": indices}
            for group, indices in zip(self.optimizer.param_groups, self.indices, strict=True)
        ]


def spread(items: Sequence[T]) -> list[list[T]]:
    """Spread items over subsets. Shuffled, because models repeat themselves: each subset has items of every kind."""
    items = list(items)
    random.Random(len(items)).shuffle(items)
    count = max(1, min(MAX_SUBSETS, len(items) // MIN_SUBSET_ITEMS))
    return [items[number::count] for number in range(count)]


def of_module(module: torch.nn.Module, tensors: list[torch.Tensor], encoded: bytes) -> StateStructure:
    """For a module that is its parameters and buffers (`module_memory.is_plain`), which are these tensors."""
    top: list[StructurePart] = []
    parts: list[StructurePart] = []
    for part in module.modules():
        top.append(StructurePart((part._modules,)))
        rules = (part._state_dict_hooks, part._state_dict_pre_hooks, part._non_persistent_buffers_set)
        parts.append(StructurePart((part._parameters, part._buffers), rules, part))
    return StateStructure(top, parts, tensors, encoded)


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
