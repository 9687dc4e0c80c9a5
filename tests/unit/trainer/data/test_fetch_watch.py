"""A loop that fetches ahead of take is warned about, once, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from keepstep import Loader
from keepstep.trainer.data.fetch_watch import FetchWatch


class Loop:
    """Steps of a training, with whatever else a program does."""

    def __init__(self, *, with_loader: bool = False) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        self.optimizer = torch.optim.SGD([weight], lr=0.1)
        self.loader = Loader(DataLoader(torch.arange(100)))  # type: ignore[arg-type]
        self.watch = FetchWatch([self.optimizer], [self.loader] if with_loader else [])

    def run(self, before: Callable[[], object], behind: Callable[[], object], steps: int = 6) -> None:
        for _ in range(steps):
            before()
            self.optimizer.step()
            behind()
            self.watch.check()
        self.watch.close()


def nothing() -> None: ...


def draw() -> None:
    torch.randn(2)


def test_draw_behind_each_step_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    Loop().run(nothing, draw)
    assert caplog.text.count("random numbers were drawn between optimizer.step() and take()") == 1


def test_draws_before_the_step_are_as_they_should_be(caplog: pytest.LogCaptureFixture) -> None:
    Loop().run(draw, nothing)
    assert not caplog.text


def test_draw_behind_one_of_the_first_steps_is_an_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    steps = iter([draw, nothing, nothing, nothing, nothing, nothing])
    Loop().run(nothing, lambda: next(steps)())
    assert not caplog.text


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1])
def test_loader_that_gave_the_next_batch_before_take_is_ahead(
    accumulated: int, ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(with_loader=True)
    batches: Iterator[torch.Tensor] = iter(loop.loader)
    for _ in range(ahead):
        next(batches)

    def fetch() -> None:
        for _ in range(accumulated):
            next(batches)

    loop.run(fetch, nothing)
    assert ("the loader is ahead of take()" in caplog.text) == bool(ahead)


def test_loader_that_is_asked_behind_each_step_is_ahead(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(with_loader=True)
    batches = iter(loop.loader)
    loop.run(nothing, lambda: next(batches))
    assert caplog.text.count("the loader is ahead of take()") == 1
