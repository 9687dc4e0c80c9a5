"""Restores that succeed, fail, repeat or are interrupted leave neither a map nor a descriptor of an arena behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import keepstep
from keepstep import faults
from keepstep.testing.run import LocalRun


def maps() -> int:
    """Of arenas, in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:keepstep-arena")


def descriptors() -> int:
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    found = 0
    try:
        for name in names:
            found += "keepstep-arena" in name
    except FileNotFoundError:  # the directory's own
        pass
    return found


def until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


@pytest.fixture
def run() -> Iterator[LocalRun]:
    gc.collect()  # of what tests before have left to it
    assert maps() == 0
    with LocalRun() as made:
        yield made


def life(run: LocalRun, step: int) -> tuple[keepstep.Restored | None, int]:
    """One process's life. Returns what was restored, and how many maps there were afterwards."""
    model = torch.nn.Linear(50, 50)
    snapshots = keepstep.Snapshotter({"model": model}, run.config())
    restored = snapshots.restore()
    num_maps = maps()
    with torch.no_grad():
        model.weight.fill_(step)
    assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
    snapshots.close(finished=False)
    return restored, num_maps


def test_each_life_keeps_one_map_and_leaves_nothing(run: LocalRun) -> None:
    assert life(run, 1)[0] is None
    assert until(lambda: maps() == 0)
    held = descriptors()
    for step in range(2, 7):
        restored, num_maps = life(run, step)
        assert restored is not None
        assert restored.step == step - 1
        assert num_maps == 1
        assert until(lambda: maps() == 0), "a map was left"
        assert until(lambda: descriptors() == held), "a descriptor was left"


def test_restoring_again_leaves_nothing(run: LocalRun) -> None:
    life(run, 1)
    before = descriptors()
    model = torch.nn.Linear(50, 50)
    snapshots = keepstep.Snapshotter({"model": model}, run.config())
    for _ in range(4):
        restored = snapshots.restore()
        assert restored is not None
        assert maps() == 1
    snapshots.close(finished=False)
    assert until(lambda: maps() == 0)
    assert until(lambda: descriptors() == before)


def test_a_restore_that_fails_leaves_nothing(run: LocalRun) -> None:
    life(run, 1)
    before = descriptors()
    snapshots = keepstep.Snapshotter({"model": torch.nn.Linear(51, 50)}, run.config())
    for _ in range(3):
        with pytest.raises(keepstep.RecoveryError, match="does not fit"):
            snapshots.restore()
    snapshots.close(finished=False)
    gc.collect()  # the errors hold on to what they were raised in
    assert until(lambda: maps() == 0)
    assert until(lambda: descriptors() == before)


def test_closing_while_memory_is_still_being_prepared_leaves_nothing(run: LocalRun) -> None:
    begun = threading.Event()

    def slowly(name: str) -> None:
        if name == "segment.populate":
            begun.set()
            time.sleep(0.3)

    before = descriptors()
    snapshots = keepstep.Snapshotter({"model": torch.nn.Linear(50, 50)}, run.config())
    faults.install(slowly)
    try:
        assert snapshots.take(0).skipped  # there was no restore(): memory is prepared behind the training
        assert begun.wait(5)
        snapshots.close(finished=False)
        assert until(lambda: maps() == 0)
        assert until(lambda: descriptors() == before)
    finally:
        faults.install(None)
