"""The wait of `take` while a device works, with a device and a clock that only count."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.arena.records import Grant, Progress
from keepstep.trainer.capture.grants import PAUSE_S, GrantReader, Skip, SlotGrant, TakeStatistics, TakeWait
from keepstep.types import COPYING, LATER_STEP, NO_GRANT, NO_KEEPER, NO_MEMORY, SEALING, Incarnation, TakeCounts

LIFE = Incarnation(1, 2)


class Device:
    """Works until `idle_at_s` of its clock, which only sleeping moves."""

    def __init__(self, idle_at_s: float) -> None:
        self.now_s, self.idle_at_s = 0.0, idle_at_s
        self.sleeps: list[float] = []
        self.num_marks = 0

    def queued_work(self) -> Device:
        self.num_marks += 1
        return self

    def is_pending(self) -> bool:
        return self.now_s < self.idle_at_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds

    def wait(self, limit_s: float = 2.0) -> TakeWait:
        return TakeWait(limit_s, self.queued_work, clock=lambda: self.now_s, sleep=self.sleep)


class Keeper:
    """A link and an arena whose grant record changes at given times of the device's clock."""

    def __init__(self, device: Device, *records: tuple[float, Grant | None], dead_at_s: float = 1e9) -> None:
        self.device, self.records, self.dead_at_s = device, records, dead_at_s
        self.incarnation, self.ended, self.busy = LIFE, "", False
        self.view = SimpleNamespace(arena=SimpleNamespace(grant=self.grant, arena_id="a"))

    @property
    def up(self) -> bool:
        return self.device.now_s < self.dead_at_s

    def grant(self) -> Grant | None:
        return [record for at_s, record in self.records if at_s <= self.device.now_s][-1]

    def reader(self) -> GrantReader:
        anything: Any = self
        reader = GrantReader(anything, anything)
        reader.use(SlotGrant(anything.view, 0, 1))
        return reader


def grant_at(step: int, *, serial: int) -> Grant:
    return Grant(LIFE, step, serial, 0)


def test_loop_in_step_with_its_device_never_sleeps() -> None:
    device = Device(idle_at_s=0.0)
    wait = device.wait()
    assert not wait.pause()
    assert not wait.pause()
    assert not device.sleeps
    assert wait.waited_s == 0
    assert device.num_marks == 1


def test_wait_that_is_turned_off_records_no_event() -> None:
    device = Device(idle_at_s=1.0)
    assert not device.wait(limit_s=0).pause()
    assert not device.num_marks


def test_wait_ends_with_one_more_look_when_the_device_becomes_idle() -> None:
    device = Device(idle_at_s=0.0105)
    wait, num_looks = device.wait(), 0
    while wait.pause():
        num_looks += 1
    assert len(device.sleeps) == 11
    assert num_looks == 12
    assert set(device.sleeps) == {PAUSE_S}
    assert wait.waited_s == pytest.approx(0.011)


def test_wait_keeps_its_limit_while_the_device_never_ends() -> None:
    device = Device(idle_at_s=1e9)
    wait = device.wait(limit_s=0.5)
    while wait.pause():
        pass
    assert device.now_s == pytest.approx(0.5, abs=2 * PAUSE_S)
    assert not wait.pause(), "the limit holds for the whole take"
    assert device.num_marks == 1


def test_take_gets_the_grant_that_is_written_while_it_waits() -> None:
    device = Device(idle_at_s=1.0)
    used, new = grant_at(0, serial=1), grant_at(5, serial=2)
    grant = Keeper(device, (0, used), (0.2, new)).reader().wait(5, device.wait())
    assert isinstance(grant, SlotGrant)
    assert grant.serial == new.serial
    assert device.now_s == pytest.approx(0.2, abs=2 * PAUSE_S)


def test_grant_that_is_written_as_the_device_becomes_idle_is_used() -> None:
    device = Device(idle_at_s=0.01)
    keeper = Keeper(device, (0, grant_at(0, serial=1)), (0.01, grant_at(5, serial=2)))
    assert isinstance(keeper.reader().wait(5, device.wait()), SlotGrant)


def test_idle_device_ends_the_wait_with_the_reason() -> None:
    device = Device(idle_at_s=0.1)
    skip = Keeper(device, (0, grant_at(0, serial=1))).reader().wait(5, device.wait())
    assert isinstance(skip, Skip)
    assert skip.kind == SEALING
    assert device.now_s == pytest.approx(0.1, abs=2 * PAUSE_S)


def test_grant_for_a_later_step_ends_the_wait() -> None:
    device = Device(idle_at_s=1.0)
    keeper = Keeper(device, (0, grant_at(0, serial=1)), (0.1, grant_at(6, serial=2)))
    skip = keeper.reader().wait(5, device.wait())
    assert isinstance(skip, Skip)
    assert skip.kind == LATER_STEP
    assert device.now_s < 0.2


def test_death_of_the_keeper_ends_the_wait() -> None:
    device = Device(idle_at_s=1.0)
    skip = Keeper(device, (0, grant_at(0, serial=1)), dead_at_s=0.1).reader().wait(5, device.wait())
    assert isinstance(skip, Skip)
    assert skip.kind == NO_KEEPER
    assert device.now_s < 0.2


def test_counts_go_through_the_progress_record_unchanged() -> None:
    statistics = TakeStatistics()
    for skipped, waited_s in (("", 0.0), ("", 0.25), (SEALING, 0.5), (COPYING, 0.0)):
        statistics.count(skipped, waited_s)
    counts = Progress.parse(Progress(LIFE, 3, 1, 2, statistics.counts).body()).takes
    assert counts == statistics.counts
    assert (counts.asked, counts.waited, counts.waited_us, counts.skipped[:2]) == (4, 2, 750_000, (1, 1))
    assert Progress.parse(Progress(LIFE, 3).body().ljust(232, b"\0")).takes == TakeCounts()


def test_more_than_one_skip_in_ten_is_logged_once_with_the_most_frequent_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    statistics = TakeStatistics()
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        for kind in (SEALING, COPYING, SEALING, *[""] * 15):
            statistics.count(kind, 0.0)
        assert not caplog.records, "18 takes say little"
        for kind in (SEALING, SEALING, SEALING, SEALING):
            statistics.count(kind, 0.0)
    (record,) = caplog.records
    assert "5 of 20 takes were skipped" in record.getMessage()
    assert "sealing" in record.getMessage()
    assert "arena.slots" in record.getMessage()


def test_takes_before_the_memory_is_ready_are_not_held_against_the_run(caplog: pytest.LogCaptureFixture) -> None:
    statistics = TakeStatistics()
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        for kind in (*[NO_MEMORY] * 50, SEALING, *[""] * 30):
            statistics.count(kind, 0.0)
    assert not caplog.records


def test_takes_without_a_grant_are_reported_only_when_the_start_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """Until then other ranks prepare their memory: a warning would be wrong, and no later one would be logged."""
    now_s = 0.0
    statistics = TakeStatistics(clock=lambda: now_s)
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        for _ in range(50):
            now_s += 1.0
            statistics.count(NO_GRANT, 0.0)
        assert not caplog.records
        for _ in range(50):
            now_s += 1.0
            statistics.count(NO_GRANT, 0.0)
    (record,) = caplog.records
    assert "no_grant" in record.getMessage()


def test_one_skip_in_ten_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    statistics = TakeStatistics()
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        for number in range(200):
            statistics.count(SEALING if number % 10 == 9 else "", 0.0)
    assert not caplog.records
