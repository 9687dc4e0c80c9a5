"""The order in which the gradients of a DDP model arrive, and a rehearsal that repeats it without the program's loss.

DDP sums gradients in buckets. After the first synchronised backward pass of a process it fills them anew, in the order
in which the gradients arrived, and with three or more ranks another bucket is another order of summation. The order is
noted once, in the first process of a run, and is part of the state. After a restore a backward pass is made in which
the gradients, all zero, arrive in this order.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

FEW_RANKS = 2  # The sum of two numbers has one order.
INDEX = "I"  # array's code of an index


class GradientOrder:
    """The arrival order of one model. `encoded` is empty until a synchronised backward pass is over."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.encoded = b""
        self._arrived: dict[int, None] = {}
        self._hooks: list[Any] = []

    def note(self) -> None:
        """Note the order of the next backward pass that is synchronised."""
        for index, parameter in enumerate(_trained(self.model)):
            hooked: Any = parameter
            self._hooks.append(hooked.register_post_accumulate_grad_hook(partial(self._note, index)))

    def _note(self, index: int, _: torch.Tensor) -> None:
        if self.model.require_backward_grad_sync:
            self._arrived.setdefault(index)

    def finish(self) -> None:
        """Keep what was noted, if anything was."""
        if self._arrived:
            self.encoded = array(INDEX, self._arrived).tobytes()
            self._arrived.clear()
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def rehearse(self, encoded: bytes) -> None:
        """Make a backward pass in this order. Parameters, buffers and gradients are as before when it returns."""
        self.encoded = encoded
        order = array(INDEX)
        order.frombytes(encoded)
        parameters = _trained(self.model)
        gradients = [parameter.grad for parameter in parameters]
        module, broadcasts = self.model.module, self.model.require_forward_param_sync
        try:
            self.model.require_forward_param_sync = False
            self.model.module = _OrderedGradients([parameters[index] for index in order])
            self.model().backward()
        finally:
            self.model.module, self.model.require_forward_param_sync = module, broadcasts
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def orders_of(models: list[Any], num_processes: int) -> list[GradientOrder]:
    """One for each DDP model whose buckets depend on the order."""
    if num_processes <= FEW_RANKS:
        return []
    parallel = [model for model in models if isinstance(model, DistributedDataParallel)]
    return [GradientOrder(model) for model in parallel if not model.find_unused_parameters]


def _trained(model: DistributedDataParallel) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.module.parameters() if parameter.requires_grad]


class _OrderedGradients(torch.nn.Module):
    """A module whose output depends on each parameter through a chain, so that gradients arrive one after the other."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self._ordered = tuple(parameters)  # a tuple: they stay parameters of the real module

    def forward(self) -> Any:
        link: Any = _ZeroGradient
        output: Any = torch.zeros((), device=self._ordered[0].device)
        for parameter in reversed(self._ordered):
            output = link.apply(parameter, output)
        return output


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return rest.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (parameter,) = ctx.saved_tensors
        return torch.zeros_like(parameter), gradients[0]
