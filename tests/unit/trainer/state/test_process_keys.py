"""Keys that mean something in this process only are refused by path, and no others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import CaptureError, Snapshotter
from keepstep.testing.run import LocalRun
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.reader import StateReader

PARAMETER = nn.Parameter(torch.ones(3))


class Keyed:
    """An optimizer that is no Optimizer, with any keys."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["states"]


REFUSED = {
    "id": lambda: {id(PARAMETER): {"momentum": torch.ones(2)}},
    "id as text": lambda: {f"state_{id(PARAMETER)}": 1},
    "id in hexadecimal": lambda: {hex(id(PARAMETER)): 1},
    "address of the memory": lambda: {PARAMETER.data_ptr(): 1},
    "id in a tuple": lambda: {(0, id(PARAMETER)): 1},
    "text of an object": lambda: {str(object()): 1},
    "text of a function": lambda: {repr(read): 1},
    "set of ids": lambda: {"seen": {id(PARAMETER)}},
    "deep below": lambda: {"a": [{"b": ({1: {id(PARAMETER): 1}},)}]},
}

KEPT = {
    "large numbers": lambda: {2**40 + 7: 1, 2**47 - 16: 2, 1_763_000_000_000: 3, time.time_ns(): 4, -5: 5, True: 6},
    "digits": lambda: {"sample-00140234567890": 1, "2026-11-19T10:00:00": 2, "0x7fffffff0000": 3},
    "values, not keys": lambda: {"owner": id(PARAMETER), "text": str(object()), "list": [PARAMETER.data_ptr()]},
    "words": lambda: {"look at 0x": 1, "at": 2},
}


def read(state: dict[str, Any]) -> None:
    StateReader(StateObjects(state), rng=False, grads=False).read()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("wrap", [Keyed, lambda state: {"states": state}])
def test_a_key_of_this_process_is_refused(name: str, wrap: Any) -> None:
    with pytest.raises(CaptureError, match=r"keys that mean nothing in another process: other\.states\.") as refused:
        read({"other": wrap(REFUSED[name]())})
    assert refused.value.hint == "use the name or the index of the object as the key"


@pytest.mark.parametrize("name", KEPT)
def test_any_other_key_is_kept(name: str) -> None:
    read({"other": Keyed(KEPT[name]())})


def test_a_key_that_comes_later_is_refused() -> None:
    other = Keyed({"step": 1})
    reader = StateReader(StateObjects({"other": other}), rng=False, grads=False)
    reader.read()
    other.state[id(PARAMETER)] = 1
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"id\(\) of a Parameter"):
            reader.read()


def test_it_is_said_by_take(local: LocalRun, caplog: pytest.LogCaptureFixture) -> None:
    with Snapshotter({"other": Keyed({id(PARAMETER): 1})}) as snapshots:
        snapshots.restore()
        pending = snapshots.take(0)
    assert pending.skipped
    assert f"other.states.{id(PARAMETER)} (id() of a Parameter)" in pending.reason
    assert pending.reason in caplog.text
