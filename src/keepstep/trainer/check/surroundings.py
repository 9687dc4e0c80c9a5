"""What is known of the process around the state, for `keepstep check`.

The variables of the functions that lead to a call, of the script's module, and what they hold: modules, optimizers,
generators and tensors that are not in the state, buffers that no state_dict() has. Keys are `<kind> <path>`. Digests of
these explain a difference, and find what evolves beside the state. Nothing is called that the user wrote.
"""

from __future__ import annotations

import contextlib
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from keepstep.control.check_events import BUFFER, GENERATOR, MODULE, OPTIMIZER, SCHEDULER, TENSOR, VARIABLE, WORKERS
from keepstep.trainer.check.digests import leaves, tensor_digest, value_text
from keepstep.trainer.state.module_memory import storages
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.rng import generator_state

MAX_ENTRIES = 4000
MAX_BYTES = 256 * 1024**2  # of tensors that are no parameters of the state
MAX_DEPTH = 5
MAX_CHILDREN = 64  # of a list or dict
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)}
)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_OPAQUE = (ModuleType, type, FunctionType, MethodType, FrameType)


def read_surroundings(objects: StateObjects) -> dict[str, str]:
    """Digests by kind and path of what the caller's functions can reach, without the state."""
    reading = SurroundingsReading(objects)
    reading.read_state_modules()
    for prefix, variables in _variables(sys._getframe(1)):
        for name, value in variables.items():
            if not name.startswith("_"):
                with contextlib.suppress(Exception):  # an object of the user's may answer anything in any way
                    reading.read(f"{prefix}{name}", value, 0)
    return reading.digests


class SurroundingsReading:
    """One walk. An object is read once, under the first path that leads to it."""

    def __init__(self, objects: StateObjects) -> None:
        self.digests: dict[str, str] = {}
        self._modules = [(item.path, item.thing) for item in objects.all if isinstance(item.thing, torch.nn.Module)]
        self._seen = {id(item.thing) for item in objects.all}
        # What wrappers hold (accelerate's optimizer, DDP) is the state too.
        self._seen |= {id(optimizer) for optimizer in objects.optimizers}
        self._seen |= {id(part) for _, module in self._modules for part in module.modules()}
        tensors = [item.thing for item in objects.all if isinstance(item.thing, torch.Tensor)]
        for _, module in self._modules:
            tensors += [*module.parameters(), *_persistent_buffers(module)]
        for optimizer in objects.optimizers:
            tensors += [value for state in optimizer.state.values() for value in _tensors(state)]
        self._owned = _storages(tensors)
        self._left_bytes = MAX_BYTES
        self._kept: list[Any] = []  # so that no id is given twice during the walk

    def read_state_modules(self) -> None:
        """What modules of the state keep outside of it: buffers that are not persistent, attributes."""
        for path, module in self._modules:
            for name, part in module.named_modules():
                prefix = ".".join(filter(None, (path, name)))
                for key, buffer in part._buffers.items():
                    if buffer is not None and key in part._non_persistent_buffers_set:
                        self._note_tensor(BUFFER, f"{prefix}.{key}", buffer)
                if not _is_library(type(part).__module__):
                    for key, value in vars(part).items():
                        if not key.startswith("_") and key != "training":
                            self.read(f"{prefix}.{key}", value, 1, tensors_as=BUFFER)

    def read(self, path: str, value: Any, depth: int, tensors_as: str = TENSOR) -> None:
        if len(self.digests) >= MAX_ENTRIES or depth > MAX_DEPTH or isinstance(value, _OPAQUE):
            return
        if isinstance(value, _NUMBERS):
            self._note(VARIABLE, path, value_text(value))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._kept.append(value)
            self._read_object(path, value, depth, tensors_as)

    def _read_object(self, path: str, value: Any, depth: int, tensors_as: str) -> None:
        if isinstance(value, torch.Tensor):
            self._note_tensor(tensors_as, path, value)
        elif isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
            if value.dtype.kind in "biufc":
                self._note_tensor(tensors_as, path, torch.from_numpy(np.ascontiguousarray(value).copy()))
        elif isinstance(value, _GENERATORS):
            self._note(GENERATOR, path, value_text(_generator_state(value)))
        elif isinstance(value, torch.nn.Module):
            for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
                self._note_tensor(MODULE, f"{path}.{name}", tensor)
        elif isinstance(value, torch.optim.Optimizer):
            for name, item in leaves("", {"groups": value.param_groups, "state": list(value.state.values())}):
                self._note_leaf(OPTIMIZER, f"{path}.{name}", item)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            for name, item in vars(value).items():
                self._note_leaf(SCHEDULER, f"{path}.{name}", item)
        elif isinstance(value, torch.utils.data.DataLoader):
            self._note(WORKERS, path, str(value.num_workers))
            self.read(f"{path}.generator", value.generator, depth + 1)
            for part in (value.sampler, value.batch_sampler, value.dataset):
                if not _is_library(type(part).__module__):
                    self.read(f"{path}.{type(part).__name__}", part, depth + 1)
        elif isinstance(value, _LISTS) and value and all(isinstance(item, _NUMBERS) for item in value):
            self._note(VARIABLE, path, value_text(list(value)))
        else:
            for name, item in _children(value):
                self.read(f"{path}.{name}", item, depth + 1, tensors_as)

    def _note_leaf(self, kind: str, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._note_tensor(kind, path, value)
        elif isinstance(value, (*_NUMBERS, list)) and all(isinstance(item, _NUMBERS) for item in _items(value)):
            self._note(kind, path, value_text(value))

    def _note_tensor(self, kind: str, path: str, tensor: torch.Tensor) -> None:
        if tensor.nbytes > self._left_bytes or _storages([tensor]) & self._owned:
            return
        self._left_bytes -= tensor.nbytes
        try:
            digest = tensor_digest(getattr(tensor, "_local_tensor", tensor))
        except Exception:  # no plain bytes
            return
        # A number on a device is a variable like any other: a loss, a mean.
        self._note(VARIABLE if kind == TENSOR and tensor.numel() <= 1 else kind, path, digest)

    def _note(self, kind: str, path: str, text: str) -> None:
        self.digests.setdefault(f"{kind} {path}", text)


def _variables(frame: FrameType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The variables of the functions of the user that lead here, then those of the script."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(("<", *_LIBRARIES)) and code.co_name != "<module>":
            yield f"{code.co_name}.", dict(frame.f_locals)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if main is not None and not str(getattr(main, "__file__", "")).startswith(_LIBRARIES):
        yield "", dict(vars(main))


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    """What a container, an object of a class of the user's or a suspended generator function holds."""
    if isinstance(value, dict):
        return [(str(key), item) for key, item in list(value.items())[:MAX_CHILDREN]]
    if isinstance(value, (*_LISTS, set, frozenset)):
        return [(str(index), item) for index, item in zip(range(MAX_CHILDREN), value, strict=False)]
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return list(frame.f_locals.items()) if frame and not frame.f_code.co_filename.startswith(_LIBRARIES) else []
    if _is_library(type(value).__module__):
        return []
    return [(name, item) for name, item in vars(value).items()] if hasattr(value, "__dict__") else []


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_library(name: str) -> bool:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return module is not None and (file is None or file.startswith(_LIBRARIES)) and name != "__main__"


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    return generator_state(generator)


def _persistent_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of memory; none for tensors that have none (fake, meta)."""
    addresses: set[int] = set()
    for tensor in tensors:
        try:
            addresses |= storages([tensor])
        except (RuntimeError, NotImplementedError):
            continue
    return addresses
