"""Global random states are encoded again whenever they have changed, however little."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from keepstep.trainer.state.rng import (
    GlobalEncoder,
    GlobalState,
    decode_globals,
    from_inline,
    inline_tensor,
    set_rng_state,
)


@pytest.fixture(autouse=True)
def _states_are_put_back() -> Iterator[None]:
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host)


def set_gauss(value: float) -> None:
    version, words, _ = random.getstate()
    random.setstate((version, words, value))


def set_cached_gauss(value: float) -> None:
    name, key, position, _, _ = np.random.get_state()
    np.random.set_state((name, key, position, 1, value))


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "python": (lambda: random.seed(1), lambda: random.random()),
    "python, the second of a pair": (lambda: (random.seed(1), random.gauss(0, 1)), lambda: random.gauss(0, 1)),
    "python, the sign of zero": (lambda: set_gauss(0.0), lambda: set_gauss(-0.0)),
    "numpy": (lambda: np.random.seed(1), lambda: np.random.random()),
    "numpy, the second of a pair": (lambda: (np.random.seed(1), np.random.randn()), lambda: np.random.randn()),
    "numpy, the sign of zero": (lambda: set_cached_gauss(0.0), lambda: set_cached_gauss(-0.0)),
    "torch": (lambda: torch.manual_seed(1), lambda: torch.rand(1)),
    "torch, the second of a pair": (lambda: (torch.manual_seed(1), torch.randn(1)), lambda: torch.randn(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_comes_back(change: str) -> None:
    begin, draw = CHANGES[change]
    states = GlobalEncoder()
    begin()
    before = states.encode(GlobalState.now())
    assert states.encode(GlobalState.now()) == before
    draw()
    after = states.encode(GlobalState.now())
    name = change.split(",")[0]
    assert [key for key in before if before[key] != after[key]] == [name]
    torch.rand(3), random.random(), np.random.random()
    set_rng_state(decode_globals(after))
    assert GlobalEncoder().encode(GlobalState.now()) == after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64])
def test_tensor_of_one_element_is_a_value_whatever_its_stride_is(dtype: torch.dtype) -> None:
    column = torch.tensor([[1, 0, 0, 1]]).to(dtype)[:, 3]
    assert column.stride() == (4,)
    assert torch.equal(from_inline(inline_tensor(column)), column)
    assert torch.equal(from_inline(inline_tensor(column[:0])), column[:0])
