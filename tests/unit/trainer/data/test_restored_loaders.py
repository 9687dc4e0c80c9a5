"""Loaders with a state of their own: epochs of samplers, and loaders that are wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep
from keepstep.testing.run import LocalRun

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
BATCHES = 4


@pytest.fixture
def run() -> Iterator[LocalRun]:
    with LocalRun() as local:
        yield local


def train(run: LocalRun, loader: Any, epoch: int, *, stop_after: int | None = None) -> list[Any]:
    """The batches of one epoch, each with a random number. Ends as a process that was killed where it is told to."""
    seen: list[Any] = []
    snapshots = keepstep.Snapshotter({"loader": loader}, run.config())
    restored = snapshots.restore()
    loader.sampler.set_epoch(epoch)
    for step, batch in enumerate(loader, restored.step + 1 if restored else 0):
        seen.append((batch.tolist(), torch.rand(1).item()))
        assert snapshots.take(step).wait(timeout_s=60.0)
        if len(seen) == stop_after:
            break
    snapshots.close(finished=stop_after is None)
    return seen


def sampled(kind: type[DataLoader[Any]]) -> Any:
    """Each time another object, as in another process."""
    torch.manual_seed(7)
    data = torch.arange(32)
    return kind(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=0))  # type: ignore[arg-type]


def test_order_of_a_later_epoch_is_restored_with_the_epoch_of_its_sampler(run: LocalRun) -> None:
    loader = sampled(StatefulDataLoader)
    loader.sampler.set_epoch(1)
    undisturbed = [batch.tolist() for batch in loader]
    first = train(run, sampled(StatefulDataLoader), 1, stop_after=2)
    torch.manual_seed(99)
    rest = train(run, sampled(StatefulDataLoader), 1)
    assert [batch for batch, _ in first + rest] == undisturbed


class Wrapper:
    """Answers `state_dict()` from a cache, as accelerate's loaders do."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader, self.dataset, self.sampler = loader, loader.dataset, loader.sampler
        self._cached: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        for batch in self.base_dataloader:
            self._cached = self.base_dataloader.state_dict()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._cached

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_dataloader.load_state_dict(state)


def test_random_numbers_are_right_behind_a_wrapper_that_makes_no_iterator(run: LocalRun) -> None:
    with LocalRun("undisturbed") as other:
        undisturbed = train(other, Wrapper(sampled(StatefulDataLoader)), 0)
    first = train(run, Wrapper(sampled(StatefulDataLoader)), 0, stop_after=2)
    torch.manual_seed(99)
    rest = train(run, Wrapper(sampled(StatefulDataLoader)), 0)
    assert first + rest == undisturbed


def test_plain_loader_in_the_state_is_refused_with_the_way_to_go_on(run: LocalRun) -> None:
    with pytest.raises(keepstep.CaptureError, match=r"loader is a DataLoader.*keepstep\.Loader"):
        keepstep.Snapshotter({"loader": sampled(DataLoader)}, run.config())
