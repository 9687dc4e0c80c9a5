"""`state_dict()` of foreign objects: never before the first `take`, twice at it, once at each one after it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from odd_objects import Container
from torch import nn

from keepstep import Snapshotter, Survives
from keepstep.testing.run import LocalRun
from keepstep.trainer.plan.arena_size import held_by
from keepstep.trainer.state.objects import STATEFUL, StateObject, StateObjects
from keepstep.trainer.state.reader import StateReader
from keepstep.trainer.state.side_effects import FirstQuestions


class Asked:
    """Counts how often it is asked; the count is no state."""

    def __init__(self) -> None:
        self.times = 0
        self.average = torch.zeros(100_000)

    def state_dict(self) -> dict[str, Any]:
        self.times += 1
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.copy_(state["average"])


class Counting(Asked):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "times": self.times}


class Drawing(Asked):
    def state_dict(self) -> dict[str, Any]:
        random.random()
        return super().state_dict()


class Stepping(Asked):
    """Makes the missing state of an optimizer, as torchtitan's container does."""

    def __init__(self, container: Container) -> None:
        super().__init__()
        self.container = container

    def state_dict(self) -> dict[str, Any]:
        self.container.state_dict()
        return super().state_dict()


class OddLinear(nn.Linear):
    asked = 0

    def get_extra_state(self) -> int:
        OddLinear.asked += 1
        return 3

    def set_extra_state(self, state: int) -> None: ...


class FlatSgd(torch.optim.SGD):
    """A form of its own; makes its missing state when it is asked."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        FlatSgd.asked += 1
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["lr"]


def test_nothing_foreign_is_asked_before_the_first_take(local: LocalRun) -> None:
    OddLinear.asked = FlatSgd.asked = 0
    model = OddLinear(3, 3)
    optimizer, asked = FlatSgd(model.parameters(), lr=0.1), Asked()
    with Snapshotter({"model": model, "optimizer": optimizer, "asked": asked}) as snapshots:
        snapshots.restore()
        assert (asked.times, OddLinear.asked, FlatSgd.asked) == (0, 0, 0)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert snapshots.take(step).wait(timeout_s=60) is Survives.PROCESS, "its memory was foreseen"
            assert (asked.times, FlatSgd.asked) == (step + 2, step + 2)


def test_a_restored_object_is_asked_once_and_needs_no_larger_arena(
    local: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hidden(Asked):
        """Its memory lies deeper than what is foreseen."""

        def __init__(self) -> None:
            self.times, self.inner = 0, Asked()

        @property
        def average(self) -> torch.Tensor:
            return self.inner.average

    with Snapshotter({"hidden": Hidden()}) as snapshots:
        snapshots.restore()
        step = 0
        while (pending := snapshots.take(step)).wait(timeout_s=60) is not Survives.PROCESS:
            assert pending.skipped
            step += 1
        snapshots.close(finished=False)
    hidden = Hidden()
    with Snapshotter({"hidden": hidden}) as snapshots:
        assert snapshots.restore() is not None
        assert hidden.times == 1
        assert snapshots.take(step + 1).wait(timeout_s=60) is Survives.PROCESS


@pytest.mark.parametrize(
    ("make", "effect"),
    [
        (Counting, "gives another state when it is asked again"),
        (Drawing, "draws random numbers"),
        (lambda: Stepping(Container(nn.Linear(2, 2))), "writes parameters or optimizer state"),
    ],
)
def test_effects_are_said_once(make: Any, effect: str, caplog: pytest.LogCaptureFixture) -> None:
    thing = make()
    state: dict[str, Any] = {"thing": thing}
    if isinstance(thing, Stepping):
        state["optimizer"] = thing.container
    objects = StateObjects(state)
    reader = StateReader(objects, rng=False, grads=False, questions=FirstQuestions(objects))
    for _ in range(3):
        reader.read()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"thing.state_dict() {effect}: ")


def test_objects_without_effects_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    state = {"asked": Asked(), "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "optimizer": optimizer}
    objects = StateObjects(state)
    StateReader(objects, rng=False, grads=False, questions=FirstQuestions(objects)).read()
    assert caplog.records == []


def test_tensors_of_objects_that_are_not_asked_are_foreseen_once() -> None:
    shared, large, small = torch.ones(100_000), torch.ones(50_000), torch.ones(10)

    class Holder:
        def __init__(self) -> None:
            self.shared, self.large, self.view, self.nested = shared, large, large[:7], {"a": [small, (small,)]}

    held, inline_bytes = held_by([StateObject("holder", STATEFUL, Holder())], [shared])
    assert [tensor.size_bytes for tensor in held] == [large.nbytes]
    assert inline_bytes == small.nbytes


def test_a_state_of_foreign_objects_only_is_planned(local: LocalRun) -> None:
    with Snapshotter({"asked": Asked()}) as snapshots:
        assert snapshots.restore() is None
        assert snapshots.take(0).wait(timeout_s=60) is Survives.PROCESS
