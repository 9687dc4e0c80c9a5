"""Where a Loader gets its batches from: one class for each kind of thing that it is made of.

    kind        what                                  its position
    replay      DataLoader with a map-style dataset   what its order was drawn from, and the batches that were given
    own         StatefulDataLoader, any iterable      its own state_dict()
                with state_dict
    stream      DataLoader, no workers, around an     the state_dict() of the dataset
                IterableDataset with state_dict
    function    a function that returns a batch       its number, for a function that takes one

Each copies what it changes: the user's loader stays as it was.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from keepstep.errors import ConfigError
from keepstep.trainer.data.index_sampler import PositionedSampler
from keepstep.trainer.data.order_state import note_state, set_noted, undrawn
from keepstep.trainer.data.sampler_states import SamplerStates
from keepstep.trainer.data.worker_states import ReportingCollate, WorkerStart, without_reports
from keepstep.trainer.state.loaders import (
    is_untouched,
    loader_generators,
    prime,
    sampler_epochs,
    set_sampler_epochs,
)
from keepstep.types import Stateful

KINDS = "a DataLoader, a StatefulDataLoader, an iterable with state_dict() and load_state_dict(), or a function"


class BatchSource(Protocol):
    """Gives the batches of one pass after another. `state` never draws."""

    kind: str

    def begin(self) -> Iterator[Any]:
        """Begin a new pass."""

    def resume(self, num_given: int) -> Iterator[Any]:
        """Make the pass again that `load` has described, behind the batches that it gave. Leaves no draw behind."""

    def state(self, *, resumes: bool) -> dict[str, Any]:
        """The position after the batch that was given last. `resumes`: it is within a pass."""

    def load(self, state: dict[str, Any]) -> None: ...


def source_of(loader: Any) -> BatchSource:
    """Refuses what has no position that could be restored."""
    if isinstance(loader, DataLoader) and not isinstance(loader, Stateful):
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise ConfigError(
                f"keepstep.Loader cannot resume a {type(loader).__name__}, which iterates in its own way",
                hint="give it the loader before it is wrapped or prepared",
            )
        return StreamSource(loader) if isinstance(loader.dataset, IterableDataset) else ReplaySource(loader)
    if isinstance(loader, Stateful) and isinstance(loader, Iterable):
        return OwnStateSource(loader)
    if callable(loader):
        return FunctionSource(loader)
    raise ConfigError(f"keepstep.Loader cannot resume a {type(loader).__name__}", hint=f"give it {KINDS}")


class ReplaySource:
    """Makes the iterator again from the random states that it was made from; skipped batches are not loaded."""

    kind = "replay"

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = copy.copy(loader)
        self._generators = loader_generators(loader)
        attributes = vars(self._loader)  # DataLoader refuses other samplers once it is constructed.
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        attributes[which] = self._sampler = PositionedSampler(attributes[which], self._generators)
        self._start = WorkerStart(loader.worker_init_fn, loader.collate_fn)
        if loader.num_workers:
            attributes["worker_init_fn"] = self._start
            attributes["collate_fn"] = ReportingCollate(loader.collate_fn)
        self._parts = loader  # whose samplers have epochs
        self._keeps_workers = loader.num_workers > 0 and loader.persistent_workers
        self._workers: dict[int, bytes] = {}  # the random states that workers reported
        self._pool = b""  # what the seeds of living workers were drawn from
        self._order = b""  # what the order of this pass was drawn from, when its iterator was made
        self._first = b""  # the same at its first batch, where something was drawn in between
        self._epochs: list[int | None] = []
        self._samplers = SamplerStates(loader)
        self._sampler_states: list[Any] = []  # when the iterator of this pass was made

    def begin(self) -> Iterator[Any]:
        self._sampler_states = self._samplers.now()
        self._order, self._first, self._epochs = note_state(self._generators), b"", sampler_epochs(self._parts)
        if not (self._keeps_workers and self._pool):
            self._workers, self._pool = {}, self._order
            self._start.states, self._start.num_pads = {}, 0
        elif getattr(self._loader, "_iterator", None) is None:
            self._make_workers()
        self._sampler.start_at(0)
        iterator = iter(self._loader)
        return self._new_batches(iterator, note_state(self._generators))

    def resume(self, num_given: int) -> Iterator[Any]:
        self._samplers.set(self._sampler_states)
        set_sampler_epochs(self._parts, self._epochs)
        num_pads = self._num_pads(num_given)
        with undrawn(self._generators):
            if self._pool != self._order:
                self._make_workers(num_pads)
            self._start.states, self._start.num_pads = dict(self._workers), num_pads
            self._sampler.start_at(num_given, num_pads=num_pads)
            set_noted(self._order, self._generators)
            iterator = iter(self._loader)
            if not num_given:
                return self._new_batches(iterator, note_state(self._generators))
            if self._first:
                set_noted(self._first, self._generators)
            self._sampler.skip_now()
            for _ in range(num_pads):
                with contextlib.suppress(Exception):  # __getitems__ may not like to be asked for nothing
                    next(iterator)
        return without_reports(iterator, self._workers)

    def _make_workers(self, num_pads: int = 0) -> None:
        """Start persistent workers with the seeds and states of those that the snapshot had."""
        with undrawn(self._generators):
            set_noted(self._pool, self._generators)
            self._start.states, self._start.num_pads = dict(self._workers), num_pads
            self._sampler.start_empty()
            iter(self._loader)

    def _num_pads(self, num_given: int) -> int:
        """Empty batches in front, so that each batch is loaded by the worker that would have loaded it."""
        if self._loader.batch_sampler is None or not self._loader.num_workers:
            return 0  # Indices of single samples cannot be empty.
        return num_given % self._loader.num_workers

    def _new_batches(self, iterator: Iterator[Any], made: bytes) -> Iterator[Any]:
        first = note_state(self._generators)
        self._first = first if first != made else b""
        yield from without_reports(iterator, self._workers)

    def state(self, *, resumes: bool) -> dict[str, Any]:
        return {
            "order": self._order, "first": self._first, "epochs": self._epochs,
            "pool": self._pool if self._keeps_workers else b"", "workers": self._workers,
            "samplers": self._sampler_states if resumes else self._samplers.now(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self._sampler_states = state["samplers"]
        self._samplers.set(self._sampler_states)
        self._order, self._first, self._epochs = state["order"], state["first"], state["epochs"]
        self._pool, self._workers = state["pool"] or state["order"], state["workers"]
        vars(self._loader)["_iterator"] = None  # Workers that live have other seeds.


class OwnStateSource:
    """Keeps its own account, and goes on where it was. torchdata's loader makes its iterator when it is loaded."""

    kind = "own"

    def __init__(self, loader: Any) -> None:
        self._follows_workers = _follows_workers(loader)
        self._loader = copy.copy(loader) if self._follows_workers else loader
        self._generators = loader_generators(loader)
        self._workers: dict[int, bytes] = {}
        self._pool = b""
        self._start = WorkerStart(getattr(loader, "worker_init_fn", None), getattr(loader, "collate_fn", None))
        if self._follows_workers:
            self._loader.worker_init_fn, self._loader.collate_fn = self._start, ReportingCollate(loader.collate_fn)

    def begin(self) -> Iterator[Any]:
        if self._follows_workers and not (self._loader.persistent_workers and self._pool):
            self._workers, self._pool, self._start.states = {}, note_state(self._generators), {}
        return self._batches(iter(self._loader))

    def resume(self, num_given: int) -> Iterator[Any]:
        return self._batches(iter(self._loader))

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        return without_reports(iterator, self._workers) if self._follows_workers else iterator

    def state(self, *, resumes: bool) -> dict[str, Any]:
        own = None if is_untouched(self._loader) else self._loader.state_dict()
        return {"own": own, "epochs": sampler_epochs(self._loader), "pool": self._pool, "workers": self._workers}

    def load(self, state: dict[str, Any]) -> None:
        set_sampler_epochs(self._loader, state["epochs"])
        self._pool, self._workers = state["pool"], state["workers"]
        self._start.states = dict(self._workers)
        if state["own"] is None:
            if not is_untouched(self._loader):
                self._loader.load_state_dict({})
            return
        with undrawn(self._generators):
            self._loader.load_state_dict(state["own"])
            if self._pool:
                set_noted(self._pool, self._generators)
            prime(self._loader)


