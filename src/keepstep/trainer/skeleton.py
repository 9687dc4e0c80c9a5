"""Recognising a module or an optimizer as unchanged, without asking it for its state.

A skeleton remembers every place where a tensor (or a submodule) hangs. While each place still holds
the same object, and no place was added or removed, `state_dict()` would give the same structure with
the same tensors. It is made only for objects whose `state_dict()` is torch's own, without hooks; all
others are asked every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Places = list[tuple[Any, Any, Any]]
"""(container, key, object that hangs there)"""


@dataclass
class Skeleton:
    """The places of one object, the tensors in the order of its state, and that state's encoded structure."""

    places: Places
    counts: list[tuple[Any, int]]
    """(container, how many things hang in it)"""
    tensors: list[torch.Tensor]
    encoded: bytes
    optimizer: torch.optim.Optimizer | None = None
    indices: list[list[int]] | None = None
    """per parameter group, what `state_dict()` writes for its parameters"""
    parameters: list[list[int]] | None = None
    """per parameter group, who they are: the indices are counted in this order"""

    def holds(self) -> bool:
        """Whether everything is still where it was."""
        for container, count in self.counts:
            if len(container) != count:
                return False
        for container, key, thing in self.places:
            if container.get(key) is not thing:
                return False
        return self.optimizer is None or self._same_groups()

    def _same_groups(self) -> bool:
        assert self.optimizer is not None
        return _identities(self.optimizer) == self.parameters

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
    places: Places = []
    counts: list[tuple[Any, int]] = []
    tensors: list[torch.Tensor] = []
    for part in module.modules():
        if not _is_ordinary(part):
            return None
        for container in (part._parameters, part._buffers, part._modules):
            counts.append((container, len(container)))
            # None too: a buffer that was only announced may be set later.
            places += [(container, key, thing) for key, thing in container.items()]
        rules = (part._state_dict_hooks, part._state_dict_pre_hooks, part._non_persistent_buffers_set)
        counts += [(rule, len(rule)) for rule in rules]
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
    return Skeleton(places, counts, tensors, encoded)


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
    # `optimizer.load_state_dict` puts another dict there, and leaves the old one as it was.
    places: Places = [(vars(optimizer), "state", optimizer.state)]
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    counts: list[tuple[Any, int]] = [(optimizer.state, len(optimizer.state)), *((hook, 0) for hook in hooks)]
    for parameter, inner in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(inner, dict):
            return None
        places.append((optimizer.state, parameter, inner))
        counts.append((inner, len(inner)))
        for key, value in inner.items():
            if not isinstance(value, torch.Tensor):
                return None
            places.append((inner, key, value))
    indices = [list(group["params"]) for group in state["param_groups"]]
    return Skeleton(places, counts, list(tensors), encoded, optimizer, indices, _identities(optimizer))


def _identities(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
