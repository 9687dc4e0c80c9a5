"""KeeperLink with real keepers: which process of a node starts the next keeper, and how the others find it."""

from __future__ import annotations

import os
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
    link.connect(link._listener)  # type: ignore[arg-type]
    launcher.close()


def test_trainer_leaves_the_start_of_a_keeper_to_its_living_launcher(
    run: LocalRun, starts: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_link, "PATIENCE_S", NEVER_S)
    launcher = KeeperSupervisor(run.identity, run.config())
    launcher.status(timeout_s=20, patient=True)
    link = make_link(run, launcher_pid=os.getppid())
    link.connect(link._listener)  # type: ignore[arg-type]
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