def _follows_workers(loader: Any) -> bool:
    """Whether it is torchdata's loader with workers that report with each batch."""
    own_iter = getattr(type(loader), "__iter__", None)
    is_known = isinstance(loader, DataLoader) and getattr(own_iter, "__module__", "").startswith("torchdata.")
    return is_known and loader.num_workers > 0 and getattr(loader, "snapshot_every_n_steps", 0) == 1


class StreamSource:
    """The dataset keeps its own account. It runs in this process, and is never ahead of the batch."""

    kind = "stream"

    def __init__(self, loader: DataLoader[Any]) -> None:
        if not isinstance(loader.dataset, Stateful) or loader.num_workers:
            where = f"in {loader.num_workers} workers" if loader.num_workers else "without state_dict()"
            raise ConfigError(
                f"the position of a {type(loader.dataset).__name__} {where} is not known to keepstep.Loader",
                hint="use torchdata's StatefulDataLoader, or a dataset with state_dict() and load_state_dict() "
                "and num_workers=0",
            )
        self._dataset: Any = loader.dataset
        self._stream = WatchedStream(self._dataset)
        self._loader = copy.copy(loader)
        vars(self._loader)["dataset"] = self._stream
        self._generators = loader_generators(loader)

    def begin(self) -> Iterator[Any]:
        return iter(self._loader)

    def resume(self, num_given: int) -> Iterator[Any]:
        if self._stream.ended:  # Its last batch was not full: the dataset may have begun anew.
            return iter(())
        with undrawn(self._generators):
            return iter(self._loader)

    def state(self, *, resumes: bool) -> dict[str, Any]:
        return {"dataset": self._dataset.state_dict(), "ended": self._stream.ended}

    def load(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state["dataset"])
        self._stream.ended = state["ended"]


