"""The Nth effect on the save path fails, for N = 1, 2, 3 ... until a run meets no failure.

Each time: training goes on (`take` never raises), the version that was complete before is intact,
and snapshots work again. In the trainer the effects are its system calls, messages and allocations;
in the keeper its reads, writes, allocations and messages (ordered through KEEPSTEP_TEST_FAULTS).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import keepstep
from keepstep import faults
from keepstep.testing.faults import fail_nth, out_of_memory
from keepstep.testing.run import LocalRun, wait_until

SIZES = (5, 20_000, 70_001, 300_007)
MOST = 400
"""more effects than any of these runs has: a bound, not an expectation"""
AGAIN_S = 20.0


def memory_error(name: str) -> BaseException:
    return MemoryError(f"injected at {name}")


def key_error(name: str) -> BaseException:
    return KeyError(f"injected at {name}")


class Training:
    """SGD with momentum 1 on a constant gradient: n(n+1)/2 after n steps, everywhere."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterList([torch.zeros(size) for size in SIZES])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=1.0)
        self.plain = {"n": 0, "tensors": [torch.zeros(9)]}
        self.state = {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}

    def step(self) -> int:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.plain["n"] += 1
        for tensor in self.plain["tensors"]:
            tensor.fill_(float(self.plain["n"]))
        return self.plain["n"] - 1

    def is_at(self, step: int) -> bool:
        n = step + 1
        value = float(n * (n + 1) // 2)
        tensors = all(torch.equal(p.detach(), torch.full_like(p, value)) for p in self.model.parameters())
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        moved = all(torch.equal(m, torch.full_like(m, -float(n))) for m in momenta)
        plain = all(torch.equal(t, torch.full_like(t, float(n))) for t in self.plain["tensors"])
        return tensors and moved and plain and self.plain["n"] == n


class Trial:
    """One training in this process, with faults on its way."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.training = Training()
        self.snapshots = self._open()
        self.snapshots.restore()

    def _open(self) -> keepstep.Snapshotter:
        return keepstep.Snapshotter(self.training.state, self.run.config())

    def take(self, *, wait_s: float = 2.0) -> bool:
        """One step and its snapshot; True when it is complete."""
        taken = self.snapshots.take(self.training.step())
        return taken.wait(timeout_s=wait_s) == keepstep.Survives.PROCESS

    def take_until_complete(self) -> int:
        """Snapshots work again. Returns the step of the first one."""
        deadline = time.monotonic() + AGAIN_S
        while not self.take(wait_s=1.0):
            assert time.monotonic() < deadline, f"no version is complete any more: {self.run.status()}"
            time.sleep(0.002)
        return self.training.plain["n"] - 1

    def check_intact(self, complete: int) -> None:
        """The version that was complete, or a newer one, is there, and every sealed byte is right."""
        status = self.run.status()
        assert status.step is not None
        assert status.step >= complete, status
        assert [result.problem for result in self.run.verify()] == [""] * len(self.run.verify())

    def come_back(self) -> None:
        """The trainer dies and is restored: exactly the newest complete version."""
        complete = self.run.status().step
        assert complete is not None
        self.snapshots.close(finished=False)
        self.training = Training()
        self.snapshots = self._open()
        restored = self.snapshots.restore()
        assert restored is not None
        assert restored.step >= complete
        assert self.training.is_at(restored.step)

    def close(self) -> None:
        self.snapshots.close(finished=False)


@pytest.fixture
def trial() -> Iterator[Trial]:
    with LocalRun() as run:
        made = Trial(run)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("make", [out_of_memory, memory_error, key_error])
def test_training_goes_on_when_the_nth_effect_of_the_trainer_fails(
    trial: Trial, make: Callable[[str], BaseException]
) -> None:
    met: Counter[str] = Counter()
    for nth in range(1, MOST):
        complete = trial.take_until_complete()
        with fail_nth(nth, make=make) as fault:
            for _ in range(3):
                trial.take(wait_s=0.5)
        trial.check_intact(complete)
        if not fault.met:
            break
        met[fault.met] += 1
        if nth % 10 == 0:
            trial.come_back()
    trial.take_until_complete()
    trial.come_back()
    print(f"{sum(met.values())} effects failed: {dict(met)}")
    assert not fault.met, "there is always one more effect"
    wanted = {"segment.read", "segment.write", "capture.copy", "capture.eager", "capture.queue", "send.Committed"}
    assert wanted <= set(met)


def test_the_keeper_is_found_again_when_any_message_on_the_way_back_fails(trial: Trial) -> None:
    for name in ("Hello", "GiveBack", "Register", "Held", "Committed"):
        for nth in (1, 2):
            complete = trial.take_until_complete()
            with fail_nth(nth, only=f"send.{name}") as fault:
                trial.run.kill_keeper()
                trial.take_until_complete()
                for _ in range(200):
                    if fault.passed:
                        break
                    trial.take(wait_s=0.1)  # Held comes a little later, Committed with a later snapshot
                    time.sleep(0.01)
                assert fault.passed, f"{name} was never sent"
                trial.take_until_complete()
            trial.check_intact(complete)
            if not fault.met:
                break
    trial.come_back()


@pytest.mark.parametrize(
    ("nth", "only"),
    [(1, "segment.map"), (1, "segment.populate"), (5, "segment."), (6, "segment."), (7, "segment."), (1, "send.Want")],
)
def test_a_larger_arena_is_had_in_the_end_when_an_effect_on_the_way_fails(trial: Trial, nth: int, only: str) -> None:
    """The keeper grants in the new arena from the moment it gave it: a trainer that does not get in is stuck."""
    complete = trial.take_until_complete()
    trial.training.plain["tensors"] = [torch.zeros(1 << 20)]
    with fail_nth(nth, only=only) as fault:
        trial.take(wait_s=0.2)
        wait_until(lambda: trial.take(wait_s=0.2) or fault.met, what="the fault")
    after = trial.take_until_complete()
    assert fault.met
    trial.check_intact(max(complete, after))


def test_a_keeper_killed_while_an_arena_grows_leaves_the_trainer_with_one_of_the_two(trial: Trial) -> None:
    size = 1 << 18
    for round_ in range(6):
        complete = trial.take_until_complete()
        size *= 2
        trial.training.plain["tensors"] = [torch.zeros(size)]
        trial.take(wait_s=0.0)
        time.sleep(0.004 * round_)
        trial.run.kill_keeper()
        after = trial.take_until_complete()
        trial.check_intact(max(complete, after))
    trial.take_until_complete()
    complete = trial.training.plain["n"] - 1
    trial.snapshots.close(finished=False)
    trial.training = Training()
    trial.training.plain["tensors"] = [torch.zeros(size)]
    trial.snapshots = trial._open()
    restored = trial.snapshots.restore()
    assert restored is not None
    assert restored.step >= complete
    assert trial.training.is_at(restored.step)


class Orders:
    """The file through which a keeper is told which of its effects fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def give(self, nth: int, only: str) -> None:
        self._path.with_suffix(".met").unlink(missing_ok=True)
        self._write(f"{nth} {only}")

    def withdraw(self) -> str:
        """Returns what was met."""
        self._write("")
        met = self._path.with_suffix(".met")
        return met.read_text().split()[1] if met.exists() else ""

    def _write(self, text: str) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._path)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    monkeypatch.setenv("KEEPSTEP_TEST_FAULTS", str(tmp_path / "orders"))
    return Orders(tmp_path / "orders")


