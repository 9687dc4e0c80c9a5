"""A restore beside threads that never wait: it makes thousands of small calls, and each gives them a turn."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun
from keepstep.trainer.restore.short_turns import TURN_S, short_turns

PARAMETERS = 300


class Sees:
    """How long a turn is while its state is loaded."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.turn_s = 0.0
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn_s = sys.getswitchinterval()
        if self.refuses:
            raise ValueError("not this one")


@contextmanager
def busy_thread() -> Iterator[None]:
    over = False

    def work() -> None:
        while not over:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as made:
        yield made


def make_state(sees: Sees) -> dict[str, Any]:
    model = torch.nn.ParameterList(torch.zeros(8, 8) for _ in range(PARAMETERS))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return {"first": Sees(), "model": model, "optimizer": optimizer, "sees": sees}


def save(run: LocalRun) -> dict[str, Any]:
    state = make_state(Sees())
    with keepstep.Snapshotter(state, run.config()) as snapshots:
        snapshots.restore()
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        assert snapshots.take(1).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        snapshots.close(finished=False)
    return state


def test_a_busy_thread_does_not_hold_a_restore_up(run: LocalRun) -> None:
    saved, sees = save(run), Sees()
    before, state = sys.getswitchinterval(), make_state(sees)
    snapshots = keepstep.Snapshotter(state, run.config())
    with busy_thread():
        restored = snapshots.restore()
    snapshots.close(finished=False)
    assert restored is not None
    assert restored.step == 1
    for here, there in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        assert torch.equal(here, there)
    for seen in (state["first"], sees):  # from the first of the small calls to the last
        assert seen.turn_s == pytest.approx(TURN_S, abs=2e-6)
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("first_out", [0, 1])
def test_the_last_of_several_puts_back_what_the_user_has_set(first_out: int) -> None:
    before = sys.getswitchinterval()
    both = [short_turns(), short_turns()]
    for one in both:
        one.__enter__()
    both[first_out].__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(TURN_S, abs=2e-6)
    both[1 - first_out].__exit__(None, None, None)
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("microseconds", [*range(4_990, 5_010), 50, 249, 251, 19_999])
def test_what_the_user_has_set_does_not_drift(microseconds: int) -> None:
    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(microseconds * 1e-6 + 5e-7)
        before = sys.getswitchinterval()
        for _ in range(3):
            with short_turns():
                assert sys.getswitchinterval() <= max(TURN_S, 1e-6) + 2e-6
            assert sys.getswitchinterval() == before
    finally:
        sys.setswitchinterval(usual)


def test_a_worker_that_is_forked_meanwhile_has_turns_of_the_usual_length() -> None:
    usual = sys.getswitchinterval()
    with short_turns():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == usual else 1)
        _, status = os.waitpid(child, 0)
        assert sys.getswitchinterval() < usual
    assert os.waitstatus_to_exitcode(status) == 0


def test_turns_are_as_long_as_before_when_a_restore_has_failed(run: LocalRun) -> None:
    save(run)
    before, sees = sys.getswitchinterval(), Sees(refuses=True)
    snapshots = keepstep.Snapshotter(make_state(sees), run.config())
    with pytest.raises(keepstep.RecoveryError, match="not this one"):
        snapshots.restore()
    snapshots.close(finished=False)
    assert sees.turn_s == pytest.approx(TURN_S, abs=2e-6)
    assert sys.getswitchinterval() == before
