"""What samplers of the user's own classes keep about themselves: pass counters, positions, anything in `state_dict()`.

Noted before an order is drawn, and put back before it is drawn again. Random sources are noted elsewhere.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from keepstep.trainer.state.loaders import order_parts
from keepstep.trainer.state.rng import Generator
from keepstep.types import Stateful

log = logging.getLogger("keepstep")

NUMBERS = (int, float, bool, type(None))


class SamplerStates:
    """The samplers of one loader. Those of torch keep nothing between two passes."""

    def __init__(self, loader: Any) -> None:
        self._samplers = [SamplerState(part) for part in order_parts(loader) if not _is_of_torch(part)]

    def now(self) -> list[Any]:
        """What each of them keeps now."""
        return [sampler.now() for sampler in self._samplers]

    def set(self, states: list[Any]) -> None:
        """Set what `now` returned."""
        for sampler, state in zip(self._samplers, states, strict=False):
            sampler.set(state)


class SamplerState:
    """One sampler, and the attributes that it had when its loader was made."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._first = dict(getattr(sampler, "__dict__", {}))
        self._is_named = False  # in a warning

    def now(self) -> dict[str, Any]:
        """Its `state_dict()`, and its numbers: those that have changed, and the names of those that have not."""
        changed: dict[str, Any] = {}
        same: list[str] = []
        for name, value in getattr(self._sampler, "__dict__", {}).items():
            is_same = name in self._first and _is_same(self._first[name], value)
            if type(value) in NUMBERS:
                if is_same:
                    same.append(name)
                else:
                    changed[name] = value
            elif not is_same and not isinstance(value, Generator):
                self._warn()
        own = copy.deepcopy(self._sampler.state_dict()) if isinstance(self._sampler, Stateful) else None
        return {"own": own, "changed": changed, "same": same}

    def set(self, state: dict[str, Any]) -> None:
        """Set what `now` returned. The numbers last: `load_state_dict` may prepare to go on within a pass."""
        if isinstance(self._sampler, Stateful) and state["own"] is not None:
            self._sampler.load_state_dict(copy.deepcopy(state["own"]))
        for name in state["same"]:
            if name in self._first:
                vars(self._sampler)[name] = self._first[name]
        for name, value in state["changed"].items():
            vars(self._sampler)[name] = value

    def _warn(self) -> None:
        if not self._is_named and not isinstance(self._sampler, Stateful):
            self._is_named = True
            log.warning(
                "the order of a %s is restored from random states, set_epoch and its numbers only: give it "
                "state_dict() and load_state_dict(), and prove it with keepstep check",
                type(self._sampler).__name__,
            )


def _is_of_torch(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("torch.utils.data")


def _is_same(first: Any, value: Any) -> bool:
    return first is value or (type(first) is type(value) and type(value) in NUMBERS and first == value)
