"""A loaded Loader goes on in the order, and with the samples, of samplers, datasets and collators of every make."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Sampler, Subset

from keepstep import Loader
from keepstep.trainer.state.loaders import loader_generators
from keepstep.trainer.state.rng import generator_state, set_generator

SIZE = 12


class OwnRng(Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class CountsPasses(Sampler[int]):
    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(np.random.RandomState(self.passes).permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class KeepsHistory(Sampler[int]):
    def __init__(self) -> None:
        self.seeds = [0]

    def __iter__(self) -> Iterator[int]:
        self.seeds = [*self.seeds, len(self.seeds)]
        return iter(np.random.RandomState(sum(self.seeds)).permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class HasState(KeepsHistory):
    def state_dict(self) -> dict[str, Any]:
        return {"seeds": self.seeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seeds = state["seeds"]


class GoesOnWithin(Sampler[int]):
    """As torchdata's samplers: loaded behind a whole pass, it gives nothing but the rest of it."""

    def __init__(self) -> None:
        self.given, self.skip = 0, 0
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.RandomState(self.passes).permutation(SIZE).tolist()[self.skip :]
        self.given, self.skip, self.passes = self.skip, 0, self.passes + 1
        for index in order:
            self.given += 1
            yield index

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


class Batches:
    """A batch sampler that is no Sampler."""

    def __init__(self) -> None:
        self.numbers = np.random.RandomState(7)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.numbers.permutation(SIZE).reshape(4, 3).tolist()

    def __len__(self) -> int:
        return 4


class Noise:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __call__(self, value: Any) -> Any:
        draw = self.source.random if isinstance(self.source, random.Random) else self.source.rand
        return value + draw()


class Noisy(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.transform(float(index))


class NoisyCollate(Noise):
    def __call__(self, samples: Any) -> Any:
        return super().__call__(torch.stack(samples))


def draws_from(sampler: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(torch.arange(SIZE), batch_size=3, sampler=sampler(), **options)  # type: ignore[arg-type]


def reads(dataset: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(dataset(), batch_size=3, shuffle=True, **options)


def noisy() -> Noisy:
    return Noisy(Noise(np.random.RandomState(0)))


CASES = {
    "sampler_with_random_source": draws_from(OwnRng),
    "sampler_that_counts": draws_from(CountsPasses),
    "sampler_that_counts_in_workers": draws_from(CountsPasses, num_workers=2, persistent_workers=True),
    "sampler_with_state": draws_from(HasState),
    "sampler_that_goes_on": draws_from(GoesOnWithin),
    "batch_sampler": lambda: DataLoader(torch.arange(SIZE), batch_sampler=Batches()),  # type: ignore[arg-type]
    "transform": reads(noisy),
    "transform_of_nested_datasets": reads(lambda: Subset(ConcatDataset([noisy()]), range(SIZE))),
    "transform_in_workers": reads(noisy, num_workers=2, persistent_workers=True),
    "collate": lambda: DataLoader(
        torch.arange(SIZE), batch_size=3, shuffle=True, collate_fn=NoisyCollate(random.Random(3))  # type: ignore[arg-type]
    ),
    "collate_in_workers": lambda: DataLoader(
        torch.arange(SIZE), batch_size=3, shuffle=True, num_workers=2,
        collate_fn=NoisyCollate(np.random.RandomState(3)),  # type: ignore[arg-type]
    ),
}  # fmt: skip


def epoch_of(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("given", [1, 4])
def test_loaded_loader_goes_on_with_what_the_first_one_gives(case: str, epoch: int, given: int) -> None:
    torch.manual_seed(0)
    loader = Loader(CASES[case]())
    for _ in range(epoch):
        epoch_of(loader)
    batches = iter(loader)
    for _ in range(given):
        next(batches)
    state, sources = (
        copy.deepcopy(loader.state_dict()),
        [generator_state(source) for source in loader_generators(loader)],
    )
    random_state = torch.get_rng_state()
    rest = [*epoch_of(batches), *epoch_of(loader)]

    other = Loader(CASES[case]())
    other.load_state_dict(state)

    def set_rng() -> None:
        torch.set_rng_state(random_state)
        for source, value in zip(loader_generators(other), sources, strict=True):
            set_generator(source, value)

    other.set_rng_at_resume(set_rng)
    assert [*epoch_of(other), *epoch_of(other)] == rest


def test_loader_that_was_saved_between_two_epochs_begins_the_second_one() -> None:
    loader = Loader(CASES["sampler_that_counts"]())
    epoch_of(loader)
    other = Loader(CASES["sampler_that_counts"]())
    other.load_state_dict(loader.state_dict())
    assert epoch_of(other) == epoch_of(loader)


def test_epoch_that_was_left_early_is_over_when_another_one_is_set() -> None:
    loader = Loader(CASES["sampler_that_counts"]())
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["resumes"]
    loader.set_epoch(1)
    state = loader.state_dict()
    assert not state["resumes"]
    other = Loader(CASES["sampler_that_counts"]())
    other.load_state_dict(copy.deepcopy(state))
    assert epoch_of(other) == epoch_of(loader)


def test_setting_that_nothing_changed_is_not_put_back() -> None:
    loader = Loader(draws_from(CountsPasses)())
    epoch_of(loader)
    sampler = CountsPasses()
    sampler.size = 5  # type: ignore[attr-defined]
    vars(loader.sampler)["size"] = 4
    Loader(draws_from(lambda: sampler)()).load_state_dict(Loader(loader._wrapped).state_dict())
    assert vars(sampler) == {"passes": 0, "size": 5}


def test_sampler_that_changes_more_than_numbers_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for sampler in (HasState, CountsPasses, OwnRng):
        loader = Loader(draws_from(sampler)())
        for _ in range(2):
            epoch_of(loader)
    assert not caplog.text
    loader = Loader(draws_from(KeepsHistory)())
    for _ in range(3):
        epoch_of(loader)
    assert caplog.text.count("the order of a KeepsHistory is restored from random states, set_epoch") == 1


def test_source_of_the_system_is_left_alone() -> None:
    assert not loader_generators(reads(lambda: Noisy(Noise(random.SystemRandom())))())


class Chunks(Sampler[int]):
    """Shuffles six at a time."""

    def __iter__(self) -> Iterator[int]:
        for start in range(0, SIZE, 6):
            yield from (start + torch.randperm(6)).tolist()

    def __len__(self) -> int:
        return SIZE


def test_sampler_that_draws_later_in_an_epoch_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    batches = iter(Loader(draws_from(Chunks)()))
    for _ in range(2):
        next(batches)
    assert not caplog.text
    for _ in range(2):
        epoch_of(batches)
    assert caplog.text.count("Chunks draws from the global random state in the middle of an epoch") == 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{"replacement": True, "num_samples": 96}, {"num_samples": 3 * SIZE}])
def test_sampler_is_named_where_others_draw_from_its_generator(
    options: dict[str, Any], num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    for is_shared in (False, True):
        generator = torch.Generator()
        sampler = RandomSampler(range(SIZE), generator=generator, **options)
        for _ in Loader(draws_from(lambda sampler=sampler: sampler, num_workers=num_workers)()):
            assert is_shared or not caplog.text
            if is_shared:
                torch.rand(1, generator=generator)
    assert caplog.text.count("RandomSampler draws from a generator that other code draws from too") == 1


def test_shared_generator_of_an_order_that_is_drawn_at_once_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator()
    for _ in Loader(DataLoader(torch.arange(SIZE), batch_size=5, shuffle=True, generator=generator)):  # type: ignore[arg-type]
        torch.rand(1, generator=generator)
    assert not caplog.text
