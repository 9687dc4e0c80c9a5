"""The objects of the user's state, each with its path and its kind.

A new kind, or a new optimizer, touches these files:

kind       read                      fenced            sized in advance         replicated           restored
MODULE     its memory; structure     by its optimizer  as it is                 DDP, DTensor, named  in place
           recognises it unchanged
OPTIMIZER  state_dict(), the same    its own step      a tiny twin steps once;  torch's own step on  missing state is
           way; its groups each time                   LBFGS by its history     replicated ones      created, in place
STATEFUL   state_dict(), small ones  by before_update  as it is                 named                load_state_dict()
           (64 KiB) as values
PLAIN      dicts, lists, tensors     by before_update  as it is                 named                in place
LOADER     as STATEFUL, unless       no                as it is                 named                load_state_dict()
           untouched; its generators                                                                 late
GENERATOR  its state, as a value     no                as it is                 no                   last

In this order: `objects._kind`, `reader.StateReader` with `structure` and `rng`; `optimizer_fence.WatchedOptimizer`;
`plan/arena_size._predict`; `plan/replication.Replicas`; `restore/writer.StateWriter`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keepstep.errors import CaptureError
from keepstep.types import Stateful

MODULE, OPTIMIZER, STATEFUL, PLAIN = "module", "optimizer", "stateful", "plain"
LOADER, GENERATOR = "loader", "generator"
MAX_NESTING = 8
_MISSING = object()
_HARMLESS = ("torch.", "keepstep.trainer.")  # Their methods only read.
_INNER = ("optimizer", "base_optimizer")  # where an Optimizer holds another one: Lookahead, SAM, Accelerate


@dataclass(frozen=True)
class StateObject:
    """One object of the state, with what it is."""

    path: str
    kind: str  # one of the constants above
    thing: Any


class StateObjects:
    """All objects of the state in the order in which they are restored: modules first, loaders last."""

    _ORDER = (MODULE, OPTIMIZER, STATEFUL, PLAIN, LOADER, GENERATOR)

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise CaptureError(
                "the state must be a mapping from names to objects", hint='{"model": model, "optimizer": optimizer}'
            )
        expanded = [item for name, thing in state.items() for item in _expand(name, thing)]
        paths = [item.path for item in expanded]
        for path in paths:
            if paths.count(path) > 1:
                raise CaptureError(f"two objects of the state have the path {path}", hint="rename one of them")
        self.all = sorted(expanded, key=lambda item: self._ORDER.index(item.kind))
        self._members = [each for name, thing in state.items() for each in _members(name, thing)]

    def check_members(self) -> None:
        """Raise CaptureError when a container of objects holds others than it did when it was expanded."""
        for path, container, members in self._members:
            now = dict(_children(container))
            for key in {**members, **now}:
                if now.get(key, _MISSING) is not members.get(key, _MISSING):
                    raise CaptureError(
                        f"{path}.{key} is not what it was when the Snapshotter was made",
                        hint="fill lists and dicts of objects before the Snapshotter is made, and keep them so",
                    )

    def of(self, kind: str) -> list[StateObject]:
        return [item for item in self.all if item.kind == kind]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in self.named_optimizers]

    @property
    def named_optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        return [(item.path, unwrap_optimizer(item.thing)) for item in self.of(OPTIMIZER)]

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [item.thing for item in self.of(MODULE)]

    @property
    def has_grad_scaler(self) -> bool:
        return any(type(item.thing).__name__ == "GradScaler" for item in self.of(STATEFUL))


def _expand(path: str, thing: Any) -> Iterator[StateObject]:
    """Containers that hold Stateful objects are expanded; everything else is one object."""
    kind = _kind(thing)
    if kind == OPTIMIZER and (inner := inner_optimizers(thing)):
        for index, optimizer in enumerate(inner):
            yield from _expand(f"{path}.{index}", optimizer)
        shared = {id(group) for optimizer in inner for group in optimizer.param_groups}
        if not shared.issuperset(map(id, thing.param_groups)):
            yield StateObject(f"{path}.param_groups", STATEFUL, GroupOptions(thing))
        return
    if kind == OPTIMIZER:
        outer = unwrap_optimizer(thing)
        yield StateObject(path, OPTIMIZER, thing if _overrides_state_dict(thing) else outer)
        for name, optimizer in _held_optimizers(outer):
            yield from _expand(f"{path}.{name}", optimizer)
        return
    if kind == PLAIN and _holds_stateful(thing, 0):
        for key, child in _children(thing):
            yield from _expand(f"{path}.{key}", child)
        return
    if isinstance(thing, torch.utils.data.DataLoader) and kind == PLAIN:
        raise CaptureError(
            f"{path} is a {type(thing).__name__}, which does not tell its position",
            hint="keepstep.Loader(loader), or torchdata's StatefulDataLoader",
        )
    if kind == PLAIN and not isinstance(thing, (dict, list, torch.Tensor)):
        raise CaptureError(
            f"{path} is a {type(thing).__name__}, which cannot be restored in place",
            hint="give an object with state_dict() and load_state_dict(), a dict, a list or a tensor",
        )
    yield StateObject(path, kind, thing)


def _members(path: str, thing: Any) -> Iterator[tuple[str, Any, dict[Any, Any]]]:
    """Each container that is expanded, with its path and what it holds."""
    if _kind(thing) == PLAIN and _holds_stateful(thing, 0):
        yield path, thing, dict(_children(thing))
        for key, child in _children(thing):
            yield from _members(f"{path}.{key}", child)


def _children(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def _kind(thing: Any) -> str:
    if isinstance(thing, torch.nn.Module):
        return MODULE
    if isinstance(thing, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(thing, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return GENERATOR
    if isinstance(thing, Stateful):
        return LOADER if isinstance(thing, torch.utils.data.DataLoader) or _iterates(thing) else STATEFUL
    return PLAIN


def _iterates(thing: Any) -> bool:
    """Whether it has the shape of a data loader: restoring it may build its iterator, which draws from the RNG."""
    return hasattr(type(thing), "__iter__") and hasattr(thing, "dataset")


def _holds_stateful(thing: Any, depth: int) -> bool:
    if depth > MAX_NESTING or isinstance(thing, torch.Tensor):
        return False
    children = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    return any(_kind(child) != PLAIN or _holds_stateful(child, depth + 1) for child in children)


class GroupOptions:
    """The options in the parameter groups of an optimizer that holds others: schedulers may write them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return {"groups": [{key: value for key, value in group.items() if key != "params"} for group in groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for key in group.keys() - saved.keys() - {"params"}:
                del group[key]
            for key, value in saved.items():
                here = group.get(key)
                if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor):
                    here.copy_(value)  # a tensor lr stays the same object
                else:
                    group[key] = value


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a container steps: torchtitan's, and whatever else keeps them in `optimizers`."""
    inner = getattr(optimizer, "optimizers", None)
    if not isinstance(inner, (list, tuple)) or any(each is optimizer for each in inner):
        return []
    return list(inner) if all(isinstance(each, torch.optim.Optimizer) for each in inner) else []


def has_own_state_dict(optimizer: Any, *, with_hooks: bool = False) -> bool:
    """Whether the form of its state is its own, not torch's `{"state": ..., "param_groups": ...}`."""
    chain = (optimizer, unwrap_optimizer(optimizer))
    if with_hooks and (chain[1]._optimizer_state_dict_pre_hooks or chain[1]._optimizer_state_dict_post_hooks):
        return True
    return any(map(_overrides_state_dict, chain))


def is_foreign(item: StateObject) -> bool:
    """Whether its state comes from a `state_dict()` that may do anything."""
    if item.kind == OPTIMIZER:
        return has_own_state_dict(item.thing, with_hooks=True)
    if item.kind == STATEFUL:
        return not str(getattr(item.thing.state_dict, "__module__", "")).startswith(_HARMLESS)
    return item.kind == LOADER


def is_torch_form(tree: Any) -> bool:
    """Whether this is the state of an optimizer as torch's own `state_dict()` gives it, perhaps with more beside."""
    return isinstance(tree, Mapping) and {"state", "param_groups"} <= tree.keys()


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose state `state_dict()` gives, inside wrappers such as Accelerate's.

    A wrapper with torch's own `state_dict()` gives its own state, and is none unless that is the inner one's.
    """
    for _ in range(MAX_NESTING):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        if not (_overrides_state_dict(optimizer) or _has_state_of(optimizer, inner)):
            break
        optimizer = inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _held_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that one with torch's own `state_dict()` steps: their state is not in its answer."""
    if _overrides_state_dict(optimizer):
        return
    for name in _INNER:
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            yield name, inner


def _overrides_state_dict(optimizer: Any) -> bool:
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer)


def _has_state_of(optimizer: Any, inner: torch.optim.Optimizer) -> bool:
    same_groups = getattr(optimizer, "param_groups", None) is inner.param_groups
    return same_groups and getattr(optimizer, "state", None) is inner.state
