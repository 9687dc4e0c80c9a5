"""A restore beside threads that never release the GIL: each of its thousands of small calls gives them one interval."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun
from keepstep.trainer.restore.restore import SWITCH_INTERVAL_S, short_switch_interval

PARAMETERS = 300


class IntervalProbe:
    """Records the switch interval while its state is loaded."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.interval_s = 0.0
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.interval_s = sys.getswitchinterval()
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


def make_state(probe: IntervalProbe) -> dict[str, Any]:
    model = torch.nn.ParameterList(torch.zeros(8, 8) for _ in range(PARAMETERS))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return {"first": IntervalProbe(), "model": model, "optimizer": optimizer, "probe": probe}


def save(run: LocalRun) -> dict[str, Any]:
    state = make_state(IntervalProbe())
    with keepstep.Snapshotter(state, run.config()) as snapshots:
        snapshots.restore()
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        assert snapshots.take(1).wait(timeout_s=10) >= keepstep.Survives.PROCESS
        snapshots.close(finished=False)
    return state


def test_a_busy_thread_does_not_hold_a_restore_up(run: LocalRun) -> None:
    saved, probe = save(run), IntervalProbe()
    before, state = sys.getswitchinterval(), make_state(probe)
    snapshots = keepstep.Snapshotter(state, run.config())
    with busy_thread():
        restored = snapshots.restore()
    snapshots.close(finished=False)
    assert restored is not None
    assert restored.step == 1
    for here, there in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        assert torch.equal(here, there)
    for seen in (state["first"], probe):  # from the first of the small calls to the last
        assert seen.interval_s == pytest.approx(SWITCH_INTERVAL_S, abs=2e-6)
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("microseconds", [*range(4_990, 5_010), 50, 249, 251, 19_999])
def test_the_users_switch_interval_does_not_drift(microseconds: int) -> None:
    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(microseconds * 1e-6 + 5e-7)
        before = sys.getswitchinterval()
        for _ in range(3):
            with short_switch_interval():
                assert sys.getswitchinterval() <= max(SWITCH_INTERVAL_S, 1e-6) + 2e-6
            assert sys.getswitchinterval() == before
    finally:
        sys.setswitchinterval(usual)


def test_the_switch_interval_is_put_back_when_a_restore_fails(run: LocalRun) -> None:
    save(run)
    before, probe = sys.getswitchinterval(), IntervalProbe(refuses=True)
    snapshots = keepstep.Snapshotter(make_state(probe), run.config())
    with pytest.raises(keepstep.RecoveryError, match="not this one"):
        snapshots.restore()
    snapshots.close(finished=False)
    assert probe.interval_s == pytest.approx(SWITCH_INTERVAL_S, abs=2e-6)
    assert sys.getswitchinterval() == before
