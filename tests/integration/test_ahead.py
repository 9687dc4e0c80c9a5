"""A restart prepares the memory that it will be told to load before it is told, once, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import keepstep
from keepstep import faults
from keepstep.arena import memfd as segments
from keepstep.identity import Identity
from keepstep.testing.run import LocalRun
from keepstep.trainer import ahead as ahead_module
from keepstep.trainer.ahead import Ahead


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


def life(run: LocalRun, step: int) -> tuple[keepstep.Restored | None, int, int]:
    """Returns what was restored, how often an arena was mapped, and how many maps there were afterwards."""
    mapped = 0

    def count(name: str) -> None:
        nonlocal mapped
        mapped += name == "segment.map"

    model = torch.nn.Linear(50, 50)
    snapshots = keepstep.Snapshotter({"model": model}, run.config())
    faults.install(count)
    try:
        restored = snapshots.restore()
        there = maps()
    finally:
        faults.install(None)
    with torch.no_grad():
        model.weight.fill_(step)
    assert snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
    snapshots.close(finished=False)
    return restored, mapped, there


def test_an_arena_is_mapped_once_in_each_life_and_nothing_is_left(run: LocalRun) -> None:
    assert life(run, 1)[0] is None
    assert until(lambda: maps() == 0)
    held = descriptors()
    for step in range(2, 7):
        restored, mapped, there = life(run, step)
        assert restored is not None
        assert restored.step == step - 1
        assert (mapped, there) == (1, 1)
        assert until(lambda: maps() == 0), "a map was left"
        assert until(lambda: descriptors() == held), "a descriptor was left"


@pytest.fixture
def fds(run: LocalRun) -> Iterator[dict[str, int]]:
    """The node's memory after a life, as a trainer holds it."""
    life(run, 1)
    with run.arenas() as arenas:
        yield {arena.arena_id: arena.segment.fd for arena in arenas}


def test_what_is_not_wanted_is_closed(run: LocalRun, fds: dict[str, int]) -> None:
    before = descriptors()
    ahead = Ahead(lambda: nullcontext(fds), run.identity, 0)
    assert until(lambda: maps() == 1)
    assert ahead.take("another one") is None
    assert until(lambda: maps() == 0 and descriptors() == before)


def test_an_answer_that_comes_first_finds_nothing_and_leaves_nothing(run: LocalRun, fds: dict[str, int]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held() -> nullcontext[dict[str, int]]:
        begun.set()
        go_on.wait(5)
        return nullcontext(fds)

    before = descriptors()
    ahead = Ahead(held, run.identity, 0)
    assert begun.wait(5)
    assert ahead.take(next(iter(fds))) is None
    go_on.set()
    assert until(lambda: not ahead._thread.is_alive())
    assert (maps(), descriptors()) == (0, before)


def test_memory_of_others_is_left_alone(run: LocalRun, fds: dict[str, int]) -> None:
    read, write = os.pipe()
    os.close(write)
    try:
        other = Identity("another-run", run.identity.node_id, run.identity.runtime_dir, outlives_launch=True)
        for ahead in (
            Ahead(lambda: nullcontext({"pipe": read, "closed": 987654}), run.identity, 0),
            Ahead(lambda: nullcontext(fds), run.identity, 1),
            Ahead(lambda: nullcontext(fds), other, 0),
        ):
            time.sleep(0.05)
            assert maps() == 0
            assert ahead.take("") is None
            assert until(lambda ahead=ahead: not ahead._thread.is_alive())  # type: ignore[misc]
    finally:
        os.close(read)


def test_what_is_wanted_is_handed_over(run: LocalRun, fds: dict[str, int]) -> None:
    ahead = Ahead(lambda: nullcontext(fds), run.identity, 0)
    assert until(lambda: maps() == 1)
    (arena_id,) = fds
    view = ahead.take(arena_id)
    assert view is not None
    assert view.arena.arena_id == arena_id
    view.close()
    assert until(lambda: maps() == 0)


@pytest.mark.parametrize("to_devices", [False, True])
def test_where_bytes_go_to_devices_the_rest_of_the_pages_waits(
    run: LocalRun, fds: dict[str, int], monkeypatch: pytest.MonkeyPatch, to_devices: bool
) -> None:
    monkeypatch.setattr(ahead_module, "in_use", lambda: to_devices)
    monkeypatch.setattr(segments, "POPULATE_STEP", os.sysconf("SC_PAGESIZE"))
    begun, answered = threading.Event(), threading.Event()
    steps = 0

    def count(name: str) -> None:
        nonlocal steps
        if name == "segment.populate":
            begun.set()
            answered.wait(5)
            steps += 1

    faults.install(count)
    try:
        ahead = Ahead(lambda: nullcontext(fds), run.identity, 0)
        assert begun.wait(5)
        view = ahead.take(next(iter(fds)))
        assert view is not None
        answered.set()
        assert until(lambda: not ahead._thread.is_alive())
        pages = view.mapping.size_bytes // os.sysconf("SC_PAGESIZE")
        assert steps == (1 if to_devices else pages)
        view.mapping.populate(2)
        assert steps == pages
        view.close()
    finally:
        faults.install(None)


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
