"""What only large states do, with small ones: the keeper's reader, and the ring that bytes reach devices through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun
from keepstep.trainer.capture.host_copy import SmallHostTensors
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.restore.device_upload import UploadQueue


class Watching:
    """A state of its own that looks at the model when it is loaded, as the wrappers of some frameworks do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.seen = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"any": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = float(next(self.model.parameters()).detach().sum())


class Training:
    width = 37

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(self.width, self.width) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.wide = {"columns": torch.randn(20, 30).t(), "every_second": torch.randn(40)[::2], "none": torch.empty(0)}
        self.watching = Watching(self.model)
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "wide": self.wide, "watching": self.watching,
        }  # fmt: skip

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, self.width)).square().mean().backward()
        self.optimizer.step()

    def bits(self) -> list[bytes]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *moments, *self.wide.values()]
        return [tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as made:
        yield made


EAGER_KEEPER = """
from keepstep.keeper.workers import sealing
sealing.LEAST_BYTES = 1
from keepstep.keeper.__main__ import main
raise SystemExit(main(["--detach"]))
"""


def start_eager_keeper(run: LocalRun) -> None:
    """A keeper that has its reader checksum snapshots of any size."""
    subprocess.run([sys.executable, "-c", EAGER_KEEPER], env={**os.environ, **run.environ}, check=True)


def readers_of(run: LocalRun) -> list[int]:
    """The children of the run's keeper."""
    keeper = run.keeper_pid()
    found = Path(f"/proc/{keeper}/task").glob("*/children")
    return [int(pid) for children in found for pid in children.read_text().split()]


def check_restored(config: keepstep.Config, before: Training, step: int) -> None:
    """A new life gets back what the one before had at this step."""
    after = Training(seed=2)
    with keepstep.Snapshotter(after.state, config) as snapshots:
        restored = snapshots.restore()
        assert restored is not None
        assert restored.step == step
    assert after.bits() == before.bits()


def test_restore_through_the_upload_buffers_is_exact(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Training(seed=1)
    with keepstep.Snapshotter(before.state, run.config()) as snapshots:
        snapshots.restore()
        before.step()
        assert snapshots.take(1).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        snapshots.close(finished=False)
    loaded: list[int] = []
    monkeypatch.setattr(UploadQueue, "accepts", lambda self, target: True)
    add = UploadQueue.add

    def count(self: UploadQueue, source: int | torch.Tensor, target: torch.Tensor) -> None:
        loaded.append(target.numel())
        add(self, source, target)

    monkeypatch.setattr(UploadQueue, "add", count)
    after = Training(seed=2)
    after.wide["columns"] = torch.randn(30, 20)  # the same shape with its elements in another order
    with keepstep.Snapshotter(after.state, run.config()) as snapshots:
        restored = snapshots.restore()
        assert restored is not None
        assert restored.step == 1
    assert after.bits() == before.bits()
    assert sum(loaded) > 37 * 37 * 4 * 3
    assert after.watching.seen == float(next(before.model.parameters()).detach().sum())


def test_snapshots_are_sealed_and_restored_whatever_becomes_of_the_reader(run: LocalRun) -> None:
    start_eager_keeper(run)
    config = run.config()
    before = Training(seed=1)
    killed: list[int] = []
    with keepstep.Snapshotter(before.state, config) as snapshots:
        snapshots.restore()
        for step in range(1, 16):
            before.step()
            assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
            if step == 10:
                killed = readers_of(run)
                os.kill(killed[0], signal.SIGKILL)
        snapshots.close(finished=False)
    assert len(killed) == 1
    assert all(not result.problem for result in run.verify())
    check_restored(config, before, 15)


def test_the_first_snapshots_are_all_looked_at_as_they_should_be(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next one compares is prepared before anybody can begin it, however long that takes."""
    made = {"first": 0, "next": 0}
    first, following = SnapshotChecks.first, SnapshotChecks.next

    def count_first(*args: Any, **kwargs: Any) -> SnapshotChecks:
        made["first"] += 1
        return first(*args, **kwargs)

    def slow_next(*args: Any, **kwargs: Any) -> SnapshotChecks:
        made["next"] += 1
        time.sleep(0.05)
        return following(*args, **kwargs)

    monkeypatch.setattr(SnapshotChecks, "first", count_first)
    monkeypatch.setattr(SnapshotChecks, "next", slow_next)
    monkeypatch.setattr(Training, "width", 300)
    training = Training(seed=1)
    training.step()
    with keepstep.Snapshotter(training.state, run.config()) as snapshots:
        snapshots.restore()
        for step in range(1, 5):
            training.step()
            assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
    assert made["first"] == 1
    assert made["next"] >= 3


def test_a_flipped_bit_is_found_in_the_map(run: LocalRun) -> None:
    start_eager_keeper(run)
    config = run.config()
    training = Training(seed=1)
    with keepstep.Snapshotter(training.state, config) as snapshots:
        snapshots.restore()
        for step in range(1, 6):
            training.step()
            assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        assert readers_of(run)
        (sound,) = run.verify()
        assert not sound.problem
        with run.arenas() as (arena,):
            at = arena.payload_span(sound.slot).offset + 5000
            (byte,) = arena.segment.read(at, 1)
            arena.segment.write(at, bytes([byte ^ 4]))
        assert "chunk 0 of the payload" in run.verify()[0].problem
        snapshots.close(finished=True)


def test_take_replaces_a_refused_arena_only_when_no_take_uses_it(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the descriptor would be closed under the take, and its number given to another file."""
    training, write = Training(seed=1), SmallHostTensors.write
    before: list[Any] = []

    def refuse_meanwhile(self: SmallHostTensors, fd: int, start: int) -> None:
        if before:
            snapshots._reporter.arena_refused()
            time.sleep(0.5)
            assert snapshots._memory.view is before[0], "the arena was closed inside take"
        write(self, fd, start)

    monkeypatch.setattr(SmallHostTensors, "write", refuse_meanwhile)
    with keepstep.Snapshotter(training.state, run.config()) as snapshots:
        snapshots.restore()
        for step in range(1, 4):
            training.step()
            assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        before.append(snapshots._memory.view)
        training.step()
        pending = snapshots.take(4)
        before.clear()
        assert pending.wait(timeout_s=10) >= keepstep.Survives.PROCESS, pending.reason
        training.step()
        assert "being prepared" in snapshots.take(5).reason
        deadline = time.monotonic() + 20
        while snapshots._memory.busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        complete = False
        for step in range(6, 60):
            training.step()
            complete = snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
            if complete:
                break
        assert complete
