"""Reads the user's state between two steps: values as bytes, tensors by reference.

`read` runs inside each `take`, on the caller's thread. Tensors are only referenced; their bytes are read later. The
state of an object is kept in parts, each encoded on its own, with references counted from the object's first tensor.
So a part of references only is encoded once: modules and the state of optimizers are recognised as unchanged by the
places that hold their tensors (`structure`), at a tenth of the cost of `state_dict()` and encoding.

    values = encode({"items": {path: [first tensor, {part: encoded tree}]}, "rng": …, "loaders": …,
                     "samplers": {path: epochs}, "grads": …})
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from keepstep import values as codec
from keepstep.errors import CaptureError, IntegrityError
from keepstep.trainer.state import structure
from keepstep.trainer.state.dtensors import local_tensor
from keepstep.trainer.state.loaders import is_untouched, loader_generators, sampler_epochs
from keepstep.trainer.state.long_lists import LONG, LongLists, longest
from keepstep.trainer.state.module_memory import is_odd, is_plain, read_extras, read_memory
from keepstep.trainer.state.objects import (
    GENERATOR,
    LOADER,
    MODULE,
    OPTIMIZER,
    PLAIN,
    STATEFUL,
    StateObject,
    StateObjects,
    is_foreign,
    unwrap_optimizer,
)
from keepstep.trainer.state.process_keys import KeyCheck
from keepstep.trainer.state.rng import (
    GlobalEncoder,
    GlobalState,
    decode_globals,
    generator_state,
    inline_tensor,
)
from keepstep.values import InlineTensor, ItemBlocks, TensorRef, TorchDevice, TorchDtype, TorchSize

log = logging.getLogger("keepstep")

# Tensors up to this size in schedulers, loaders and the like are values: their shape may change at every step.
INLINE_BYTES = 65536
INLINE_KINDS = (STATEFUL, LOADER)
WHOLE, STATE, GROUPS = "", "state", "param_groups"
GRADS = "grads"
SLOW_S, SLOW_TIMES = 0.05, 3  # An object that takes so long so often is named in a warning.
_CONSTANTS = frozenset({type(None), bool, int, float, str, bytes, TensorRef})
_FIXED = _CONSTANTS | {InlineTensor, ItemBlocks, TorchDevice, TorchDtype, TorchSize}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TensorRuns:
    """The tensors of a state in order, in runs: an unchanged object contributes the same list each time.

    So `take` does not touch each of thousands of tensors only to increment its reference count.
    """

    def __init__(self) -> None:
        self.runs: list[list[torch.Tensor]] = []
        self._size, self._is_open = 0, False

    def __len__(self) -> int:
        return self._size

    def append(self, tensor: torch.Tensor) -> None:
        if not self._is_open:
            self.runs.append([])
            self._is_open = True
        self.runs[-1].append(tensor)
        self._size += 1

    def add_run(self, run: list[torch.Tensor]) -> None:
        """The run must not change from now on."""
        self.runs.append(run)
        self._is_open = False
        self._size += len(run)

    def since(self, first: int) -> list[torch.Tensor]:
        return [tensor for run in self.runs for tensor in run][first:]


@dataclass(frozen=True)
class DeferredValue:
    """A part that is encoded after `take`: nothing in it changes any more."""

    tree: Any
    path: str

    def encode(self) -> bytes:
        return _encode(self.tree, self.path)


Parts = dict[str, "bytes | DeferredValue"]


@dataclass
class StateReading:
    """The state at one boundary."""

    tree: dict[str, Any]  # what is to be encoded besides the parts: nothing in it changes any more
    found: TensorRuns
    parts: dict[str, tuple[int, Parts]]
    relied_on: list[structure.StateStructure]  # recognised as unchanged, perhaps by a subset
    rng: GlobalState | None
    encoder: GlobalEncoder
    grads: tuple[int, Parts] | None = None  # not among the parts: an item of the user's may have that name
    skipped: frozenset[str] = frozenset()  # objects whose own methods were not called

    @cached_property
    def values(self) -> bytes:
        """Encoded, after `take`, on the copy thread."""
        rng = {"rng": self.encoder.encode(self.rng)} if self.rng is not None else {}
        items = {path: [first, _encoded(parts)] for path, (first, parts) in self.parts.items()}
        grads = {GRADS: [self.grads[0], _encoded(self.grads[1])]} if self.grads is not None else {}
        return _encode({"items": items, **grads, **self.tree, **rng}, "state")

    @property
    def least_values_bytes(self) -> int:
        """As far as they are encoded already."""
        return sum(len(part) for _, parts in self.parts.values() for part in parts.values() if isinstance(part, bytes))

    def decoded(self, path: str) -> Any:
        """One object as a snapshot of it would be decoded."""
        first, parts = self.parts[path]
        return _join([first, _encoded(parts)])

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return self.found.since(0)

    def tensors_of(self, paths: Container[str]) -> list[torch.Tensor]:
        """The tensors of these objects, without gradients."""
        end = self.grads[0] if self.grads is not None else len(self.tensors)
        ends = [*(first for first, _ in self.parts.values()), end][1:]
        spans = [(path, first, end) for (path, (first, _)), end in zip(self.parts.items(), ends, strict=True)]
        return [tensor for path, first, end in spans if path in paths for tensor in self.tensors[first:end]]

    def paths(self) -> dict[int, str]:
        """Tensor index -> path, for layouts and messages."""
        paths: dict[int, str] = {}
        grads = [(GRADS, self.grads)] if self.grads is not None else []
        for path, (first, parts) in [*self.parts.items(), *grads]:
            for name, part in parts.items():
                where = f"{path}.{name}" if name else path
                for inner, index in _references(where, _decoded(part)):
                    paths[first + index] = inner
        return paths


class StateQuestions(Protocol):
    """Calls `state_dict()` of an object."""

    def ask(self, item: StateObject) -> Any: ...


@dataclass
class StateReader:
    """Reads the same objects again and again, and remembers what did not change."""

    items: StateObjects
    rng: bool
    grads: bool
    questions: StateQuestions | None = None  # None: each object is asked once
    _known: dict[str, structure.StateStructure] = field(default_factory=dict)
    _encoder: GlobalEncoder = field(default_factory=GlobalEncoder)
    _checked_bytes: dict[str, int] = field(default_factory=dict)
    _keys: KeyCheck = field(default_factory=KeyCheck)
    _lists: dict[str, LongLists] = field(default_factory=dict)
    _slow: Counter[str] = field(default_factory=Counter)

    def read(self, subset: int | None = None, *, before_first_step: bool = False) -> StateReading:
        """With a subset, only that one is checked of objects that were read before (`plan_cache`).

        Before the first step no method of a foreign object is called (`side_effects`): what it would give is left out.
        """
        self.items.check_members()
        tensors = TensorRuns()
        skipped = frozenset(item.path for item in self.items.all if before_first_step and asks_foreign_code(item))
        parts: dict[str, tuple[int, Parts]] = {}
        for item in self.items.all:
            first = len(tensors)
            if item.path not in skipped:
                parts[item.path] = (first, self._read(item, tensors, subset))
            elif item.kind == MODULE:
                memory = read_memory(item.thing)
                parts[item.path] = (first, {WHOLE: _encode(_walk(memory, tensors, first), item.path)})
        tree: dict[str, Any] = {"samplers": {item.path: sampler_epochs(item.thing) for item in self.items.of(LOADER)}}
        grads: tuple[int, Parts] | None = None
        if self.grads:
            found = [p.grad for o in self.items.optimizers for group in o.param_groups for p in group["params"]]
            grads = (len(tensors), {WHOLE: _encode(_walk(found, tensors, len(tensors)), GRADS)})
        if self.rng:
            tree["loaders"] = {
                item.path: [generator_state(generator) for generator in loader_generators(item.thing)]
                for item in self.items.of(LOADER)
            }
        rng = GlobalState.now() if self.rng else None
        return StateReading(tree, tensors, parts, list(self._known.values()), rng, self._encoder, grads, skipped)

    def _read(self, item: StateObject, tensors: TensorRuns, subset: int | None) -> Parts:
        started = time.perf_counter()
        try:
            parts = self._parts(item, tensors, subset)
        except RecursionError:
            raise CaptureError(
                f"{item.path} contains itself, or is nested hundreds of levels deep",
                hint="store an index or a name in place of the reference",
            ) from None
        self._check_keys(item.path, parts)
        if item.kind not in (MODULE, OPTIMIZER) and time.perf_counter() - started > SLOW_S:
            self._report_slow(item, parts, time.perf_counter() - started)
        return parts

    def _report_slow(self, item: StateObject, parts: Parts, took_s: float) -> None:
        self._slow[item.path] += 1
        if self._slow[item.path] == SLOW_TIMES:
            sizes = [longest(item.path, _decoded(part)) for part in parts.values()]
            size, where = max(sizes, default=(0, item.path))
            log.warning(
                "reading %s takes %.0f ms of each take; its longest part is %s, with %d items. Lists of numbers, text "
                "and dicts of them cost little; keep other state that grows short, or outside",
                item.path, took_s * 1e3, where, size,
            )  # fmt: skip

    def _check_keys(self, path: str, parts: Parts) -> None:
        """A new key makes values longer: they are judged when the length has changed, large ones when it doubled."""
        encoded = [part for part in parts.values() if isinstance(part, bytes)]
        size = sum(map(len, encoded))
        checked = self._checked_bytes.get(path, 0)
        if size != checked and (size <= INLINE_BYTES or not checked <= size < 2 * checked):
            for part in encoded:
                self._keys.check(part, path)
            self._checked_bytes[path] = size

    def _parts(self, item: StateObject, tensors: TensorRuns, subset: int | None) -> Parts:
        first = len(tensors)
        if item.kind == LOADER and is_untouched(item.thing):
            return {WHOLE: _encode(None, item.path)}
        if item.kind == GENERATOR:
            return {WHOLE: _encode(generator_state(item.thing), item.path)}
        if item.kind == PLAIN:
            return {WHOLE: self._whole(item, item.thing, tensors, first)}
        if item.kind in (MODULE, OPTIMIZER):
            known = self._known.get(item.path)
            if known is not None and known.unchanged(subset):
                tensors.add_run(known.tensors)
                if item.kind == MODULE:
                    return {WHOLE: known.encoded}
                groups = [_walk_group(group, tensors, first) for group in known.param_groups()]
                later = DeferredValue(groups, item.path)
                return {STATE: known.encoded, GROUPS: later if all(map(_is_frozen, groups)) else later.encode()}
        return self._parts_anew(item, tensors, first)

    def _parts_anew(self, item: StateObject, tensors: TensorRuns, first: int) -> Parts:
        self._known.pop(item.path, None)
        if item.kind == MODULE:
            return self._module_anew(item, tensors, first)
        try:
            state = self.questions.ask(item) if self.questions is not None else item.thing.state_dict()
        except Exception as error:
            raise CaptureError(f"{item.path}.state_dict() failed: {error!r}") from error
        if item.kind == OPTIMIZER and type(state) is dict and state.keys() == {STATE, GROUPS}:
            encoded = _encode(_walk(state[STATE], tensors, first), f"{item.path}.{STATE}")
            found = structure.of_optimizer(unwrap_optimizer(item.thing), state, tensors.since(first), encoded)
            if found is not None:
                self._known[item.path] = found
            groups = _encode(_walk(state[GROUPS], tensors, first), f"{item.path}.{GROUPS}")
            return {STATE: encoded, GROUPS: groups}
        return {WHOLE: self._whole(item, state, tensors, first)}

    def _whole(self, item: StateObject, state: Any, tensors: TensorRuns, first: int) -> bytes | DeferredValue:
        """The values of an object in one part. With a long list in it that part is encoded after `take`."""
        lists = self._lists.get(item.path)
        if lists is None:
            lists = self._lists[item.path] = LongLists(item.path, self._keys.check)
        lists.begin()
        tree = _walk(state, tensors, first, inline=item.kind in INLINE_KINDS, lists=lists)
        lists.end()
        if lists.found and _is_fixed(tree):
            self._keys.check_tree(tree, item.path)
            return DeferredValue(tree, item.path)
        return _encode(tree, item.path)

    def _module_anew(self, item: StateObject, tensors: TensorRuns, first: int) -> Parts:
        memory = read_memory(item.thing)
        extras = read_extras(item.thing, memory)
        encoded = _encode(_walk({**memory, **extras}, tensors, first), item.path)
        if is_plain(item.thing):
            self._known[item.path] = structure.of_module(item.thing, list(memory.values()), encoded)
        return {WHOLE: encoded}


def decode(values: bytes) -> dict[str, Any]:
    """What `StateReader.read` encoded: items as trees whose references count from the first tensor of all."""
    tree = codec.decode(values)
    if not isinstance(tree, dict) or not isinstance(tree.get("items"), dict):
        raise IntegrityError("the values of the snapshot are not what this keepstep writes")
    tree["items"] = {path: _join(part) for path, part in tree["items"].items()}
    if "rng" in tree:
        tree["rng"] = decode_globals(tree["rng"])
    if "grads" in tree:
        tree["grads"] = _join(tree["grads"])
    return tree


def _join(part: Any) -> Any:
    if not (isinstance(part, list) and len(part) == 2 and isinstance(part[1], dict)):
        raise IntegrityError("the values of the snapshot are not what this keepstep writes")
    first, parts = part
    trees = {name: _shift(codec.decode(encoded), first) for name, encoded in parts.items()}
    return trees.get(WHOLE, trees)


def _shift(value: Any, by: int) -> Any:
    kind = type(value)
    if kind is TensorRef:
        return TensorRef(value.index + by)
    if kind is dict:
        return {key: _shift(item, by) for key, item in value.items()}
    if kind is OrderedDict:
        return OrderedDict((key, _shift(item, by)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(_shift(item, by) for item in value)
    return value


def _encoded(parts: Parts) -> dict[str, bytes]:
    return {name: part.encode() if isinstance(part, DeferredValue) else part for name, part in parts.items()}


def _decoded(part: bytes | DeferredValue) -> Any:
    return part.tree if isinstance(part, DeferredValue) else codec.decode(part)


def _encode(tree: Any, path: str) -> bytes:
    return codec.encode(tree, path=path)


def _walk(value: Any, tensors: TensorRuns, first: int, *, inline: bool = False, lists: LongLists | None = None) -> Any:
    """The tree with references instead of tensors; they count from `first`. Long lists are read by `lists`."""
    kind = type(value)
    if kind is dict:
        return {key: _walk(item, tensors, first, inline=inline, lists=lists) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        if inline and _has_plain_bytes(value) and value.device.type == "cpu" and value.nbytes <= INLINE_BYTES:
            return inline_tensor(value)
        tensors.append(value)
        return TensorRef(len(tensors) - 1 - first)
    if kind is OrderedDict:
        items = [(key, _walk(item, tensors, first, inline=inline, lists=lists)) for key, item in value.items()]
        return OrderedDict(items)
    if kind is list and lists is not None and len(value) >= LONG and (blocks := lists.read(value)) is not None:
        return blocks
    if kind is list or kind is tuple:
        return kind(_walk(item, tensors, first, inline=inline, lists=lists) for item in value)
    if kind is torch.Size:
        return TorchSize(tuple(value))
    if kind is torch.dtype:
        return TorchDtype(str(value).removeprefix("torch."))
    if kind is torch.device:
        return TorchDevice(str(value))
    return value


def _walk_group(group: dict[str, Any], tensors: TensorRuns, first: int) -> dict[str, Any]:
    """Its parameters are numbers already, hundreds of them."""
    others = {key: value for key, value in group.items() if key != "params"}
    return {**_walk(others, tensors, first), "params": group["params"]}


def _is_frozen(group: dict[str, Any]) -> bool:
    """Whether its values are constants. Its own dict was made for this `take`."""
    return all(map(_is_constant, (value for key, value in group.items() if key != "params")))


def _is_constant(value: Any) -> bool:
    kind = type(value)
    return kind in _CONSTANTS or (kind is tuple and all(map(_is_constant, value)))


def _is_fixed(tree: Any) -> bool:
    """Whether nothing in a tree that `_walk` made can change."""
    kind = type(tree)
    if kind in (dict, OrderedDict):
        return all(map(_is_constant, tree)) and all(map(_is_fixed, tree.values()))
    return kind in _FIXED or (kind in (list, tuple) and all(map(_is_fixed, tree)))


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor) in _PLAIN_TENSORS
    return is_plain and tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _references(path: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, TensorRef):
        yield path, value.index
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _references(f"{path}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _references(f"{path}.{index}", item)


def asks_foreign_code(item: StateObject) -> bool:
    """Whether reading it calls methods of the user's: its own `state_dict()`, or those of a module's parts."""
    if item.kind == MODULE:
        return any(map(is_odd, item.thing.modules()))
    return is_foreign(item)


def local_part(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The part of a tensor that this rank holds, detached; refuses tensors without plain bytes."""
    part = local_tensor(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor)
    if type(part) not in _PLAIN_TENSORS:
        raise CaptureError(
            f"{path} is a {type(part).__module__}.{type(part).__qualname__}, a tensor subclass keepstep does not know",
            hint="wrap its owner in an object whose state_dict() returns the inner tensors",
        )
    if not _has_plain_bytes(part):
        raise CaptureError(
            f"{path} is a {part.layout} tensor of {part.dtype} on {part.device}, which has no plain bytes",
            hint="keep it out of the state, or store a dense copy",
        )
    return part.detach()
