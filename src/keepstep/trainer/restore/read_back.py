"""Asks the user's objects for their state after a restore, and compares it with what was stored.

`load_state_dict` may leave out what it does not know, without a word: state keyed by `id()`, a field it forgets.
Compared are Stateful objects, and optimizers whose `state_dict()` is their own or has hooks; everything else is written
in place. Not compared are loaders and whatever else is iterated: their state is that of an iterator that does not exist
yet. Containers and numbers count as equal when their items are, whatever their type: a list for a tuple loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from keepstep.errors import RecoveryError
from keepstep.trainer.restore.saved_snapshot import SavedSnapshot
from keepstep.trainer.state.dtensors import local_tensor
from keepstep.trainer.state.objects import (
    OPTIMIZER,
    STATEFUL,
    StateObject,
    StateObjects,
    has_own_state_dict,
    is_torch_form,
)
from keepstep.trainer.state.rng import host_bytes
from keepstep.values import InlineTensor, TensorRef, TorchDevice

log = logging.getLogger("keepstep")

MAX_SHOWN = 5
MAX_TEXT = 60
_MISSING = object()


class ReadBack:
    """Compares the live objects with the snapshot that was written into them."""

    def __init__(self, saved: SavedSnapshot, items: StateObjects) -> None:
        self._saved, self._items = saved, items
        self._with_bytes = True

    def check(self) -> None:
        """Raise RecoveryError when an object gives less than, or something else than, what was stored."""
        trees = self._saved.tree["items"]
        differences: dict[str, str] = {}
        for item in self._items.all:
            if _is_asked_again(item):
                differences.update(self._compare_object(item, trees[item.path]))
        if differences:
            shown = "; ".join(list(differences.values())[:MAX_SHOWN])
            more = f" (and {len(differences) - MAX_SHOWN} more)" if len(differences) > MAX_SHOWN else ""
            raise RecoveryError(
                f"load_state_dict() left out what state_dict() had given: {shown}{more}",
                hint="let load_state_dict() restore it, under keys that mean the same in another process, or leave it "
                "out of state_dict(); keepstep release discards the snapshot",
            )

    def _compare_object(self, item: StateObject, tree: Any) -> dict[str, str]:
        # The tensors of an optimizer in torch's form were written in place, gigabytes of them.
        self._with_bytes = item.kind != OPTIMIZER or not is_torch_form(tree)
        try:
            differences = dict(self._compare(item.path, tree, item.thing.state_dict()))
            # What differs from one question to the next (a clock, a counter of saves) is no state.
            steady = dict(self._compare(item.path, tree, item.thing.state_dict())) if differences else {}
        except Exception as error:
            log.warning("%s.state_dict() failed after the restore, so it was not compared: %r", item.path, error)
            return {}
        changing = [path for path, text in differences.items() if steady.get(path) != text]
        if changing:
            log.warning("%s differ each time that state_dict() is called", ", ".join(changing[:MAX_SHOWN]))
        return {path: text for path, text in differences.items() if path not in changing}

    def _compare(self, path: str, saved: Any, here: Any) -> Iterator[tuple[str, str]]:
        """Yield (path, what differs), in the order of the snapshot."""
        if isinstance(saved, (TensorRef, InlineTensor)):
            if not self._same_tensor(saved, here):
                yield path, f"{path} is {_text(here)} now"
        elif isinstance(saved, Mapping) and isinstance(here, Mapping):
            for key, value in saved.items():
                yield from self._compare(f"{path}.{key}", value, here.get(key, _MISSING))
        elif isinstance(saved, (list, tuple)) and isinstance(here, (list, tuple)):
            if len(saved) != len(here):
                yield path, f"{path} has {len(here)} items now and had {len(saved)}"
                return
            for index, (value, other) in enumerate(zip(saved, here, strict=True)):
                yield from self._compare(f"{path}.{index}", value, other)
        elif here is _MISSING:
            yield path, f"{path} is missing now"
        elif not isinstance(saved, TorchDevice) and not _same_value(self._saved.values(saved), here):
            yield path, f"{path} is {_text(here)} now and was {_text(self._saved.values(saved))}"

    def _same_tensor(self, ref: TensorRef | InlineTensor, here: Any) -> bool:
        if not isinstance(here, torch.Tensor):
            return False
        live = local_tensor(here.detach())
        kind = ref if isinstance(ref, InlineTensor) else self._saved.piece(ref)
        if str(live.dtype) != f"torch.{kind.dtype}" or tuple(live.shape) != kind.shape:
            return False
        return not self._with_bytes or _bits(self._saved.values(ref)) == _bits(live)


def _is_asked_again(item: StateObject) -> bool:
    if item.kind == OPTIMIZER:
        return has_own_state_dict(item.thing, with_hooks=True)
    return item.kind == STATEFUL and not hasattr(type(item.thing), "__iter__")


def _bits(tensor: torch.Tensor) -> memoryview:
    return host_bytes(tensor).data


def _same_value(saved: Any, here: Any) -> bool:
    if isinstance(saved, np.ndarray) or isinstance(here, np.ndarray):
        return bool(np.array_equal(saved, here, equal_nan=np.asarray(saved).dtype.kind in "fc"))
    return bool(saved == here) or (saved != saved and here != here)


def _text(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, torch.Tensor):
        return f"another tensor of {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= MAX_TEXT else f"another {type(value).__name__}"
