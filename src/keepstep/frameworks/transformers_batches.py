"""The batches of an accelerate loader, in the order of the undisturbed run, from any place in an epoch.

The order depends on the random states when the loader is iterated and on the generators of its samplers. Both are
noted at the beginning of each epoch. A resumed epoch begins with them again, and the batches that were used are skipped
in the batch sampler, so that nothing of them is loaded. accelerate's loaders fetch one batch ahead: it is fetched again
with the random states that it was fetched with, and only the fetch after it sees those of the snapshot.

The batch sampler is followed in place: its class becomes a subclass of itself, and the loader stays the object that it
was. The training thread alone calls.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.errors import ConfigError
from keepstep.trainer.state.rng import GlobalEncoder, GlobalState, decode_globals, set_rng_state

MAX_AHEAD = 8  # Batches that a loader without workers may fetch before they are used; accelerate's fetch one.
MAX_WRAPPERS = 4  # Samplers inside samplers: a shard of the batches of a sampler of indices.


class BatchOrder:
    """Notes what the order of a loader's batches depends on, and puts it back."""

    def __init__(self, loader: Any) -> None:
        self._has_workers = loader.num_workers > 0
        self._keeps_workers = self._has_workers and bool(loader.persistent_workers)
        self._samplers = dict(_samplers(loader))
        self._encoder, self._ahead_encoder = GlobalEncoder(), GlobalEncoder()
        self._num_epochs = 0  # begun in this run
        self._start: dict[str, Any] = {}  # the random states when this epoch began
        self._fetches: deque[tuple[int, GlobalState]] = deque(maxlen=MAX_AHEAD)  # by index, with the states before it
        self._saved_fetches: dict[int, Mapping[str, bytes]] = {}
        self._resume: _Resume | None = None
        self._was_resumed = False
        _follow(_batch_sampler(loader), self)

    def begin_epoch(self) -> None:
        """Note the random states: the loader is iterated next."""
        self._num_epochs += 1
        self._start = {"rng": self._encoder.encode(GlobalState.now()), "generators": self._generator_states()}

    def resume_epoch(self, num_used: int, set_rng: Callable[[], None]) -> None:
        """Set the random states of this epoch's beginning: the loader is iterated next, `num_used` batches skipped.

        `set_rng` sets those of the snapshot. Call `finish_resume` when the first batches are there.
        """
        self._resume = _Resume(num_used, dict(self._saved_fetches), set_rng)
        self._set_start()

    def finish_resume(self) -> None:
        """Set the random states of the snapshot, where workers fetched and nothing was set yet."""
        if self._resume is not None:
            self._resume.finish()
            self._resume = None

    def end_epoch(self) -> None:
        """Forget the states: the next epoch notes its own."""
        self._start = {}
        self._fetches.clear()

    def state_dict(self, num_used: int = 0) -> dict[str, Any]:
        """The order of this epoch, and how the batches that are fetched and not used yet were fetched."""
        ahead = {index: self._ahead_encoder.encode(state) for index, state in self._fetches if index >= num_used}
        return {"epochs": self._num_epochs, "start": self._start, "ahead": ahead}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Nothing is set before `resume_epoch`."""
        self._num_epochs, self._start, self._saved_fetches = saved["epochs"], saved["start"], saved["ahead"]
        self._was_resumed = True

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Pass the batches of the sampler on: control is here before each fetch of the training process."""
        if self._keeps_workers and self._was_resumed and self._num_epochs > 1:
            # The undisturbed run had its workers already; to start them drew a seed here.
            self._set_start()
        for index, batch in enumerate(batches):
            if not self._has_workers:
                self._before_fetch(index)
            yield batch
            if not self._has_workers and self._resume is not None:
                self._resume.before_request(index + 1)

    def _before_fetch(self, index: int) -> None:
        if self._resume is not None:
            if index < self._resume.num_used:
                return
            self._resume.before_fetch(index)
        self._fetches.append((index, GlobalState.now()))

    def _set_start(self) -> None:
        set_rng_state(decode_globals(self._start["rng"]))
        saved = self._start["generators"]
        for path, generator in self._generators().items():
            if path in saved:
                generator.set_state(saved[path])

    def _generator_states(self) -> dict[str, torch.Tensor]:
        return {path: generator.get_state() for path, generator in self._generators().items()}

    def _generators(self) -> dict[str, torch.Generator]:
        """Some are made when the loader is iterated for the first time."""
        found = {path: getattr(sampler, "generator", None) for path, sampler in self._samplers.items()}
        return {path: generator for path, generator in found.items() if isinstance(generator, torch.Generator)}


@dataclass
class _Resume:
    """One resumed epoch, until its first batches are there."""

    num_used: int
    fetches: dict[int, Mapping[str, bytes]]  # batches that had been fetched ahead, with the random states before each
    set_rng: Callable[[], None]
    is_set: bool = False

    def before_fetch(self, index: int) -> None:
        if index in self.fetches:
            set_rng_state(decode_globals(self.fetches[index]))

    def before_request(self, index: int) -> None:
        if index == self.num_used + len(self.fetches):
            self.finish()

    def finish(self) -> None:
        if not self.is_set:
            self.is_set = True
            self.set_rng()


def _samplers(loader: Any) -> Iterator[tuple[str, Any]]:
    """The loader and all samplers inside each other, by path: those that may have a generator."""
    yield "", loader
    path, sampler = "batch_sampler", _batch_sampler(loader)
    for _ in range(MAX_WRAPPERS):
        yield path, sampler
        inner = "batch_sampler" if hasattr(sampler, "batch_sampler") else "sampler"
        path, sampler = f"{path}.{inner}", getattr(sampler, inner, None)


def _batch_sampler(loader: Any) -> Any:
    sampler = loader.sampler if isinstance(loader.sampler, torch.utils.data.BatchSampler) else loader.batch_sampler
    if sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an iterable dataset: its place cannot be captured exactly",
            hint="use a dataset with __getitem__ and __len__",
        )
    return sampler


def _follow(sampler: Any, order: BatchOrder) -> None:
    if "keepstep_order" not in vars(sampler):
        try:
            sampler.__class__ = _followed_class(sampler.__class__)
        except TypeError as error:
            raise ConfigError(
                f"the batches of {type(sampler).__name__} cannot be followed: {error}",
                hint="make it a subclass of torch.utils.data.BatchSampler, without __slots__",
            ) from error
    sampler.keepstep_order = order


@functools.cache
def _followed_class(kind: Any) -> type:
    """A subclass with the same name, and nothing but `__iter__`: objects can change to it only in their own layout."""

    def follow(sampler: Any) -> Iterator[Any]:
        order: BatchOrder = sampler.keepstep_order
        return order.follow(kind.__iter__(sampler))

    return type(kind.__name__, (kind,), {"__iter__": follow, "__module__": kind.__module__})
