"""Models and optimizers whose `state_dict()` is not what their memory is, as frameworks write them. Not a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class FusedProjection(nn.Module):
    """One fused weight; `state_dict()` shows it as three made-up ones, as torchtitan's FusedQKVLinear does."""

    shown = 0  # how often its hook ran

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("scratch", torch.zeros(width), persistent=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._refuse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.fused.T * self.scale).chunk(3, -1)
        return torch.tanh(q * k) + v

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        FusedProjection.shown += 1
        for name, part in zip("qkv", state.pop(prefix + "fused").chunk(3), strict=True):
            state[prefix + name] = part.clone()

    @staticmethod
    def _refuse(*args: Any) -> None:
        raise TypeError("got mixed torch.Tensor and DTensor")


class Container(torch.optim.Optimizer):
    """An Optimizer around optimizers with a flat `state_dict()`, which makes missing state by a step of lr 0."""

    def __init__(self, *models: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in models]
        self.names = {p: f"{i}.{n}" for i, model in enumerate(models) for n, p in model.named_parameters()}
        super().__init__([p for model in models for p in model.parameters()], {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        for optimizer in self.optimizers:
            make_missing_state(optimizer)
        entries = [(p, inner) for o in self.optimizers for p, inner in o.state.items()]
        return {f"{self.names[p]}.{key}": value for p, inner in entries for key, value in inner.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("its optimizers are restored one by one")


def make_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """As torch.distributed.checkpoint does: a step with gradients of zero and lr 0, which counts as a step."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class FlatMomentum(torch.optim.SGD):
    """An Optimizer with a state of another form than torch's, and nothing inside it to read instead."""

    def state_dict(self) -> dict[str, Any]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        found: dict[str, Any] = {"lr": self.param_groups[0]["lr"]}
        for index, parameter in enumerate(parameters):
            if "momentum_buffer" in self.state[parameter]:
                found[f"{index}.momentum_buffer"] = self.state[parameter]["momentum_buffer"]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.param_groups[0]["lr"] = state_dict["lr"]
        for index, parameter in enumerate(parameters):
            if f"{index}.momentum_buffer" in state_dict:
                self.state[parameter]["momentum_buffer"] = state_dict[f"{index}.momentum_buffer"].clone()
