"""A Loader gives the batches of the loader inside, goes on after a restore, and refuses what it cannot resume."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep import ConfigError, Loader, RecoveryError

SIZE = 10


def numbers(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(SIZE), batch_size=3, shuffle=True, **options)  # type: ignore[arg-type]


def test_loader_is_a_data_loader_with_the_attributes_of_the_one_inside() -> None:
    inside = numbers()
    loader = Loader(inside)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.dataset, loader.batch_size) == (4, inside.dataset, 3)
    assert loader.batch_sampler is inside.batch_sampler
    assert loader.multiprocessing_context is None
    with pytest.raises(AttributeError, match="colour"):
        loader.colour  # noqa: B018


def test_loader_draws_exactly_what_the_one_inside_draws() -> None:
    for workers in (0, 2):
        torch.manual_seed(5)
        plain = [batch.tolist() for _ in range(2) for batch in numbers(num_workers=workers)]
        after = torch.get_rng_state()
        torch.manual_seed(5)
        loader = Loader(numbers(num_workers=workers))
        seen = []
        for _ in range(2):
            for batch in loader:
                loader.state_dict()
                seen.append(batch.tolist())
        assert seen == plain
        assert torch.equal(torch.get_rng_state(), after)


def resumed_after(num_batches: int, loader: Loader) -> tuple[list[Any], list[Any]]:
    """The rest of an epoch, and what a new loader gives that is loaded at this point."""
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    other = Loader(numbers())
    other.load_state_dict(state)
    before = torch.get_rng_state()
    resumed = [batch.tolist() for batch in other]
    assert torch.equal(torch.get_rng_state(), before), "what was drawn to skip must not show"
    return rest, resumed


@pytest.mark.parametrize("num_batches", range(1, 5))
def test_loaded_loader_goes_on_after_the_batch_that_was_given_last(num_batches: int) -> None:
    rest, resumed = resumed_after(num_batches, Loader(numbers()))
    assert resumed == rest
    assert len(rest) == 4 - num_batches


def test_skipped_batches_are_not_loaded() -> None:
    class Counting(torch.utils.data.Dataset[int]):
        loaded = 0

        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> int:
            Counting.loaded += 1
            return index

    first = Loader(DataLoader(Counting(), batch_size=2))
    batches = iter(first)
    for _ in range(4):
        next(batches)
    state = first.state_dict()
    Counting.loaded = 0
    second = Loader(DataLoader(Counting(), batch_size=2))
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == [[8, 9]]
    assert Counting.loaded == 2


def test_draws_between_iterator_and_first_batch_are_made_again() -> None:
    loader = Loader(numbers())
    batches = iter(loader)
    torch.randn(3)
    first = next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    other = Loader(numbers())
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest
    assert first.tolist() not in rest


def test_second_epoch_of_a_loaded_loader_is_a_new_one() -> None:
    loader = Loader(numbers())
    batches = iter(loader)
    next(batches)
    other = Loader(numbers())
    other.load_state_dict(loader.state_dict())
    assert [len(list(other)), len(list(other))] == [3, 4]


def test_iterator_that_was_dropped_is_no_position() -> None:
    loader = Loader(numbers())
    next(iter(loader))
    assert not loader.state_dict()["resumes"]


def test_peek_into_a_resumed_loader_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader(numbers())
    batches = iter(loader)
    next(batches)
    other = Loader(numbers())
    other.load_state_dict(loader.state_dict())
    next(iter(other))
    with caplog.at_level(logging.WARNING, "keepstep"):
        list(other)
    assert "dropped after one batch" in caplog.text


def test_sampler_that_draws_for_each_batch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Drawing:
        def __iter__(self) -> Iterator[int]:
            for _ in range(SIZE):
                yield int(torch.randint(SIZE, ()))

        def __len__(self) -> int:
            return SIZE

    with caplog.at_level(logging.WARNING, "keepstep"):
        list(Loader(numbers()))
        assert not caplog.text
        list(Loader(DataLoader(torch.arange(SIZE), batch_size=None, sampler=Drawing())))  # type: ignore[arg-type]
    assert "Drawing draws from the global random state in the middle of an epoch" in caplog.text


def test_loader_with_less_data_than_it_was_saved_with_is_refused() -> None:
    loader = Loader(numbers())
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    smaller = Loader(DataLoader(torch.arange(4), batch_size=3))  # type: ignore[arg-type]
    smaller.load_state_dict(loader.state_dict())
    with pytest.raises(RecoveryError, match="had given 3 batches of this epoch and has only 2 now"):
        list(smaller)


def test_loader_of_another_kind_is_refused() -> None:
    with pytest.raises(RecoveryError, match="'function' now and was saved as 'replay'"):
        Loader(lambda: 0).load_state_dict(Loader(numbers()).state_dict())


class Forgetful(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def forever() -> Iterator[int]:
    while True:
        yield from range(SIZE)


GLOBAL_NUMBERS = forever()


def reads_closure() -> Any:
    numbers = forever()
    return lambda: next(numbers)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (reads_closure, "cannot resume a generator, which this function reads"),
        (lambda: lambda: next(GLOBAL_NUMBERS), "cannot resume a generator"),
        (lambda: iter([1, 2]).__next__, "cannot resume a list_iterator"),
        (lambda: functools.partial(next, forever()), "cannot resume a generator"),
        (lambda: DataLoader(Forgetful()), "position of a Forgetful without state_dict"),
        (lambda: DataLoader(Forgetful(), num_workers=2), "position of a Forgetful in 2 workers"),
        (lambda: OwnWay(torch.arange(3)), "cannot resume a OwnWay, which iterates in its own way"),
        (lambda: [1, 2, 3], "cannot resume a list"),
        (lambda: Loader(numbers()), "is a keepstep.Loader already"),
        (lambda: lambda first, second: 0, "takes the number of the batch, or nothing"),
    ],
)
def test_what_cannot_be_resumed_is_refused(loader: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Loader(loader())


def test_function_is_called_for_each_batch_and_counts_where_it_wants_to() -> None:
    loader = Loader(lambda number: number * 10)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 10]
    other = Loader(lambda number: number * 10)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other)) == 20


def restored_at_end_of_epoch(epoch: int | None, num_batches: int = 4) -> Loader:
    """A loader that was restored; its snapshot was taken with the last batch of the epoch, or before."""
    loader = Loader(numbers())
    if epoch is not None:
        loader.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    other = Loader(numbers())
    other.load_state_dict(loader.state_dict())
    return other


def test_first_iterator_without_a_batch_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = restored_at_end_of_epoch(None)
    empty = iter(loader)
    assert not caplog.messages
    assert [list(empty), list(empty)] == [[], []]
    assert caplog.messages == [
        "the restored snapshot was the last of its epoch: this iterator gives no batch; begin the loop at epoch "
        "restored.step // len(loader)"
    ]
    assert caplog.records[0].levelname == "WARNING"
    assert len(list(loader)) == 4
    assert len(caplog.messages) == 1


def test_epoch_is_named_where_the_program_sets_another_one(caplog: pytest.LogCaptureFixture) -> None:
    loader = restored_at_end_of_epoch(2)
    loader.set_epoch(3)
    assert list(loader) == []
    assert caplog.messages == [
        "the restored snapshot was the last of epoch 2: this iterator gives no batch; begin the loop at epoch 2 "
        "(restored.step // len(loader))"
    ]


def test_loop_that_begins_at_the_right_epoch_or_goes_on_within_one_is_not_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = restored_at_end_of_epoch(2)
    loader.set_epoch(2)
    assert list(loader) == []
    assert len(list(restored_at_end_of_epoch(None, num_batches=3))) == 1
    assert list(restored_at_end_of_epoch(None).begin_pass()) == []
    assert not caplog.messages


def test_function_may_read_a_file_and_what_has_a_state() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return 1

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    stream, file = Stream(), io.BytesIO(b"12")
    assert next(iter(Loader(lambda: (next(stream), file.getvalue())))) == (1, b"12")
