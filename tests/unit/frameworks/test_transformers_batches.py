"""The batches of an accelerate loader after a restart in mid-epoch, beside those of a loader that went on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from keepstep import ConfigError
from keepstep.frameworks.transformers_batches import BatchOrder
from keepstep.trainer.state.rng import GlobalEncoder, GlobalState, decode_globals, set_rng_state

accelerate = pytest.importorskip("accelerate")
from accelerate.data_loader import prepare_data_loader, skip_first_batches  # noqa: E402

SIZE, BATCH = 22, 4
BATCHES = 6


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from all random generators where a sample is loaded."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) / 8 + random.random() / 8 + float(np.random.random()) / 8


class Countdown(Sampler[list[int]]):
    """A sampler of batches that is no BatchSampler."""

    batch_size = BATCH

    def __iter__(self) -> Iterator[list[int]]:
        yield from (list(range(first, min(first + BATCH, SIZE))) for first in range(0, SIZE, BATCH))

    def __len__(self) -> int:
        return BATCHES


class Training:
    """A loop that draws in each step, as dropout does."""

    def __init__(self, **options: Any) -> None:
        seedable = options.pop("seedable", True)
        options = options or {"batch_size": BATCH, "shuffle": True}
        torch.manual_seed(1)
        self.loader = prepare_data_loader(DataLoader(Noisy(), **options), use_seedable_sampler=seedable)
        self.order = BatchOrder(self.loader)
        self.seen: list[float] = []

    def epochs(self, number: int) -> Iterator[int]:
        """Stops after each step, where a snapshot would be taken."""
        for epoch in range(number):
            self.order.begin_epoch()
            self.loader.set_epoch(epoch)
            yield from self.steps(self.loader, 0)
            self.order.end_epoch()

    def steps(self, loader: Any, num_used: int) -> Iterator[int]:
        for used, batch in enumerate(loader, num_used + 1):
            self.order.finish_resume()
            self.seen += [batch.sum().item(), torch.rand(()).item(), random.random()]
            yield used

    def resume(self, epoch: int, num_used: int, saved: dict[str, Any], rng: dict[str, bytes]) -> Iterator[int]:
        self.order.load_state_dict(saved)
        self.order.resume_epoch(num_used, lambda: set_rng_state(decode_globals(rng)))
        self.loader.set_epoch(epoch)
        yield from self.steps(skip_first_batches(self.loader, num_used), num_used)


@pytest.mark.parametrize("num_steps", [1, 3, 5, BATCHES + 1, 2 * BATCHES - 1])
@pytest.mark.parametrize("seedable", [True, False])
def test_a_resumed_epoch_has_the_batches_and_draws_of_the_one_that_went_on(num_steps: int, seedable: bool) -> None:
    training = Training(seedable=seedable, batch_size=BATCH, shuffle=True)
    steps = training.epochs(2)
    used = [next(steps) for _ in range(num_steps)][-1]
    saved, rng = training.order.state_dict(used), GlobalEncoder().encode(GlobalState.now())
    before = len(training.seen)
    epoch = (num_steps - 1) // BATCHES
    rest = BATCHES - used
    for _ in range(rest):
        next(steps)
    other = Training(seedable=seedable, batch_size=BATCH, shuffle=True)
    torch.manual_seed(99)
    random.seed(99)
    assert len(list(other.resume(epoch, used, saved, rng))) == rest
    assert other.seen == training.seen[before:]


def test_a_loader_of_workers_continues_its_order_and_the_draws_of_the_loop() -> None:
    options = {"batch_size": BATCH, "shuffle": True, "num_workers": 1, "collate_fn": torch.stack}
    training = Training(seedable=False, **options)
    training.loader.base_dataloader.worker_init_fn = None
    steps = training.epochs(1)
    used = [next(steps) for _ in range(2)][-1]
    saved, rng = training.order.state_dict(used), GlobalEncoder().encode(GlobalState.now())
    before = len(training.seen)
    list(steps)
    other = Training(seedable=False, **options)
    torch.manual_seed(99)
    list(other.resume(0, used, saved, rng))
    draws = slice(1, None, 3)
    assert other.seen[draws] == training.seen[before:][draws]
    assert [int(total) for total in other.seen[::3]] == pytest.approx(
        [int(total) for total in training.seen[before:][::3]], abs=3
    )


def test_what_was_fetched_ahead_is_kept_and_nothing_else() -> None:
    training = Training()
    steps = training.epochs(1)
    assert [list(training.order.state_dict(next(steps))["ahead"]) for _ in range(3)] == [[1], [2], [3]]
    list(steps)
    assert training.order.state_dict(0)["ahead"] == {}


def test_the_sampler_stays_what_it_was() -> None:
    loader = prepare_data_loader(DataLoader(Noisy(), batch_size=BATCH, shuffle=True))
    sampler = loader.batch_sampler
    first = BatchOrder(loader)
    assert loader.batch_sampler is sampler
    assert isinstance(sampler, BatchSampler)
    assert type(sampler).__name__ == "BatchSampler"
    assert len(sampler) == BATCHES
    assert isinstance(sampler.sampler, RandomSampler)
    second = BatchOrder(loader)
    second.begin_epoch()
    list(loader)
    assert (len(first.state_dict()["ahead"]), len(second.state_dict()["ahead"])) == (0, BATCHES)


def test_any_sampler_of_batches_is_followed() -> None:
    training = Training(batch_sampler=Countdown())
    assert len(list(training.epochs(1))) == BATCHES
    assert type(training.loader.batch_sampler).__name__ == "Countdown"


def test_iterable_datasets_are_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(9)

    with pytest.raises(ConfigError, match="Endless is an iterable dataset"):
        BatchOrder(prepare_data_loader(DataLoader(Endless(), batch_size=2)))