@pytest.mark.parametrize(("only", "takes"), [("segment.write", 2), ("keeper.send", 4), ("segment.read", 1)])
def test_the_keeper_lives_and_protects_again_when_its_nth_effect_fails(orders: Orders, only: str, takes: int) -> None:
    faults.install(None)  # the order is for the keeper, not for this process
    with LocalRun() as run:
        trial = Trial(run)
        try:
            met, keeper = 0, run.keeper_pid()
            for nth in range(1, MOST):
                complete = trial.take_until_complete()
                orders.give(nth, only)
                for _ in range(takes):
                    trial.take(wait_s=0.5)
                found = orders.withdraw()
                trial.take_until_complete()
                trial.check_intact(complete)
                if not found:
                    break
                met += 1
                if nth % 10 == 0:
                    trial.come_back()
            trial.come_back()
            assert run.keeper_pid() == keeper, "the keeper died of a fault that it should have survived"
        finally:
            trial.close()
    print(f"{met} times {only} failed in the keeper")
    assert met >= 3


def test_memory_is_given_back_in_the_end_when_an_effect_of_the_new_keeper_fails(orders: Orders) -> None:
    """The keeper that takes over cannot read an arena at first: it must not be refused for that."""
    faults.install(None)
    with LocalRun() as run:
        trial = Trial(run)
        try:
            for nth, only in [(n, "segment.read") for n in (1, 2, 4, 8)] + [(1, "segment.write"), (1, "keeper.send")]:
                complete = trial.take_until_complete()
                orders.give(nth, only)
                run.kill_keeper()
                trial.take_until_complete()
                assert orders.withdraw() == only
                trial.check_intact(complete)
            trial.come_back()
        finally:
            trial.close()


def test_restoring_survives_faults_of_the_machine_and_none_counts_against_a_version(orders: Orders) -> None:
    """Reads that fail while slots are verified are tried again: only wrong bytes condemn a version."""
    faults.install(None)
    with LocalRun() as run:
        trial = Trial(run)
        try:
            for nth in range(1, 30, 3):
                trial.take_until_complete()
                complete = trial.take_until_complete()
                trial.snapshots.close(finished=False)
                trial.training = Training()
                orders.give(nth, "segment.")
                trial.snapshots = trial._open()
                restored = trial.snapshots.restore()
                orders.withdraw()
                assert restored is not None
                assert restored.step == complete, f"{restored} after fault {nth}"
                assert trial.training.is_at(complete)
        finally:
            trial.close()


def test_an_arena_that_cannot_be_made_is_an_error_before_the_first_step_and_not_a_hang(orders: Orders) -> None:
    faults.install(None)
    with LocalRun() as run:
        for nth, only in ((1, "segment.create"), (1, "segment.write")):
            training = Training()
            snapshots = keepstep.Snapshotter(training.state, run.config())
            try:
                orders.give(nth, only)
                with pytest.raises(keepstep.KeeperError):
                    snapshots.restore()
                assert orders.withdraw() == only
            finally:
                snapshots.close(finished=False)
            wait_until(lambda: run.status().memory_bytes == 0, what="no arena to be left")
