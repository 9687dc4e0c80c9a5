"""`take` waits while a device works: real trainers and a real keeper, with a device that is only said to be busy.

This file is also the trainer of one of two ranks: `python test_take_wait.py RANK` prints the steps that it captured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from granted import wait_for_grant

import keepstep
from keepstep import faults
from keepstep.config import TakeConfig
from keepstep.testing.run import LocalRun
from keepstep.trainer.capture.device_lane import DeviceLanes

pytestmark = pytest.mark.computing

STEPS = 20
COPY_S = 0.02


class BusyFor:
    """Work that is pending for some time after it was marked."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def is_pending(self) -> bool:
        return time.monotonic() < self._end


def delay_commit(name: str) -> None:
    if name == "capture.compare":
        time.sleep(COPY_S)


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


def train(run: LocalRun | None, *, busy_s: float, wait_s: float = 5.0) -> tuple[list[int], dict[str, float], float]:
    """Returns the captured steps, the keeper's counters and the seconds that the longest `take` took."""
    take = TakeConfig(wait_s=wait_s)
    config = run.config(take=take) if run is not None else keepstep.Config(take=take)
    training, captured, longest_s = Training(), [], 0.0
    with pytest.MonkeyPatch.context() as patched, keepstep.Snapshotter(training.state, config) as snapshots:
        patched.setattr(DeviceLanes, "queued_work", lambda lanes: BusyFor(busy_s))
        snapshots.restore()
        wait_for_grant(snapshots)
        faults.install(delay_commit)
        try:
            for step in range(STEPS):
                training.step()
                started = time.monotonic()
                pending = snapshots.take(step)
                longest_s = max(longest_s, time.monotonic() - started)
                if not pending.skipped:
                    captured.append(step)
            pending.wait(timeout_s=10)
        finally:
            faults.install(None)
        counters = snapshots.status().counters
    return captured, counters, longest_s


@pytest.mark.timeout(120)
def test_every_step_is_captured_while_the_device_is_busy() -> None:
    with LocalRun() as run:
        captured, counters, _ = train(run, busy_s=5.0)
    assert captured == list(range(STEPS))
    assert counters["takes_asked"] == STEPS
    assert counters["takes_waited"] >= STEPS // 2
    assert counters["take_wait_seconds"] >= COPY_S * counters["takes_waited"] / 2
    assert sum(n for name, n in counters.items() if name.startswith("takes_skipped_")) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("busy_s", "wait_s"), [(0.0, 5.0), (5.0, 0.0)], ids=["idle device", "turned off"])
def test_steps_are_skipped_without_a_wait(busy_s: float, wait_s: float) -> None:
    with LocalRun() as run:
        captured, counters, _ = train(run, busy_s=busy_s, wait_s=wait_s)
    assert len(captured) < STEPS
    assert counters["takes_waited"] == 0
    assert sum(n for name, n in counters.items() if name.startswith("takes_skipped_")) == STEPS - len(captured)


@pytest.mark.timeout(120)
def test_take_waits_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "COPY_S", 1.0)
    with LocalRun() as run:
        captured, counters, longest_s = train(run, busy_s=60.0, wait_s=0.1)
    assert 1 <= len(captured) < STEPS
    assert counters["takes_waited"]
    assert longest_s < 0.8, "two waits of 0.1 s would be too long already, and a busy machine takes its time"


@pytest.mark.timeout(120)
def test_two_ranks_capture_the_same_steps_while_their_devices_are_busy() -> None:
    with LocalRun() as run:
        environ = os.environ | run.environ
        environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, Path(__file__), str(rank)], stdout=subprocess.PIPE, text=True,
                env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=100)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    first, second = (output.split() for output in outputs)
    assert first == second
    assert len(first) >= STEPS - 4, first


if __name__ == "__main__":
    steps, _, _ = train(None, busy_s=0.5)
    print(*steps)
