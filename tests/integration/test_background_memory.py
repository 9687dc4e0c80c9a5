"""Memory is prepared behind the first steps: restore() does not wait for it, and snapshots begin when it is ready."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import keepstep
from keepstep import faults
from keepstep.config import ArenaConfig
from keepstep.control.messages import WantArena
from keepstep.keeper.node.effects import CreateArena
from keepstep.keeper.workers import memory_limits
from keepstep.keeper.workers.allocation import ArenaAllocator
from keepstep.layout import SnapshotSize
from keepstep.testing.run import LocalRun, wait_until
from keepstep.trainer.memory.rank_arena import PREPARING

pytestmark = pytest.mark.usefixtures("restore_returns_early")


@pytest.fixture
def run() -> Iterator[LocalRun]:
    gc.collect()
    with LocalRun() as made:
        yield made


class Training:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(50, 50)
        self.step = -1

    def take(self, snapshots: keepstep.Snapshotter) -> keepstep.PendingSnapshot:
        self.step += 1
        with torch.no_grad():
            self.model.weight.fill_(self.step)
        return snapshots.take(self.step)

    def take_until_complete(self, snapshots: keepstep.Snapshotter, timeout_s: float = 20) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.take(snapshots).wait(timeout_s=5) >= keepstep.Survives.PROCESS:
                return self.step
            time.sleep(0.01)
        raise AssertionError(f"no snapshot is complete after {timeout_s} s")


@contextmanager
def effects(plan: Callable[[str], None]) -> Iterator[None]:
    faults.install(plan)
    try:
        yield
    finally:
        faults.install(None)


class Gate:
    """Holds up the reservation of memory in this process until `open` is set."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name == "segment.reserve":
            self.reached.set()
            self.open.wait(20)


def maps_and_descriptors() -> tuple[int, int]:
    return Path("/proc/self/maps").read_text().count("memfd:keepstep-arena"), num_descriptors()


def num_descriptors() -> int:
    descriptors = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors += "keepstep-arena" in os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # that of the listing
            continue
    return descriptors


def test_restore_returns_before_the_memory_is_reserved_and_takes_are_skipped_until_then(
    run: LocalRun, caplog: pytest.LogCaptureFixture
) -> None:
    training, gate = Training(), Gate()
    with (
        caplog.at_level(logging.DEBUG, "keepstep"),
        effects(gate),
        keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots,
    ):
        assert snapshots.restore() is None
        assert gate.reached.wait(10)
        for _ in range(3):
            assert training.take(snapshots).reason == PREPARING
        time.sleep(0.6)  # two ticks of the keeper: it must not grant what this rank could not use
        assert training.take(snapshots).reason == PREPARING
        with run.arenas() as (arena,):
            assert arena.grant() is None
            assert arena.segment.allocated_bytes < arena.segment.size_bytes
        gate.open.set()
        training.take_until_complete(snapshots)
        with run.arenas() as (arena,):
            assert arena.segment.allocated_bytes >= arena.segment.size_bytes
    assert "memory for snapshots is ready" in caplog.text


def test_the_restored_version_is_kept_until_a_snapshot_of_the_new_life_is_complete(run: LocalRun) -> None:
    training = Training()
    with keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        snapshots.restore()
        saved = training.take_until_complete(snapshots)
        snapshots.close(finished=False)
    for _ in range(2):  # Each life ends before its memory is prepared.
        after = Training()
        snapshots = keepstep.Snapshotter({"model": after.model}, run.config())
        snapshots._memory._prepare = lambda view, stop: view.close()  # type: ignore[method-assign]
        restored = snapshots.restore()
        assert restored is not None
        assert restored.step == saved
        assert torch.equal(after.model.weight, torch.full_like(after.model.weight, saved))
        snapshots.close(finished=False)


def test_a_shortage_is_one_error_before_training(run: LocalRun) -> None:
    snapshots = keepstep.Snapshotter(
        {"model": torch.nn.Linear(400, 400)}, run.config(arena=ArenaConfig(memory_limit_bytes=500_000))
    )
    with pytest.raises(keepstep.KeeperError, match=r"2 slots\) needs .* can be had"):
        snapshots.restore()
    snapshots.close(finished=False)


