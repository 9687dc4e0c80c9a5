"""Write a snapshot into the live objects: compare everything first, then write in place, random states last.

Two passes. `prepare` compares the saved tree with the live objects and collects what to write; any
difference raises RecoveryError by path before a single byte is written. Then: modules, optimizers,
other Stateful objects, plain containers, data loaders (loaded and primed), random states.

Restored tensors never alias the arena: `optimizer.load_state_dict` would adopt them by reference and
training would then overwrite the snapshot. It also casts state to the parameter's dtype; writing in
place does neither.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from keepstep.errors import RecoveryError
from keepstep.trainer.connection.environment import Ranks
from keepstep.trainer.plan.tensor_blocks import region_of
from keepstep.trainer.restore.saved_snapshot import SavedSnapshot
from keepstep.trainer.state import objects as s
from keepstep.trainer.state.dtensors import is_dtensor, local_tensor
from keepstep.trainer.state.loaders import is_untouched, loader_generators, prime, set_sampler_epochs
from keepstep.trainer.state.module_memory import (
    expected_extras,
    is_odd,
    read_memory,
    reshard,
    sharded_parts,
    untaken_extras,
    write_extras,
)
from keepstep.trainer.state.rng import dtype_named, generator_state
from keepstep.values import TensorRef

log = logging.getLogger("keepstep")

_MISSING = object()
# `Optimizer.__setstate__` adds it to the defaults of optimizers whose groups never have it.
ADDED_BY_TORCH = {"differentiable"}
HoldersOf = Callable[[torch.Tensor, str], Ranks | None]


class StateWriter:
    """Compares a whole snapshot with the live objects, then writes it."""

    def __init__(
        self, saved: SavedSnapshot, items: s.StateObjects, holders_of: HoldersOf = lambda tensor, path: None
    ) -> None:
        """`holders_of`: the ranks that hold a live tensor's bytes by structure, None where that is unknown."""
        self._saved, self._items, self._holders_of = saved, items, holders_of
        self._writes: list[Callable[[], object]] = []
        self._problems: list[str] = []
        self._as_new = False
        self._written: set[int] = set()  # Tensors that are written in place or made anew, by their reference.

    def obstacles(self) -> list[str]:
        """Return what would keep a new process from restoring this snapshot of the live objects.

        In a new process modules and optimizers are as they are now, but no optimizer has state. What else the user's
        objects do with their state shows only there.
        """
        self._as_new = True
        trees = self._saved.tree["items"]
        for item in self._items.all:
            if item.path in trees:
                self._compare_item(item, trees[item.path])
        self._writes.clear()
        whole = [item.path for item in self._items.all if item.kind in (s.MODULE, s.OPTIMIZER, s.STATEFUL)]
        for index, (_, piece) in enumerate(self._saved.pieces()):
            if piece.sharded and index not in self._written and _is_below(piece.path, whole):
                self._problems.append(f"{piece.path} is a DTensor, which is restored as a parameter or its state only")
        return self._problems

    def prepare(self) -> None:
        """Collect all writes. Raises RecoveryError that names every difference; nothing is written."""
        trees = self._saved.tree["items"]
        self._compare_names("the state", set(trees), {item.path for item in self._items.all})
        for item in self._items.all:
            if item.path in trees:
                self._compare_item(item, trees[item.path])
        if self._problems:
            self._writes.clear()  # They reference this object, which references the memory.
            shown = "; ".join(self._problems[:5])
            more = f" (and {len(self._problems) - 5} more)" if len(self._problems) > 5 else ""
            raise RecoveryError(
                f"the snapshot does not fit the live objects: {shown}{more}",
                hint="start with the code and settings that saved it, or discard it with keepstep release",
            )
        self._grads()

    def write(self) -> None:
        writes, self._writes = self._writes, []  # They reference this object, which references the memory.
        with torch.no_grad():
            for write in writes:
                write()
        self._saved.finish_uploads()

    # Each kind of object

    def _compare_item(self, item: s.StateObject, tree: Any) -> None:
        compare: dict[str, Callable[[s.StateObject, Any], None]] = {
            s.MODULE: self._module, s.OPTIMIZER: self._optimizer, s.STATEFUL: self._stateful,
            s.LOADER: self._loader, s.PLAIN: self._plain, s.GENERATOR: self._generator,
        }  # fmt: skip
        compare[item.kind](item, tree)

    def _module(self, item: s.StateObject, tree: Any) -> None:
        if not isinstance(tree, Mapping):
            self._problems.append(f"{item.path} is a module now and was saved as a {type(tree).__name__}")
            return
        reshard(sharded_parts(item.thing))
        live = read_memory(item.thing)
        extras = {name: saved for name, saved in tree.items() if name not in live}
        takes_extras = any(map(is_odd, item.thing.modules()))
        expected = {*live, *(extras if takes_extras else ()), *expected_extras(item.thing)}
        self._compare_names(item.path, set(tree), expected)
        for name, here in live.items():
            if isinstance(saved := tree.get(name), TensorRef):
                self._copy(f"{item.path}.{name}", here, saved)
        if self._as_new:
            lost = sorted(untaken_extras(item.thing, extras))
            self._problems += [f"{item.path}.{name} was given, and no method takes it back" for name in lost]
        if extras:
            self._writes.append(partial(self._write_extras, item, extras))

    def _write_extras(self, item: s.StateObject, extras: dict[str, Any]) -> None:
        self._saved.finish_uploads()  # the user's methods may read tensors that are written already
        write_extras(item.thing, self._saved.values(extras), item.path)

    def _stateful(self, item: s.StateObject, tree: Any) -> None:
        self._writes.append(partial(self._load, item, tree))

    def _load(self, item: s.StateObject, tree: Any) -> None:
        self._give(item, self._saved.values(tree))

    def _give(self, item: s.StateObject, state: Any) -> None:
        self._saved.finish_uploads()  # load_state_dict may read tensors that are written already
        try:
            item.thing.load_state_dict(state)
        except Exception as error:
            raise RecoveryError(
                f"{item.path}.load_state_dict() refused what {item.path}.state_dict() gave: {error!r}",
                hint="start with the code and settings that saved it",
            ) from error

    def _loader(self, item: s.StateObject, tree: Any) -> None:
        epochs = self._saved.tree.get("samplers", {}).get(item.path, [])

        def load_and_prime() -> None:
            set_sampler_epochs(item.thing, epochs)
            if tree is None:  # it was not iterated yet: neither primed, nor left as somebody has begun it since
                if not is_untouched(item.thing):
                    self._give(item, {})
                return
            self._load(item, tree)
            prime(item.thing)

        if not loader_generators(item.thing):
            log.debug("%s draws from the global RNG; it is primed before the RNG is restored", item.path)
        self._writes.append(load_and_prime)

    def _generator(self, item: s.StateObject, tree: Any) -> None:
        here = type(generator_state(item.thing))
        if type(tree) is not here:
            self._problems.append(f"{item.path} is another kind of generator now")

    def _plain(self, item: s.StateObject, tree: Any) -> None:
        if isinstance(item.thing, torch.Tensor) and isinstance(tree, TensorRef):
            self._copy(item.path, item.thing, tree)
        else:
            self._container(item.path, item.thing, tree)

    def _container(self, path: str, live: Any, tree: Any) -> None:
        """A dict or list of the user: tensors written in place, values replaced, keys as saved."""
        if type(tree) is list and isinstance(live, list):
            pairs: list[tuple[Any, Any, Any]] = [
                (i, live[i] if i < len(live) else _MISSING, saved) for i, saved in enumerate(tree)
            ]
            self._writes.append(lambda: operator.delitem(live, slice(len(tree), None)))
        elif isinstance(tree, Mapping) and isinstance(live, dict):
            pairs = [(key, live.get(key, _MISSING), saved) for key, saved in tree.items()]
            self._writes.append(lambda: [live.pop(key) for key in list(live) if key not in tree])
        else:
            self._problems.append(f"{path} is a {type(live).__name__} now and was saved as a {type(tree).__name__}")
            return
        for key, here, saved in pairs:
            renewed = self._renew(f"{path}.{key}", here, saved)
            self._writes.append(partial(_put, live, key, renewed))
        if isinstance(live, dict):
            self._writes.append(lambda: _reorder(live, list(tree)))

    def _renew(self, path: str, here: Any, saved: Any) -> Callable[[], Any]:
        """The value to put in place of `here`: `here` itself, written in place, else a new value."""
        if isinstance(saved, TensorRef) and isinstance(here, torch.Tensor):
            # A plain tensor may have another shape from step to step, a parameter may not.
            if self._same(here, saved) or here.requires_grad:
                self._copy(path, here, saved)
                return lambda: here
        elif type(saved) in (dict, OrderedDict, list) and type(here) is type(saved):
            self._container(path, here, saved)
            return lambda: here
        elif type(saved) is tuple and type(here) is tuple and len(saved) == len(here):
            pairs = enumerate(zip(here, saved, strict=True))
            parts = [self._renew(f"{path}.{index}", live, value) for index, (live, value) in pairs]
            return lambda: tuple(part() for part in parts)
        return lambda: self._saved.values(saved)

    # Optimizers

    def _optimizer(self, item: s.StateObject, tree: Any) -> None:
        if not s.is_torch_form(tree):
            if s.has_own_state_dict(item.thing):  # of another form, which its own load_state_dict knows
                self._stateful(item, tree)
            else:
                self._problems.append(f"{item.path} is an optimizer now and was none")
            return
        optimizer = s.unwrap_optimizer(item.thing)
        self._state_and_groups(item.path, optimizer, tree)
        if tree.keys() - {"state", "param_groups"}:
            # Its own load_state_dict knows the other keys; tensors that it casts or replaces are written again.
            self._writes.append(partial(self._load, item, tree))
            self._writes.append(partial(self._write_again, item.path, optimizer, tree))

    def _write_again(self, path: str, optimizer: torch.optim.Optimizer, tree: Any) -> None:
        writer = StateWriter(self._saved, self._items, self._holders_of)
        writer._state_and_groups(path, optimizer, tree)
        writer.write()

    def _state_and_groups(self, path: str, optimizer: torch.optim.Optimizer, tree: Any) -> None:
        groups = tree["param_groups"]
        shape = [len(group["params"]) for group in optimizer.param_groups]
        if [len(group["params"]) for group in groups] != shape:
            self._problems.append(
                f"{path} has parameter groups of {shape} parameters now "
                f"and had {[len(group['params']) for group in groups]}"
            )
            return
        options = {key for group in optimizer.param_groups for key in group}
        needed = optimizer.defaults.keys() - (ADDED_BY_TORCH - options)
        unknown = {key for group in groups for key in needed if key not in group}
        if unknown:
            self._problems.append(
                f"{path} is a {type(optimizer).__name__} now, and its {', '.join(sorted(unknown))} was not saved"
            )
            return
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                self._state(f"{path}.state.{key}", optimizer, group, parameter, tree["state"].get(key))
            self._writes.append(partial(self._write_group, group, saved))
        keys = {key for group in groups for key in group["params"]}
        for key in tree["state"].keys() - keys:  # state that belongs to no parameter
            self._writes.append(partial(self._write_other_state, optimizer, key, tree["state"][key]))

    def _state(self, path: str, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, saved: Any) -> None:
        if saved is None:
            self._writes.append(lambda: optimizer.state.pop(parameter, None))
            return
        live = {} if self._as_new else optimizer.state.get(parameter, {})
        fresh: dict[str, Any] = {}
        for key, value in saved.items():
            here = live.get(key, _MISSING)
            if not isinstance(value, TensorRef):
                fresh[key] = value
                continue
            if not (isinstance(here, torch.Tensor) and self._same(here, value)):
                self._compare_new_state(f"{path}.{key}", parameter, value)
                if self._as_new:
                    continue
                here = fresh[key] = self._empty_state(key, group, parameter, value)
            self._copy(f"{path}.{key}", here, value)
        order = list(saved)
        self._writes.append(lambda: self._write_state(optimizer, parameter, fresh, order))

    def _write_state(self, optimizer: Any, parameter: torch.Tensor, fresh: dict[str, Any], order: list[str]) -> None:
        target = optimizer.state[parameter]
        for key in [key for key in target if key not in order]:
            del target[key]
        for key, value in fresh.items():
            target[key] = value if isinstance(value, torch.Tensor) else self._near(value, parameter.device)

    def _write_other_state(self, optimizer: Any, key: Any, value: Any) -> None:
        optimizer.state[key] = self._saved.values(value)

    def _near(self, value: Any, device: torch.device) -> Any:
        """Convert values of a parameter's state; tensors in lists (LBFGS) go to the parameter's device."""
        if type(value) in (list, tuple):
            return type(value)(self._near(item, device) for item in value)
        if type(value) is dict:
            return {key: self._near(item, device) for key, item in value.items()}
        converted = self._saved.values(value)
        return converted.to(device) if isinstance(value, TensorRef) else converted

    def _compare_new_state(self, path: str, parameter: torch.Tensor, ref: TensorRef) -> None:
        """A DTensor is made like its parameter."""
        piece = self._saved.piece(ref)
        self._written.add(ref.index)
        if not piece.sharded:
            return
        if not is_dtensor(parameter):
            self._problems.append(f"{path} was a DTensor, and its parameter is none")
        elif tuple(parameter._local_tensor.shape) != piece.shape or region_of(parameter) != piece.region:
            where = f"the part at {piece.region} with the local shape {piece.shape}"
            self._problems.append(f"{path} was {where}, which is not the part of its parameter")

    def _empty_state(self, key: str, group: dict[str, Any], parameter: torch.Tensor, ref: TensorRef) -> torch.Tensor:
        """A new state tensor like the saved one: a DTensor where it was one, on the device that torch would use."""
        piece = self._saved.piece(ref)
        dtype = dtype_named(piece.dtype)
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        device = torch.device("cpu") if on_host else parameter.device
        if piece.sharded and is_dtensor(parameter):
            return torch.empty_like(parameter, dtype=dtype)
        return torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device=device)

    def _write_group(self, group: dict[str, Any], saved: dict[str, Any]) -> None:
        for key in [key for key in group if key != "params" and key not in saved]:
            del group[key]
        for key, value in saved.items():
            if key == "params":
                continue
            here = group.get(key)
            if isinstance(value, TensorRef) and isinstance(here, torch.Tensor) and self._same(here, value):
                self._saved.write(here, value)  # a tensor lr stays the same object
            elif here is None and group["params"] and not self._is_scalar(value):
                # Made by the optimizer's step, as NorMuon does: on the device of what it updates.
                group[key] = self._near(value, group["params"][0].device)
            else:
                group[key] = self._saved.values(value)

    def _is_scalar(self, value: Any) -> bool:
        return isinstance(value, TensorRef) and self._saved.piece(value).shape == ()

    def _grads(self) -> None:
        saved = self._saved.tree.get("grads")
        if saved is None:
            return
        parameters = [p for o in self._items.optimizers for g in o.param_groups for p in g["params"]]
        for parameter, ref in zip(parameters, saved, strict=True):
            self._writes.append(partial(self._write_grad, parameter, ref))

    def _write_grad(self, parameter: torch.Tensor, ref: TensorRef | None) -> None:
        if ref is None:
            parameter.grad = None
            return
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        self._saved.write(local_tensor(parameter.grad), ref)

    # Helpers

    def _copy(self, path: str, live: torch.Tensor, ref: TensorRef) -> None:
        piece = self._saved.piece(ref)
        self._written.add(ref.index)
        if not self._same(live, ref):
            local = local_tensor(live)
            self._problems.append(
                f"{path} is {tuple(local.shape)} {local.dtype} now and was {piece.shape} {piece.dtype}"
            )
            return
        if is_dtensor(live) and piece.sharded and region_of(live) != piece.region:
            self._problems.append(f"{path} is the part at {region_of(live)} now and was the part at {piece.region}")
        before, now = self._saved.holders(ref), self._holders_of(live, path)
        if before is not None and now is not None and before != now:
            self._problems.append(f"{path} is the same on ranks {_some(now)} now and was on ranks {_some(before)}")
        self._writes.append(lambda: self._saved.write(local_tensor(live), ref))

    def _same(self, live: torch.Tensor, ref: TensorRef) -> bool:
        piece, local = self._saved.piece(ref), local_tensor(live)
        return tuple(local.shape) == piece.shape and str(local.dtype) == f"torch.{piece.dtype}"

    def _compare_names(self, where: str, saved: set[Any], live: set[Any]) -> None:
        for names, text in ((saved - live, "was saved and is missing now"), (live - saved, "was not saved")):
            if names:
                self._problems.append(f"{where}: {', '.join(sorted(map(str, names))[:5])} {text}")


def _put(container: Any, key: Any, renewed: Callable[[], Any]) -> None:
    if isinstance(container, list) and key == len(container):
        container.append(renewed())
    else:
        container[key] = renewed()


def _reorder(container: dict[Any, Any], keys: list[Any]) -> None:
    """Put the keys of a dict in their saved order: loops over it depend on it."""
    if list(container) != keys:
        items = [(key, container[key]) for key in keys]
        container.clear()
        container.update(items)


def _is_below(path: str, tops: list[str]) -> bool:
    return any(path == top or path.startswith(f"{top}.") for top in tops)


def _some(ranks: Ranks) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} … ({len(ranks)} of them)"
