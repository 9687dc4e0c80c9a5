"""The training loop that every contender of `bench_take.py` saves: fixed compute, then a real optimizer's update.

The state is parameters and fused AdamW's moments and step counts, four tensors per parameter. Gradients are
constant, so that an update costs one pass over the state and nothing else. `Workload` never saves anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TENSORS_PER_PARAMETER = 4
"""the parameter, exp_avg, exp_avg_sq and AdamW's 0-dim step count"""
FLOATS_PER_PARAMETER_ELEMENT = 3
MATMUL_SIZE = 1024
"""side of the square matrices whose products stand for forward and backward: compute that hardly touches memory"""


@dataclass(frozen=True)
class Update:
    """One `optimizer.step()`."""

    wait_s: float
    """from the call to the start of the update itself: every hook's work, a saver's fence included"""
    total_s: float


class Workload:
    """A model of `num_tensors` state tensors and `size_bytes` in all, its optimizer, and a step of fixed work."""

    def __init__(self, *, size_bytes: int, num_tensors: int, num_matmuls: int) -> None:
        num_parameters = max(1, num_tensors // TENSORS_PER_PARAMETER)
        num_elements = max(1, size_bytes // (num_parameters * FLOATS_PER_PARAMETER_ELEMENT * 4))
        torch.manual_seed(0)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(num_elements)) for _ in range(num_parameters))
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._num_matmuls = num_matmuls
        self._left = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
        self._right = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
        self._product = torch.empty(MATMUL_SIZE, MATMUL_SIZE)
        self._update_began = 0.0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state, once."""
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*(parameter.detach() for parameter in self.model), *moments]

    def compute(self) -> None:
        for _ in range(self._num_matmuls):
            torch.mm(self._left, self._right, out=self._product)

    def update(self) -> Update:
        # Registered anew each time so that it is the last hook to run, whatever a saver has registered since.
        last_hook = self.optimizer.register_step_pre_hook(self._begin_update)
        start = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        last_hook.remove()
        return Update(wait_s=self._update_began - start, total_s=end - start)

    def _begin_update(self, *_: object) -> None:
        self._update_began = time.perf_counter()