def test_a_failure_in_the_background_is_logged_and_training_goes_on_until_memory_can_be_had(
    run: LocalRun, caplog: pytest.LogCaptureFixture
) -> None:
    training, failing, failures = Training(), True, 0

    def fail(name: str) -> None:
        nonlocal failures
        if failing and name == "segment.reserve":
            failures += 1
            raise OSError(errno.ENOSPC, "injected")

    with effects(fail), keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        snapshots.restore()
        wait_until(lambda: failures >= 3, what="the third attempt")
        assert training.take(snapshots).reason == PREPARING
        errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1, errors
        assert "bytes of shared memory were refused: injected" in errors[0]
        failing = False
        training.take_until_complete(snapshots)


def test_closing_during_the_preparation_ends_cleanly_and_leaves_nothing(run: LocalRun) -> None:
    before = maps_and_descriptors()
    training, gate = Training(), Gate()
    with effects(gate):
        snapshots = keepstep.Snapshotter({"model": training.model}, run.config())
        snapshots.restore()
        assert gate.reached.wait(10)
        threading.Timer(0.2, gate.open.set).start()
        snapshots.close(finished=False)
    assert not [thread for thread in threading.enumerate() if thread.name == "keepstep-memory"]
    wait_until(lambda: maps_and_descriptors() == before, what="the end of maps and descriptors")


def test_a_keeper_that_is_killed_during_the_preparation_is_replaced_and_snapshots_begin(run: LocalRun) -> None:
    training, gate = Training(), Gate()
    with effects(gate), keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        snapshots.restore()
        assert gate.reached.wait(10)
        run.kill_keeper()
        assert training.take(snapshots).reason == PREPARING
        wait_until(lambda: snapshots._link.up, what="a new keeper")
        assert training.take(snapshots).reason == PREPARING
        gate.open.set()
        training.take_until_complete(snapshots)


