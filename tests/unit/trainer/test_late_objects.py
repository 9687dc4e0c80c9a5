"""Objects that a list or dict of the state gains after the Snapshotter was made are not left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import CaptureError, Snapshotter, Survives
from keepstep.testing.run import LocalRun
from keepstep.trainer.state.objects import StateObjects


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "appended to a list": (lambda: [adamw()], lambda held: held.append(adamw()), "parts.1"),
    "put into a dict": (lambda: {"a": adamw()}, lambda held: held.update(b=nn.Linear(2, 2)), "parts.b"),
    "replaced": (lambda: [adamw()], lambda held: held.__setitem__(0, adamw()), "parts.0"),
    "removed": (lambda: {"a": adamw(), "b": adamw()}, lambda held: held.pop("a"), "parts.a"),
    "in a tuple in a dict": (lambda: {"a": ([adamw()],)}, lambda held: held["a"][0].append(adamw()), "parts.a.0.1"),
    "in a dict beside objects": (
        lambda: {"model": nn.Linear(2, 2), "more": {}},
        lambda held: held["more"].update(ema=nn.Linear(2, 2)),
        "parts.more.ema",
    ),
    "the first one of a list": (list, lambda held: held.append(adamw()), "parts.0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_object_that_comes_late_is_named_by_take(
    local: LocalRun, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, alter, path = CHANGES[change]
    held = make()
    with Snapshotter({"model": nn.Linear(2, 2), "parts": held}) as snapshots:
        snapshots.restore()
        assert snapshots.take(1).wait(timeout_s=30) is Survives.PROCESS
        alter(held)
        for step in (2, 3):
            pending = snapshots.take(step)
            assert pending.wait(timeout_s=30) is not Survives.PROCESS
            assert pending.skipped
            assert f"{path} " in pending.reason
    assert len([text for text in caplog.messages if f"{path} " in text]) == 1


def test_values_beside_objects_may_change() -> None:
    state = {"parts": {"optimizer": adamw(), "progress": {"step": 1}, "seen": [1]}}
    objects = StateObjects(state)
    state["parts"]["progress"]["step"] = 2  # type: ignore[index]
    state["parts"]["seen"].append(2)  # type: ignore[union-attr]
    objects.check_members()
    state["parts"]["progress"] = {"step": 3}
    with pytest.raises(CaptureError, match=r"parts\.progress is not what it was"):
        objects.check_members()
