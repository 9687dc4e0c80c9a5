"""Tensors that are moved or replaced between two takes: the snapshot is exact, or void and the next one is exact.

A state that has not moved for a while is spot-checked inside `take` (plan_cache.py), so that the move of one tensor may
be noticed only by the validation after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun
from keepstep.trainer.capture.grants import Skip
from keepstep.trainer.plan.plan_cache import MOVED, SETTLED_AFTER

LAYERS = 60


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number % 3)
        self.optimizer.step()

    def parameter(self, number: int) -> torch.nn.Parameter:
        return list(self.model.parameters())[number % (2 * LAYERS)]

    def tensors(self) -> list[torch.Tensor]:
        moments = [state[name] for state in self.optimizer.state.values() for name in sorted(state)]
        return [t.detach().clone() for t in (*self.model.parameters(), *moments)]


def move_one(training: Training, trial: int) -> None:
    parameter = training.parameter(7 * trial + 3)
    parameter.data = parameter.data + 1


def replace_a_moment(training: Training, trial: int) -> None:
    state = training.optimizer.state[training.parameter(11 * trial + 5)]
    state["exp_avg"] = state["exp_avg"] + 1


def transpose_one(training: Training, trial: int) -> None:
    """The same bytes at the same address, in another order."""
    parameter = training.parameter(4 * trial)
    parameter.data = parameter.data.t()


def move_all(training: Training, trial: int) -> None:
    for parameter in training.model.parameters():
        parameter.data = parameter.data + 1


@pytest.fixture
def close_after() -> Iterator[Callable[[keepstep.Snapshotter], keepstep.Snapshotter]]:
    """One that fails must not leave its Snapshotter to the tests after it."""
    opened: list[keepstep.Snapshotter] = []

    def note(snapshots: keepstep.Snapshotter) -> keepstep.Snapshotter:
        opened.append(snapshots)
        return snapshots

    yield note
    for snapshots in opened:
        snapshots.close(finished=False)


def take_when_granted(snapshots: keepstep.Snapshotter, step: int) -> keepstep.PendingSnapshot:
    """A trainer knows that its snapshot is void before its keeper does: the next grant comes a moment later."""
    deadline = time.monotonic() + 10
    while isinstance(snapshots._grants.next(step), Skip) and time.monotonic() < deadline:
        time.sleep(0.005)
    return snapshots.take(step)


@pytest.mark.parametrize(
    "change", [move_one, replace_a_moment, transpose_one, move_all], ids=lambda change: change.__name__
)
@pytest.mark.timeout(180)
def test_what_has_moved_is_never_captured_as_it_was(
    change: Callable[[Training, int], None], close_after: Callable[[keepstep.Snapshotter], keepstep.Snapshotter]
) -> None:
    void = 0
    with LocalRun() as run:
        training, step = Training(), 0
        for trial in range(3):
            snapshots = close_after(keepstep.Snapshotter(training.state, run.config()))
            restored = snapshots.restore()
            assert (restored is None) == (trial == 0)
            for _ in range(SETTLED_AFTER + 2):  # until it is trusted
                training.step()
                step += 1
                assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
            for attempt in range(3):
                training.step()
                step += 1
                if attempt == 0:
                    change(training, trial)
                taken = take_when_granted(snapshots, step)
                state = training.tensors()
                if taken.wait(timeout_s=10) >= keepstep.Survives.PROCESS:
                    break
                assert attempt == 0, taken.reason
                assert MOVED in taken.reason
                void += 1
            else:
                raise AssertionError("snapshots do not go on")
            snapshots.close(finished=False)
            again = Training()
            check = close_after(keepstep.Snapshotter(again.state, run.config()))
            found = check.restore()
            assert found is not None
            assert found.step == step
            assert all(torch.equal(one, other) for one, other in zip(again.tensors(), state, strict=True))
            check.close(finished=False)
            training = again
    assert void <= (0 if change is move_all else 3), "what moves everything is noticed inside take"


@pytest.mark.timeout(60)
def test_weights_that_are_swapped_for_the_take_only_are_what_is_captured() -> None:
    """After `take` everything is as before: only the check inside it can tell."""
    with LocalRun() as run:
        training = Training()
        snapshots = keepstep.Snapshotter(training.state, run.config())
        snapshots.restore()
        for step in range(SETTLED_AFTER + 2):
            training.step()
            assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        training.step()
        raw = [parameter.data for parameter in training.model.parameters()]
        for parameter in training.model.parameters():
            parameter.data = parameter.data * 0.5
        averaged = training.tensors()
        taken = snapshots.take(SETTLED_AFTER + 2)
        for parameter, data in zip(training.model.parameters(), raw, strict=True):
            parameter.data = data
        assert taken.wait(timeout_s=10) >= keepstep.Survives.PROCESS
        snapshots.close(finished=False)
        again = Training()
        check = keepstep.Snapshotter(again.state, run.config())
        found = check.restore()
        assert found is not None
        assert all(torch.equal(one, other) for one, other in zip(again.tensors(), averaged, strict=True))
        check.close(finished=False)


@pytest.mark.timeout(60)
def test_a_parameter_that_goes_to_another_optimizer_is_fenced_by_that_one() -> None:
    """Neither has any state, so that no tensor tells: only who steps what has changed."""
    with LocalRun() as run:
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(20)))
        first, *others = model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
        snapshots = keepstep.Snapshotter({"model": model, "a": optimizers[0], "b": optimizers[1]}, run.config())
        snapshots.restore()
        for step in range(SETTLED_AFTER + 3):
            for optimizer in optimizers:
                optimizer.step()
            assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        assert snapshots._planner.plans.current is not None
        plans = snapshots._planner.plans.current.plans
        moved = optimizers[1].param_groups[0]["params"].pop()
        optimizers[0].param_groups[0]["params"].append(moved)
        for optimizer in optimizers:
            optimizer.step()
        snapshots.take(SETTLED_AFTER + 3).wait(timeout_s=10)
        assert snapshots._planner.plans.current.plans is not plans
        snapshots.close(finished=True)
