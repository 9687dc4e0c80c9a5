"""A snapshot at every step, although each one is finished only after the next has begun (PROTOCOL 18).

On a GPU the copy of a large state takes longer than a step. Here the end of each copy is held back until the `take`
after it: with two slots every other step is captured, with three all of them.
"""

from __future__ import annotations

import threading

import pytest
import torch

import keepstep
from keepstep import faults
from keepstep.config import ArenaConfig
from keepstep.testing.run import LocalRun

pytestmark = pytest.mark.computing

STEPS = 30


class Late:
    """Holds the end of each copy back until it is let go."""

    def __init__(self) -> None:
        self._let_go = threading.Semaphore(0)

    def __call__(self, name: str) -> None:
        if name == "capture.compare":
            self._let_go.acquire(timeout=60)

    def let_go(self) -> None:
        self._let_go.release()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 300)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        moments = [state[name] for state in self.optimizer.state.values() for name in sorted(state)]
        return [t.detach().clone() for t in (*self.model.parameters(), *moments)]


def train(slots: int) -> list[int]:
    """Returns the steps whose snapshots are complete; the newest of them was restored, and is exact."""
    with LocalRun() as run:
        config = run.config(arena=ArenaConfig(slots=slots))
        training, states, taken = Training(), {}, []
        snapshots = keepstep.Snapshotter(training.state, config)
        try:
            snapshots.restore()
            late, held = Late(), None
            faults.install(late)
            for step in range(STEPS):
                training.step()
                taken.append(snapshots.take(step))
                states[step] = training.tensors()
                if held is not None:
                    late.let_go()
                    assert held.wait(timeout_s=30) >= keepstep.Survives.PROCESS, held
                held = None if taken[-1].skipped else taken[-1]
            late.let_go()
            complete = [one.step for one in taken if one.wait(timeout_s=30) >= keepstep.Survives.PROCESS]
        finally:
            faults.install(None)
            snapshots.close(finished=False)
        again = Training()
        snapshots = keepstep.Snapshotter(again.state, config)
        try:
            restored = snapshots.restore()
            assert restored is not None
            assert restored.step == complete[-1]
            pairs = zip(again.tensors(), states[restored.step], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
        finally:
            snapshots.close(finished=False)
        return complete


@pytest.mark.timeout(120)
def test_with_three_slots_the_next_snapshot_begins_before_the_last_has_ended() -> None:
    two, three = train(slots=2), train(slots=3)
    assert two == list(range(0, STEPS, 2))
    assert three == list(range(STEPS))
