"""It leaves no trace: at once after a normal end, after the lease when a job was killed, and never while it lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun, alive, wait_until

TRAINER = Path(__file__).with_name("trainer.py")
LAUNCHER = "import subprocess,sys,time; subprocess.run(sys.argv[1:]); time.sleep(60)"


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as made:
        yield made


def start(run: LocalRun, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAINER), *map(str, arguments)]
    return subprocess.Popen(
        command, env={**os.environ, **run.environ, **environ}, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def read_until(process: subprocess.Popen[str], key: str) -> dict[str, object]:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if key in event:
            return event
    raise AssertionError(f"the trainer ended without saying {key!r}")


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def nothing_left(run: LocalRun) -> bool:
    return not run.processes() and not run.identity.runtime_dir.exists()


def test_after_a_normal_end_nothing_is_left_at_once(run: LocalRun) -> None:
    trainer = start(run, 3)
    try:
        read_until(trainer, "finished")
        assert trainer.wait(timeout=20) == 0
        wait_until(lambda: nothing_left(run), timeout_s=3, what="the keeper's end")
    finally:
        end(trainer)


def test_after_a_kill_the_state_is_kept_for_the_lease_and_then_nothing_is_left(run: LocalRun) -> None:
    trainer = start(run, 1000, KEEPSTEP_KEEPER_LEASE_S="2")
    try:
        read_until(trainer, "step")
        keeper = run.keeper_pid()
    finally:
        end(trainer)
    time.sleep(1)
    assert alive(keeper), "the lease had not run out"
    assert run.status().keeper.lease_left_s is not None
    wait_until(lambda: nothing_left(run), timeout_s=6, what="the end of the lease")


def test_the_lease_does_not_run_while_the_launcher_lives(run: LocalRun) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, str(TRAINER), "1000"],
        env={**os.environ, **run.environ, "KEEPSTEP_KEEPER_LEASE_S": "1", "TORCHELASTIC_RUN_ID": "x"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        read_until(launcher, "step")
        (trainer,) = [rank.pid for rank in run.status().ranks]
        os.kill(trainer, signal.SIGKILL)
        wait_until(lambda: not run.status().ranks[0].alive, what="the trainer's death")
        time.sleep(2.5)
        status = run.status()
        assert status.keeper.launcher_alive
        assert status.keeper.lease_left_s is None
        assert status.step is not None
    finally:
        end(launcher)
    wait_until(lambda: nothing_left(run), timeout_s=6, what="the end of the lease after the launcher's death")


def test_release_frees_the_memory_of_a_dead_run(run: LocalRun) -> None:
    trainer = start(run, 1000, 64)
    try:
        read_until(trainer, "step")
    finally:
        end(trainer)
    wait_until(lambda: not run.status().ranks[0].alive, what="the trainer's death")
    before = psutil.virtual_memory().shared
    run.end()
    assert nothing_left(run)
    wait_until(lambda: psutil.virtual_memory().shared < before - (100 << 20), what="the memory")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_snapshots_leave_memory_flat_and_descriptors_constant(run: LocalRun) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    me = psutil.Process()
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}, run.config()) as snapshots:
        snapshots.restore()
        sizes, counts = [], []
        for step in range(1000):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            assert snapshots.take(step).wait(timeout_s=20) is keepstep.Survives.PROCESS
            if step % 100 == 99:
                keeper = psutil.Process(run.keeper_pid())
                sizes.append((me.memory_info().rss, keeper.memory_info().rss))
                counts.append((descriptors(), keeper.num_fds()))
    assert counts[1:] == counts[:-1], counts
    for series in zip(*sizes, strict=True):
        assert series[-1] - series[2] < 3 << 20, [size >> 10 for size in series]


def test_closing_and_opening_again_leaks_neither_descriptors_nor_threads(run: LocalRun) -> None:
    import threading

    state = {"plain": {"x": torch.zeros(1000)}}
    counts = []
    for life in range(6):
        snapshots = keepstep.Snapshotter(state, run.config())
        restored = snapshots.restore()
        assert (restored.step if restored else -1) == life - 1
        snapshots.take(life).wait(timeout_s=20)
        snapshots.close(finished=False)
        counts.append((descriptors(), threading.active_count()))
    assert counts[1] == counts[-1], counts
