"""The user's state as a tree of plain values and a list of tensors.

`Items` names every object once, when the Snapshotter is made. `collect` runs inside each `take`, on
the caller's thread, in one go: all objects are read at the same boundary. Tensors are only referred
to; their bytes are read later. Paths are worked out only when a layout is made or an error is told.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keepstep.errors import CaptureError
from keepstep.types import Stateful
from keepstep.values import InlineTensor, TensorRef, TorchDevice, TorchDtype, TorchSize

MODULE, OPTIMIZER, STATEFUL, PLAIN = "module", "optimizer", "stateful", "plain"
LOADER, GENERATOR = "loader", "generator"

# Tensors up to this size in schedulers, loaders and the like are values: their shape may change at every step.
INLINE_BYTES = 65536
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Item:
    """One object of the state, with what it is."""

    path: str
    kind: str
    thing: Any


class Items:
    """All objects of the state in the order in which they are restored: modules first, loaders last."""

    _ORDER = (MODULE, OPTIMIZER, STATEFUL, PLAIN, LOADER, GENERATOR)

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise CaptureError(
                "the state must be a mapping from names to objects", hint='{"model": model, "optimizer": optimizer}'
            )
        found = [item for name, thing in state.items() for item in _expand(name, thing)]
        self.all = sorted(found, key=lambda item: self._ORDER.index(item.kind))

    def of(self, kind: str) -> list[Item]:
        return [item for item in self.all if item.kind == kind]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [unwrap_optimizer(item.thing) for item in self.of(OPTIMIZER)]


def _expand(path: str, thing: Any) -> Iterator[Item]:
    """Containers that hold Stateful objects are looked into; everything else is one item."""
    kind = _kind(thing)
    if kind == PLAIN and _holds_stateful(thing, 0):
        children = thing.items() if isinstance(thing, Mapping) else enumerate(thing)
        for key, child in children:
            yield from _expand(f"{path}.{key}", child)
    else:
        if kind == PLAIN and not isinstance(thing, (dict, list, torch.Tensor)):
            raise CaptureError(
                f"{path} is a {type(thing).__name__}, which cannot be restored in place",
                hint="give an object with state_dict() and load_state_dict(), a dict, a list or a tensor",
            )
        yield Item(path, kind, thing)


def _kind(thing: Any) -> str:
    if isinstance(thing, torch.nn.Module):
        return MODULE
    if isinstance(thing, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(thing, (torch.Generator, random.Random, np.random.Generator)):
        return GENERATOR
    if isinstance(thing, Stateful):
        return LOADER if isinstance(thing, torch.utils.data.DataLoader) or _iterates(thing) else STATEFUL
    return PLAIN


def _iterates(thing: Any) -> bool:
    """A data loader by its looks: its iterator may be built, and draw from the RNG, when it is restored."""
    return hasattr(type(thing), "__iter__") and hasattr(thing, "dataset")


def _holds_stateful(thing: Any, depth: int) -> bool:
    if depth > 8 or isinstance(thing, torch.Tensor):
        return False
    children = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple)) else ()
    return any(_kind(child) != PLAIN or _holds_stateful(child, depth + 1) for child in children)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that torch's hooks see, inside wrappers such as Accelerate's."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


# Reading


@dataclass
class Collected:
    """The state at one boundary: `tree` refers to `tensors` by index."""

    tree: dict[str, Any]
    tensors: list[torch.Tensor]


def collect(items: Items, *, rng: bool, grads: bool) -> Collected:
    """Read every object now. The tree holds copies of values and references to tensors."""
    tensors: list[torch.Tensor] = []
    trees: dict[str, Any] = {}
    for item in items.all:
        if item.kind == GENERATOR:
            trees[item.path] = generator_state(item.thing)
        elif item.kind == PLAIN:
            trees[item.path] = _walk(item.thing, tensors, inline=False)
        else:
            inline = item.kind in (STATEFUL, LOADER)
            trees[item.path] = _walk(_state_dict(item), tensors, inline=inline)
    tree: dict[str, Any] = {"items": trees}
    if grads:
        found = [p.grad for o in items.optimizers for g in o.param_groups for p in g["params"]]
        tree["grads"] = _walk(found, tensors, inline=False)
    if rng:
        tree["rng"] = rng_state()
        tree["loaders"] = {
            item.path: [generator_state(generator) for generator in loader_generators(item.thing)]
            for item in items.of(LOADER)
        }
    return Collected(tree, tensors)


def _state_dict(item: Item) -> Any:
    try:
        return item.thing.state_dict()
    except Exception as error:
        raise CaptureError(f"{item.path}.state_dict() failed: {error!r}") from error


def _walk(value: Any, tensors: list[torch.Tensor], *, inline: bool) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _walk(item, tensors, inline=inline) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        if inline and kind is not DTensor and value.device.type == "cpu" and value.nbytes <= INLINE_BYTES:
            return inline_tensor(value)
        tensors.append(value)
        return TensorRef(len(tensors) - 1)
    if kind is OrderedDict:
        return OrderedDict((key, _walk(item, tensors, inline=inline)) for key, item in value.items())
    if kind is list:
        return [_walk(item, tensors, inline=inline) for item in value]
    if kind is tuple:
        return tuple(_walk(item, tensors, inline=inline) for item in value)
    if kind is torch.Size:
        return TorchSize(tuple(value))
    if kind is torch.dtype:
        return TorchDtype(str(value).removeprefix("torch."))
    if kind is torch.device:
        return TorchDevice(str(value))
    return value


def paths_of(tree: Any) -> dict[int, str]:
    """Tensor index -> path, for layouts and messages."""
    found: dict[int, str] = {}
    for path, value in tree["items"].items():
        _find_paths(path, value, found)
    _find_paths("grads", tree.get("grads"), found)
    return found


def _find_paths(path: str, value: Any, found: dict[int, str]) -> None:
    if isinstance(value, TensorRef):
        found[value.index] = path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _find_paths(f"{path}.{key}", item, found)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _find_paths(f"{path}.{index}", item, found)


def local_part(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The bytes that this rank holds of a tensor; refuses subclasses whose bytes are elsewhere."""
    if type(tensor) is DTensor:
        tensor = tensor._local_tensor
        if type(tensor) not in _PLAIN_TENSORS:
            raise _unknown_subclass(tensor, path)
    elif isinstance(tensor, torch.nn.Parameter) and isinstance(tensor.data, DTensor):
        tensor = tensor.data._local_tensor
    elif type(tensor) not in _PLAIN_TENSORS and not isinstance(tensor, torch.nn.Parameter):
        raise _unknown_subclass(tensor, path)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CaptureError(
            f"{path} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which has no plain bytes",
            hint="keep it out of the state, or store a dense copy",
        )
    return tensor.detach()


def _unknown_subclass(tensor: torch.Tensor, path: str) -> CaptureError:
    return CaptureError(
        f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor subclass keepstep does not know",
        hint="wrap its owner in an object whose state_dict() returns the inner tensors",
    )


def inline_tensor(tensor: torch.Tensor) -> InlineTensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return InlineTensor(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)


# Random states


def rng_state() -> dict[str, Any]:
    """All global random states. Devices only where CUDA is in use: asking would start it."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": inline_tensor(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [inline_tensor(s) for s in torch.cuda.get_rng_state_all()]
    return state


def generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return inline_tensor(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state


def loader_generators(loader: Any) -> list[torch.Generator]:
    """A data loader's own generators: its order is wrong after a restore unless they are set too."""
    found: list[torch.Generator] = []
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts.append(getattr(parts[2], "sampler", None))
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found

