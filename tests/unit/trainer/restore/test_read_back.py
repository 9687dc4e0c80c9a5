"""State that `load_state_dict()` leaves out is an error of `restore()`, with its path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from keepstep import RecoveryError, Snapshotter, Survives
from keepstep.testing.run import LocalRun


def save(state: dict[str, Any]) -> None:
    with Snapshotter(state) as snapshots:
        snapshots.restore()
        assert snapshots.take(0).wait(timeout_s=60) is Survives.PROCESS
        snapshots.close(finished=False)


def load(state: dict[str, Any]) -> None:
    with Snapshotter(state) as snapshots:
        assert snapshots.restore() is not None


class Forgetful:
    """Loads what it names, and nothing else."""

    def __init__(self, *loads: str, **values: Any) -> None:
        self.loads, self.values = loads, values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.update({name: state[name] for name in self.loads})


class Casting(Forgetful):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values["average"] = state["average"].to(torch.bfloat16)


class Clock(Forgetful):
    def state_dict(self) -> dict[str, Any]:
        return {**self.values, "asked_at": time.perf_counter_ns()}


class Stream(Forgetful):
    """What is iterated gives its state when it runs."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class KeyedByName(torch.optim.SGD):
    """torch's form, but with names where torch has numbers: written to the wrong place, and so lost."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "state": {f"weight{index}": inner for index, inner in state["state"].items()}}


def test_values_that_are_left_out_are_named(local: LocalRun) -> None:
    save({"meter": Forgetful(best=0.5, history=[1, 2], seen={"a": 1, "b": torch.ones(2)})})
    with pytest.raises(RecoveryError) as refused:
        load({"meter": Forgetful("history", best=1.0, history=[], seen={"a": 1})})
    assert "meter.best is 1.0 now and was 0.5; meter.seen.b is missing now" in str(refused.value)
    assert "history" not in str(refused.value)


def test_a_tensor_with_other_bits_or_another_dtype_is_named(local: LocalRun) -> None:
    save({"large": Forgetful(average=torch.ones(50_000)), "small": Forgetful(average=torch.ones(3))})
    with pytest.raises(RecoveryError, match=r"large\.average is .* now; small\.average is another tensor"):
        load({"large": Casting(average=torch.ones(50_000)), "small": Forgetful(average=torch.zeros(3))})


def test_state_of_an_optimizer_that_has_no_place_is_named(local: LocalRun) -> None:
    def make() -> torch.optim.Optimizer:
        return KeyedByName([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)

    optimizer = make()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    save({"optimizer": optimizer})
    with pytest.raises(RecoveryError, match=r"optimizer\.state\.weight0"):
        load({"optimizer": make()})


def test_what_differs_each_time_and_what_is_iterated_is_not_compared(
    local: LocalRun, caplog: pytest.LogCaptureFixture
) -> None:
    save({"clock": Clock("best", best=1), "stream": Stream(position=3)})
    load({"clock": Clock("best", best=2), "stream": Stream(position=0)})
    assert "clock.asked_at differ each time that state_dict() is called" in caplog.text


def scheduler(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([0.5] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
    return scheduler


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "steps": lambda o: schedulers.MultiStepLR(o, [1, 4]),
    "cosine": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "cycle": lambda o: schedulers.OneCycleLR(o, 0.2, 10),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chain": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.PolynomialLR(o)]),
}


@pytest.mark.filterwarnings("ignore:.*scheduler:UserWarning")
def test_schedulers_and_scalers_of_torch_give_what_they_took(local: LocalRun) -> None:
    def state(steps: int) -> dict[str, Any]:
        made: dict[str, Any] = {name: scheduler(make, steps) for name, make in SCHEDULERS.items()}
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        if steps:
            scaler.scale(torch.ones(1))
            scaler.update(16.0)
        return {**made, "scaler": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)}

    save(state(3))
    load(state(0))


def test_a_tensor_of_one_element_may_have_any_stride(local: LocalRun) -> None:
    save({"a": Forgetful("column", column=torch.ones(1, 4)[:, 0])})
    live = Forgetful("column", column=torch.zeros(1, 4)[:, 0])
    load({"a": live})
    assert live.values["column"].item() == 1