class WatchedStream(IterableDataset[Any]):
    """An iterable dataset, and whether its newest pass has come to the end."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        self.ended = False
        yield from self._dataset
        self.ended = True


class FunctionSource:
    """Calls a function for each batch, with the number of the batch where it takes an argument."""

    kind = "function"

    def __init__(self, function: Callable[..., Any]) -> None:
        for iterator in _iterators_of(function):
            raise ConfigError(
                f"keepstep.Loader cannot resume a {type(iterator).__name__}, which this function reads",
                hint=f"give it {KINDS} of the number of the batch",
            )
        self._function = function
        self._takes_number = _takes_argument(function)
        self._num_given = 0

    def begin(self) -> Iterator[Any]:
        return self._batches()

    def resume(self, num_given: int) -> Iterator[Any]:
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while True:
            batch = self._function(self._num_given) if self._takes_number else self._function()
            self._num_given += 1
            yield batch

    def state(self, *, resumes: bool) -> dict[str, Any]:
        return {"num_given": self._num_given}

    def load(self, state: dict[str, Any]) -> None:
        self._num_given = state["num_given"]


def _iterators_of(function: Any) -> list[Any]:
    """Iterators without a state that a function names, is bound to or is made with: their position is lost."""
    values = [getattr(function, "__self__", None), *getattr(function, "args", ())]
    if inspect.isfunction(function):
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # It is empty yet.
                values.append(cell.cell_contents)
    return [value for value in values if isinstance(value, Iterator) and not isinstance(value, (Stateful, io.IOBase))]


def _takes_argument(function: Callable[..., Any]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise ConfigError("a function for batches takes the number of the batch, or nothing")
    return bool(required)
