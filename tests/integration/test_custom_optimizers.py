"""Custom optimizers: what they write is copied while training goes on, and their next write waits.

Those that keep tensors in `param_groups`, and those that are no Optimizer and call `before_update()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import keepstep
from keepstep.config import TakeConfig
from keepstep.testing.run import LocalRun
from keepstep.trainer.capture.capture import CaptureJob

pytestmark = pytest.mark.computing

SIZE = 1 << 20  # Elements: 4 MB, far above what is copied with the small tensors.
# A copy of all takes half a second, unless an optimizer waits for it.
SLOW = TakeConfig(rate_bytes_s=24_000_000)
UNTIL_S = 30.0


class GroupMomentum(torch.optim.Optimizer):
    """As NorMuon: the momentum of a group is one flat tensor, made by the first step and kept in `param_groups`."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            flat = torch.cat([parameter.grad.flatten() for parameter in group["params"]])
            if "momentum" not in group:
                group["momentum"] = torch.zeros_like(flat)
                group["second"] = [torch.zeros_like(flat)]
            group["momentum"].mul_(0.9).add_(flat)
            group["second"][0].mul_(0.99).addcmul_(flat, flat)
            for parameter, update in zip(group["params"], group["momentum"].split(SIZE), strict=True):
                parameter.sub_(update.view_as(parameter), alpha=group["lr"])


class Training:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(1024, 1024, bias=False)
        self.optimizer = GroupMomentum(self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model.weight.grad = torch.randn_like(self.model.weight)
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        (group,) = self.optimizer.param_groups
        return [self.model.weight.detach(), group["momentum"], *group["second"]]


class Lives:
    """The lives of one run in this process. All are ended with the test, however it ends."""

    def __init__(self, local: LocalRun) -> None:
        self._local = local
        self._opened: list[keepstep.Snapshotter] = []

    def begin(self, state: dict[str, Any], take: TakeConfig = SLOW) -> tuple[keepstep.Snapshotter, int | None]:
        """The Snapshotter, and the step that it restored."""
        self.end()
        snapshots = keepstep.Snapshotter(state, self._local.config(take=take))
        self._opened.append(snapshots)
        restored = snapshots.restore()
        return snapshots, restored.step if restored is not None else None

    def end(self) -> None:
        for snapshots in self._opened:
            snapshots.close(finished=False)


@pytest.fixture
def lives() -> Iterator[Lives]:
    with LocalRun() as local:
        made = Lives(local)
        yield made
        made.end()


def in_flight(snapshots: keepstep.Snapshotter) -> CaptureJob:
    job = snapshots._capture.current
    assert job is not None, "the copy has ended already"
    return job


def warm_up(training: Training, snapshots: keepstep.Snapshotter, steps: int = 1) -> int:
    """Until the arena has room for the momentum, which exists after the first step only."""
    for step in range(100):
        training.step()
        taken = snapshots.take(step)
        if step >= steps and not taken.skipped and taken.wait(timeout_s=UNTIL_S):
            return step
    raise AssertionError("no snapshot was complete")


def is_equal(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


@pytest.mark.timeout(60)
def test_the_step_waits_until_tensors_in_its_groups_are_copied(lives: Lives) -> None:
    training = Training()
    snapshots, _ = lives.begin(training.state)
    step = warm_up(training, snapshots) + 1
    training.step()
    expected = [tensor.clone() for tensor in training.tensors()]
    taken = snapshots.take(step)
    job = in_flight(snapshots)
    assert [op.path for op in job.schedule.eager] == [], "nothing large is copied inside take"
    assert sum("param_groups" in op.path for op in job.schedule.lazy) == 2, [op.path for op in job.schedule.lazy]
    assert not job.gates[0].done.is_set(), "the copy must be under way for this test"
    waited = snapshots._fence.waited_s
    training.step()  # Writes what is being copied.
    assert snapshots._fence.waited_s > waited
    assert not is_equal(training.tensors(), expected)
    assert taken.wait(timeout_s=UNTIL_S) >= keepstep.Survives.PROCESS, taken.reason

    again = Training()
    _, restored = lives.begin(again.state)
    assert restored == step
    assert is_equal(again.tensors(), expected)


class ByHand:
    """A sign optimizer that is no Optimizer, with momentum of its own, and an average in a dict."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(1024, 1024, bias=False)
        self.model.register_buffer("seen", torch.zeros(SIZE))
        self.momentum = torch.zeros(SIZE)
        self.average = torch.zeros(SIZE)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "updates": self, "plain": {"average": self.average}}

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum.copy_(state["momentum"])

    @torch.no_grad()
    def step(self, snapshots: keepstep.Snapshotter, *, announced: bool = True) -> None:
        self.model.seen.add_(1)  # In forward: always copied inside take.
        if announced:
            snapshots.before_update()
        self.momentum.mul_(0.9).add_(torch.randn(SIZE))
        self.model.weight.sub_(self.momentum.sign().view_as(self.model.weight), alpha=0.01)
        self.average.lerp_(self.model.weight.flatten(), 0.1)

    def tensors(self) -> list[torch.Tensor]:
        return [self.model.weight.detach(), self.momentum, self.average, self.model.seen]


def take_by_hand(training: ByHand, snapshots: keepstep.Snapshotter, steps: range) -> keepstep.PendingSnapshot:
    """Until one snapshot is complete."""
    for step in steps:
        training.step(snapshots)
        taken = snapshots.take(step)
        if not taken.skipped and taken.wait(timeout_s=UNTIL_S):
            return taken
    raise AssertionError("no snapshot was complete")


@pytest.mark.timeout(60)
def test_an_announced_update_waits_until_its_tensors_are_copied(lives: Lives) -> None:
    training = ByHand()
    snapshots, _ = lives.begin(training.state)
    step = take_by_hand(training, snapshots, range(100)).step + 1
    training.step(snapshots)
    expected = [tensor.clone() for tensor in training.tensors()]
    taken = snapshots.take(step)
    job = in_flight(snapshots)
    assert {op.path for op in job.schedule.eager} == {"model.seen"}
    assert {op.path for op in job.schedule.lazy} == {"model.weight", "updates.momentum", "plain.average"}
    waited = snapshots._fence.waited_s
    training.step(snapshots)  # Writes what is being copied.
    assert snapshots._fence.waited_s > waited
    assert taken.wait(timeout_s=UNTIL_S) >= keepstep.Survives.PROCESS, taken.reason

    again = ByHand()
    _, restored = lives.begin(again.state)
    assert restored == step
    assert is_equal(again.tensors(), expected)


@pytest.mark.timeout(60)
def test_an_update_that_is_not_announced_voids_the_snapshot(lives: Lives) -> None:
    training = ByHand()
    snapshots, _ = lives.begin(training.state)
    step = take_by_hand(training, snapshots, range(100)).step + 1
    training.step(snapshots)
    taken = snapshots.take(step)
    training.step(snapshots, announced=False)
    taken.wait(timeout_s=UNTIL_S)
    assert "something writes it outside what before_update() announces" in taken.reason
    assert take_by_hand(training, snapshots, range(step + 1, step + 100)), "it is copied inside take from now on"
