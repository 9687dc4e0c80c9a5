"""KeeperLink with real keepers: which process of a node starts the next keeper, and how the others find it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from keepstep.config import Config
from keepstep.control.client import KeeperClient
from keepstep.control.messages import Done, LauncherHello, Register
from keepstep.control.spawn import start_keeper
from keepstep.identity import Identity
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.testing.run import LocalRun, wait_until
from keepstep.trainer.connection import keeper_link
from keepstep.trainer.connection.keeper_link import KeeperLink, RankState
from keepstep.types import Incarnation

NEVER_S = 1000.0


class CountingLink(KeeperLink):
    """Counts its attempts to connect."""

    num_dials = 0

    def _dial(self) -> KeeperClient:
        self.num_dials += 1
        return super()._dial()


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as local:
        yield local


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Identity]:
    """Grows with every keeper that a trainer of this process starts."""
    started: list[Identity] = []

    def start(identity: Identity, config: Config) -> None:
        started.append(identity)
        start_keeper(identity, config)

    monkeypatch.setattr(keeper_link, "start_keeper", start)
    return started


def make_link(run: LocalRun, *, launcher_pid: int, local_index: int = 0) -> CountingLink:
    register = Register(local_index, 2, local_index, 2, Incarnation(1, 7), "", launcher_pid, 1, 2, -1)
    return CountingLink(run.identity, run.config(), register, RankState(restored=True))


def connect(run: LocalRun, link: KeeperLink) -> None:
    """Connect under a launcher that greets the first keeper and no other one."""
    start_keeper(run.identity, run.config())
    launcher = KeeperClient(run.identity, "launcher")
    launcher.request(LauncherHello(os.getpid()), Done, timeout_s=20)
    link.connect()
    launcher.close()


def test_trainer_leaves_the_start_of_a_keeper_to_its_living_launcher(
    run: LocalRun, starts: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_link, "PATIENCE_S", NEVER_S)
    launcher = KeeperSupervisor(run.identity, run.config())
    launcher.status(timeout_s=20, patient=True)
    link = make_link(run, launcher_pid=os.getppid())
    link.connect()
    try:
        for _ in range(3):
            pid = run.kill_keeper()
            wait_until(lambda: link.up and run.keeper_pid() != pid, what="the next keeper")  # noqa: B023
        assert starts == []
    finally:
        link.close(finished=False)
        launcher.close()


def test_trainer_starts_a_keeper_at_once_when_its_launcher_is_dead(
    run: LocalRun, starts: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_link, "PATIENCE_S", NEVER_S)
    link = make_link(run, launcher_pid=os.getpid())  # not the parent of this process, as after the parent's death
    connect(run, link)
    try:
        pid = run.kill_keeper()
        wait_until(lambda: link.up and run.keeper_pid() != pid, what="the next keeper")
        assert len(starts) == 1
    finally:
        link.close(finished=False)


def test_trainer_that_waits_for_a_keeper_tries_at_even_intervals(
    run: LocalRun, starts: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses that doubled up to `LAST_RETRY_S` would allow 20 attempts in 20 s, and delay the rank by as long again."""
    monkeypatch.setattr(keeper_link, "PATIENCE_S", NEVER_S)
    monkeypatch.setattr(keeper_link, "FIRST_RETRY_S", 0.001)
    link = make_link(run, launcher_pid=0, local_index=1)
    connect(run, link)
    try:
        run.kill_keeper()
        wait_until(lambda: link.num_dials >= 60, what="60 attempts")
        assert starts == []
        start_keeper(run.identity, run.config())
        wait_until(lambda: link.up, what="the link to the next keeper")
    finally:
        link.close(finished=False)


class EndedMeanwhileLink(KeeperLink):
    """Its first keeper ends between the greeting and the registration."""

    last_trainer: KeeperLink | None = None

    def _dial(self) -> KeeperClient:
        client = super()._dial()
        if self.last_trainer is not None:
            last_trainer, self.last_trainer = self.last_trainer, None
            last_trainer.close(finished=True)
            wait_until(lambda: client.lost, what="the end of the keeper")
        return client


def test_keeper_of_the_run_before_ends_without_a_warning(run: LocalRun, caplog: pytest.LogCaptureFixture) -> None:
    """Snapshotters that follow each other quickly in one process: the next one meets the keeper that is ending."""
    register = Register(0, 1, 0, 1, None, "", 0, 1, 2, -1)
    first = KeeperLink(run.identity, run.config(), register, RankState())
    first.connect()
    pid = run.keeper_pid()
    second = EndedMeanwhileLink(run.identity, run.config(), register, RankState())
    second.last_trainer = first
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        second.connect()
    try:
        assert run.keeper_pid() != pid
        assert second.up
        assert second.ended == ""
        assert caplog.messages == []
    finally:
        second.close(finished=True)


def test_keeper_that_ends_under_a_trainer_is_a_warning(run: LocalRun, caplog: pytest.LogCaptureFixture) -> None:
    link = KeeperLink(run.identity, run.config(), Register(0, 1, 0, 1, None, "", 0, 1, 2, -1), RankState())
    link.connect()
    try:
        os.kill(run.keeper_pid(), signal.SIGTERM)
        wait_until(lambda: link.ended != "", what="the end of the keeper")
        assert "the run is unprotected" in caplog.text
    finally:
        link.close(finished=False)
