"""An optimizer that holds another: the state of both comes back, and training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import Snapshotter, Survives
from keepstep.testing.run import LocalRun
from keepstep.trainer.state.objects import StateObjects, unwrap_optimizer

SAVED, STEPS = 4, 9


class Lookahead(torch.optim.Optimizer):
    """Slow weights in its own state, moments in that of the inner one, torch's own `state_dict()`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if not state:
                state["slow"], state["steps"] = torch.zeros_like(parameter), 0
            state["steps"] += 1
            if state["steps"] % 3 == 0:
                parameter.copy_(state["slow"].lerp_(parameter, 0.5))


class SAM(torch.optim.Optimizer):
    """The inner one shares its groups and is called `base_optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {"rho": 0.05})
        self.base_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


class Delegating(torch.optim.Optimizer):
    """As Accelerate's: everything is the inner one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups = optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class View(torch.optim.Optimizer):
    """Groups and state of the inner one, torch's own `state_dict()`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


WRAPPED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Lookahead around SGD": lambda model: Lookahead(sgd(model)),
    "Lookahead around AdamW": lambda model: Lookahead(adamw(model)),
    "Accelerate around Lookahead": lambda model: Delegating(Lookahead(adamw(model))),
    "Lookahead around SAM": lambda model: Lookahead(SAM(adamw(model))),
    "SAM": lambda model: SAM(sgd(model)),
    "view": lambda model: View(adamw(model)),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        model.zero_grad()
        model(torch.linspace(-1, step, 12).reshape(3, 4)).pow(2).mean().backward()
        optimizer.step()


def begin(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    return model, make(model)


@pytest.mark.parametrize("name", WRAPPED)
def test_resume_of_an_optimizer_that_holds_another_is_exact(local: LocalRun, name: str) -> None:
    straight, optimizer = begin(WRAPPED[name])
    train(straight, optimizer, 0, STEPS)

    model, optimizer = begin(WRAPPED[name])
    with Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        assert snapshots.restore() is None
        train(model, optimizer, 0, SAVED)
        assert snapshots.take(SAVED).wait(timeout_s=30) is Survives.PROCESS
        snapshots.close(finished=False)

    model, optimizer = begin(WRAPPED[name])
    with Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        assert snapshots.restore() is not None
        train(model, optimizer, SAVED, STEPS)
    assert torch.equal(model.weight, straight.weight)
    assert torch.equal(model.bias, straight.bias)


def test_a_wrapper_is_the_inner_one_only_where_their_state_is_the_same() -> None:
    inner = sgd(nn.Linear(2, 2))
    lookahead = Lookahead(inner)
    assert unwrap_optimizer(Delegating(inner)) is inner
    assert unwrap_optimizer(View(inner)) is inner
    assert unwrap_optimizer(Delegating(lookahead)) is lookahead
    objects = StateObjects({"o": Delegating(lookahead)})
    assert [item.path for item in objects.all] == ["o", "o.optimizer"]
    assert objects.optimizers == [lookahead, inner]
    assert [item.path for item in StateObjects({"o": View(inner)}).all] == ["o"]
    assert [item.path for item in StateObjects({"o": SAM(inner)}).all] == ["o", "o.base_optimizer"]