def test_a_child_forked_during_the_preparation_keeps_neither_map_nor_descriptor(run: LocalRun) -> None:
    """Data-loader workers start just then, and would hold the memory for as long as they live."""
    training, gate = Training(), Gate()
    with effects(gate), keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        snapshots.restore()
        assert gate.reached.wait(10)
        pid = os.fork()
        if pid == 0:
            os._exit(sum(maps_and_descriptors()))
        status = os.waitpid(pid, 0)[1]
        gate.open.set()
        training.take_until_complete(snapshots)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_shortage_without_restore_is_logged_once_and_not_asked_about_in_every_take(
    run: LocalRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, requests, shortages = Training(), 0, itertools.count(1)

    def refuse(*args: object, **kwargs: object) -> object:
        nonlocal requests
        requests += 1
        raise keepstep.KeeperError(f"3.4 MiB are needed, and 0.{next(shortages)} MiB can be had")

    with keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        with monkeypatch.context() as patched:
            patched.setattr(snapshots._link, "request", refuse)
            for _ in range(100):
                assert training.take(snapshots).skipped
                time.sleep(0.01)
        errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1, errors
        assert requests < 10
        training.take_until_complete(snapshots)


def test_a_rank_that_fails_to_report_leaks_no_descriptor(run: LocalRun) -> None:
    training = Training()
    with keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        with pytest.MonkeyPatch.context() as patched:
            attempts = 0

            def fail() -> None:
                nonlocal attempts
                attempts += 1
                raise keepstep.KeeperError("no answer")

            patched.setattr(snapshots._link, "ensure_loaded", fail)

            def third_attempt() -> bool:
                training.take(snapshots)
                return attempts >= 3

            wait_until(third_attempt, what="the third attempt")
        wait_until(lambda: num_descriptors() <= 1, what="one descriptor at most: the one held for the keeper")
        training.take_until_complete(snapshots)


def test_an_arena_that_a_new_keeper_refuses_is_replaced_although_that_fails_at_first(run: LocalRun) -> None:
    training, failures = Training(), 0
    with keepstep.Snapshotter({"model": training.model}, run.config()) as snapshots:
        snapshots.restore()
        training.take_until_complete(snapshots)
        request, view = snapshots._link.request, snapshots._memory.view
        assert view is not None

        def fail_twice(message: Any, expect: type[Any], *, timeout_s: float) -> Any:
            nonlocal failures
            if isinstance(message, WantArena) and failures < 2:
                failures += 1
                raise keepstep.KeeperError("injected")
            return request(message, expect, timeout_s=timeout_s)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(snapshots._link, "request", fail_twice)
            os.kill(run.keeper_pid(), signal.SIGSTOP)  # or it writes the header again
            view.arena.segment.write(0, b"damaged!")
            run.kill_keeper()
            wait_until(lambda: snapshots._link.up, what="a new keeper")
            training.take_until_complete(snapshots)
        assert failures == 2


def test_a_growth_that_failed_is_requested_again_with_the_same_size(run: LocalRun) -> None:
    asked: list[int] = []
    tensors = {"first": torch.zeros(1000)}
    with keepstep.Snapshotter(tensors, run.config()) as snapshots:
        snapshots.restore()
        wait_until(lambda: not snapshots._memory.busy, what="the memory")
        request = snapshots._link.request

        def fail_twice(message: Any, expect: type[Any], *, timeout_s: float) -> Any:
            if isinstance(message, WantArena):
                asked.append(message.need.payload_bytes)
                if len(asked) <= 2:
                    raise keepstep.KeeperError("injected")
            return request(message, expect, timeout_s=timeout_s)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(snapshots._link, "request", fail_twice)
            need = SnapshotSize(4096, 4096, 1 << 20)
            for count in (1, 2, 3):
                snapshots._memory.grow(need, before=lambda: None)
                wait_until(lambda: len(asked) == count and not snapshots._memory.busy, what="the attempt")  # noqa: B023
    assert asked == [1 << 20] * 3


def test_memory_that_is_promised_and_not_reserved_yet_counts_against_the_limits(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = memory_limits.MemoryLimits(memory_limits.RESERVE_BYTES + (300 << 20), None, 0)
    monkeypatch.setattr(memory_limits, "measure", lambda: limits)
    allocator = ArenaAllocator(run.identity, bytes(16))
    wanted = WantArena(SnapshotSize(4096, 4096, 100 << 20), 2, 0)
    first = allocator.create(CreateArena(1, wanted, 0, 1))
    assert not isinstance(first, Exception)
    second = allocator.create(CreateArena(1, wanted, 1, 1))
    assert isinstance(second, keepstep.KeeperError)
    assert "99." in str(second) or "100.0 MiB can be had" in str(second)
    first.close()  # what is closed is promised to nobody any more
    third = allocator.create(CreateArena(1, wanted, 1, 1))
    assert not isinstance(third, Exception)
    third.close()


def test_auto_takes_two_slots_where_three_exceed_the_limit_by_their_headers_only(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = memory_limits.MemoryLimits(10 << 30, None, 0)
    monkeypatch.setattr(memory_limits, "measure", lambda: limits)
    need = SnapshotSize(4096, 4096, 100 << 20)
    limit = 3 * (need.layout_bytes + need.values_bytes + need.payload_bytes)
    arena = ArenaAllocator(run.identity, bytes(16)).create(CreateArena(1, WantArena(need, 0, limit), 0, 1))
    assert not isinstance(arena, Exception)
    assert arena.num_slots == 2
    arena.close()


def test_an_arena_that_holds_nothing_makes_room_for_one_with_other_slots(run: LocalRun) -> None:
    """An error suggests KEEPSTEP_ARENA_SLOTS=2: what the node had promised before must not prevent that."""
    for slots in (4, 2):
        gate = Gate()
        with (
            effects(gate),
            keepstep.Snapshotter({"model": Training().model}, run.config(arena=ArenaConfig(slots=slots))) as snapshots,
        ):
            snapshots.restore()
            assert gate.reached.wait(10)
            with run.arenas() as arenas:
                assert [arena.num_slots for arena in arenas] == [slots]
            gate.open.set()
            snapshots.close(finished=False)
