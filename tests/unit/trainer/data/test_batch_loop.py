"""Which batch comes next, and which step the last one has ended."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from keepstep import ConfigError, Loader
from keepstep.trainer.data.batch_loop import MAX_UNSTEPPED, BatchLoop, training_state


class Watch:
    """An optimizer that steps with every so many batches."""

    stepped = True


def loop_over(size: int, watch: Watch | None = None) -> BatchLoop:
    return BatchLoop(Loader(DataLoader(torch.arange(size))), watch or Watch(), 0)  # type: ignore[arg-type]


def run(loop: BatchLoop, epochs: int | None, steps: int | None = None) -> list[Any]:
    """Epochs of the batches, and the steps that were ended between them."""
    seen: list[Any] = []
    while True:
        step = loop.ended_step()
        if step is not None:
            seen.append(f"step {step}")
        following = loop.next_batch(epochs, steps)
        if following is None:
            return seen
        seen.append(following[0])


def test_each_batch_is_a_step_that_ends_when_the_next_is_asked_for() -> None:
    assert run(loop_over(2), epochs=2) == [0, "step 0", 0, "step 1", 1, "step 2", 1, "step 3"]


def test_steps_bound_the_loop_in_mid_epoch_and_another_call_goes_on() -> None:
    loop = loop_over(3)
    assert run(loop, epochs=None, steps=2) == [0, "step 0", 0, "step 1"]
    assert run(loop, epochs=2, steps=4) == [0, "step 2", 1, "step 3"]


def test_restored_end_of_an_epoch_is_gone_on_from_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader(DataLoader(torch.arange(1)))  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    assert run(BatchLoop(loader, Watch(), 1), epochs=2) == [1, "step 1"]  # type: ignore[arg-type]
    assert not caplog.messages


def test_batches_without_a_step_are_not_taken() -> None:
    watch = Watch()
    loop = loop_over(4, watch)
    watch.stepped = False
    loop.next_batch(1, None)
    assert loop.ended_step() is None
    loop.next_batch(1, None)
    watch.stepped = True
    assert loop.ended_step() == 0


def test_optimizer_that_never_steps_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    watch.stepped = False
    with caplog.at_level(logging.WARNING, "keepstep"):
        run(loop_over(MAX_UNSTEPPED + 5, watch), epochs=1)
    assert caplog.text.count("takes no snapshot") == 1


def test_loader_that_is_iterated_beside_the_loop_is_refused() -> None:
    loader = Loader(DataLoader(torch.arange(3)))  # type: ignore[arg-type]
    loop = BatchLoop(loader, Watch(), 0)
    loop.next_batch(1, None)
    list(loader)
    with pytest.raises(ConfigError, match="iterated beside"):
        loop.next_batch(1, None)


def test_loader_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives no batch"):
        run(BatchLoop(Loader(DataLoader([], sampler=[])), Watch(), 0), epochs=None)  # type: ignore[arg-type]


def test_loop_needs_a_loader() -> None:
    with pytest.raises(ConfigError, match="needs a loader"):
        BatchLoop(None, Watch(), 0)


def test_loader_is_found_in_the_state_or_made_from_the_argument() -> None:
    loader = Loader(DataLoader(torch.arange(3)))  # type: ignore[arg-type]
    assert training_state({"data": loader}, None)[1] is loader
    assert training_state({}, loader)[1] is loader
    assert isinstance(training_state({}, DataLoader(torch.arange(3)))[1], Loader)  # type: ignore[arg-type]
    assert training_state({}, None)[1] is None
    with pytest.raises(ConfigError, match="give it once"):
        training_state({"loader": loader}, loader)
