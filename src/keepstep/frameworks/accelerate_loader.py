"""The order and the position of a prepared accelerate loader: noted while it is iterated, and repeated after a restore.

accelerate fetches one batch ahead. When a loop asks for batch n, batches 0 to n are fetched already, and the fetch of
batch n + 1 follows. A restore therefore sets the random states three times: those that the order was drawn from, when
the sampler begins; those from before the fetch of batch n, when its indices are drawn; those of the snapshot, after it.
The batch sampler is the place where all three can be done, because each fetch asks it first. Workers draw nothing in
this process: with them the second is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import BatchSampler, IterableDataset

from keepstep import values as codec
from keepstep.errors import ConfigError
from keepstep.trainer.state.rng import (
    Generator,
    GlobalEncoder,
    GlobalState,
    decode_globals,
    generator_state,
    set_generator,
    set_rng_state,
)

# Indices after these batches are drawn while the random states are watched: a sampler that draws lazily does it there.
WATCHED_BATCHES = (1, 2)
# What a sampler computes its order from, in torch, torchdata and accelerate.
SAMPLER_NUMBERS = ("epoch", "seed", "initial_seed")
LOADER_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class NotedRandomStates:
    """The global random states and some generators, as bytes."""

    def __init__(self, generators: list[Generator]) -> None:
        self._generators = generators
        self._encoder = GlobalEncoder()

    def read(self) -> dict[str, Any]:
        return {
            "globals": self._encoder.encode(GlobalState.now()),
            "generators": codec.encode([generator_state(generator) for generator in self._generators]),
        }

    def write(self, saved: dict[str, Any]) -> None:
        set_rng_state(decode_globals(saved["globals"]))
        for generator, state in zip(self._generators, codec.decode(saved["generators"]), strict=True):
            set_generator(generator, state)


@dataclass
class Replay:
    """How the first epoch after a restore begins."""

    order: dict[str, Any] | None  # None on ranks that fetch nothing
    ahead: dict[str, Any] | None  # None where workers fetch
    fetched: int  # batches of the sampler that are not fetched again
    restore_rng: Callable[[], None]
    skips: bool = True  # whether the sampler leaves them out; a stateful loader does it by itself
    done: bool = False  # whether the random states of the snapshot are set

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.restore_rng()


class RepeatableBatches(BatchSampler):
    """The batch sampler of the training loader: notes what the order of an epoch depends on, and repeats it."""

    def __init__(self, batches: Any, random_states: NotedRandomStates, *, notes_fetches: bool, width: int) -> None:
        """`width`: batches that are fetched at a time."""
        self._batches, self.random_states = batches, random_states
        self._notes_fetches, self._width = notes_fetches, width
        self.order: dict[str, Any] | None = None
        self.ahead: dict[str, Any] | None = None
        self.replay: Replay | None = None

    def __getattr__(self, name: str) -> Any:
        # accelerate asks batch samplers for batch_size, sampler, num_processes and others. A state would be in the way:
        # torchdata asks for it, and it would not contain the order.
        if name in ("_batches", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        replay, self.replay = self.replay, None
        if replay is not None and replay.order is not None:
            self.random_states.write(replay.order["random"])
            if "samplers" in replay.order:
                write_samplers(self._batches, replay.order["samplers"])
        self.order = {"random": self.random_states.read(), "samplers": read_samplers(self._batches)}
        for index, batch in enumerate(self._draw()):
            if replay is None or index >= replay.fetched:
                if self._notes_fetches:
                    self._begin_fetch(replay, index)
                yield batch
            elif not replay.skips:
                yield batch
        if replay is not None and self._notes_fetches:
            replay.finish()

    def _draw(self) -> Iterator[Any]:
        drawn = iter(self._batches)
        for index in itertools.count():
            before = self.random_states.read() if index in WATCHED_BATCHES else None
            batch = next(drawn, None)
            if before is not None and self.random_states.read()["globals"] != before["globals"]:
                raise ConfigError(
                    "the sampler of the training loader draws from the global random states while it is iterated, so "
                    "its order cannot be repeated after a restore",
                    hint="give the sampler a generator of its own",
                )
            if batch is None:
                return
            yield batch

    def _begin_fetch(self, replay: Replay | None, index: int) -> None:
        if replay is not None and index == replay.fetched and replay.ahead is not None:
            self.random_states.write(replay.ahead)
        elif replay is not None and index == replay.fetched + self._width:
            replay.finish()
        if index % self._width == 0:
            self.ahead = self.random_states.read()


def install_batches(loader: Any, generators: list[Generator]) -> RepeatableBatches:
    """Give a prepared loader a base loader whose batch sampler is repeatable. Draws nothing."""
    base = loader.base_dataloader
    random_states = NotedRandomStates([*generators, *([base.generator] if base.generator is not None else [])])
    width = batches_of_a_fetch(loader)
    batches = RepeatableBatches(base.batch_sampler, random_states, notes_fetches=base.num_workers == 0, width=width)
    options = {name: getattr(base, name) for name in LOADER_OPTIONS}
    if loader.use_stateful_dataloader:
        options["snapshot_every_n_steps"] = base.snapshot_every_n_steps
    loader.base_dataloader = type(base)(base.dataset, batch_sampler=batches, **options)
    return batches


def start_stateful(loader: Any) -> None:
    """Give the new base of a stateful loader the iterator that accelerate made for the old one. Draws nothing."""
    if not loader.use_stateful_dataloader:
        return
    base = loader.base_dataloader
    states = NotedRandomStates([base.generator] if base.generator is not None else [])
    before = states.read()
    base.load_state_dict(loader.state_dict())
    loader.dl_state_dict = base.state_dict()
    states.write(before)


def batches_of_a_fetch(loader: Any) -> int:
    """How many batches of the sampler a fetch takes: more than one where the first process fetches for all."""
    dispatches = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
    return int(loader.state.num_processes) if dispatches else 1


def repeat_without_workers(batches: RepeatableBatches) -> Replay:
    """How an epoch begins whose persistent workers were started in an earlier process: to start them draws a number."""
    return Replay({"random": batches.random_states.read()}, ahead=None, fetched=0, restore_rng=lambda: None, done=True)


def check_loader(loader: Any) -> None:
    """Raise ConfigError for a prepared loader whose order or position cannot be repeated."""
    base = loader.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        raise ConfigError(
            "the training loader has an iterable dataset, whose position nobody can restore",
            hint="use a dataset with __getitem__ and __len__",
        )
    if loader.use_stateful_dataloader and batches_of_a_fetch(loader) > 1:
        raise ConfigError(
            "use_stateful_dataloader=True with dispatch_batches=True is not proven for several processes",
            hint="leave one of them out: keepstep restores the position of a plain loader, too",
        )
    if loader.use_stateful_dataloader and base.num_workers > 0:
        raise ConfigError(
            "use_stateful_dataloader=True with loader workers draws the order inside accelerator.prepare(), where it "
            "cannot be repeated",
            hint="leave it out: keepstep restores the position of a plain loader, too",
        )
    if base.batch_sampler is None:
        raise ConfigError(
            "the training loader has batch_size=None or a BatchSampler as its sampler, which is not proven",
            hint="give the loader a batch_size, or the sampler as batch_sampler",
        )
    if hasattr(base.batch_sampler, "state_dict"):
        raise ConfigError(
            "the batch sampler of the training loader has a state of its own, which is not proven",
            hint="give accelerator.prepare() a torch DataLoader; it makes a stateful one from it",
        )
    if isinstance(loader, DataLoaderDispatcher) and not _dispatches_evenly(loader):
        raise ConfigError(
            "dispatch_batches=True completes the last batch of an epoch from its first one, which is gone after a "
            "restore within the epoch",
            hint="give the loader drop_last=True, or a dataset whose length is a multiple of the processes",
        )


def _dispatches_evenly(loader: Any) -> bool:
    base = loader.base_dataloader
    return bool(base.batch_sampler.drop_last) or len(base.dataset) % loader.state.num_processes == 0


def read_loader(loader: Any) -> dict[str, Any]:
    """What the next iteration of a prepared loader depends on, besides the global random states."""
    return {"iteration": loader.iteration, "samplers": read_samplers(loader.base_dataloader)}


def write_loader(loader: Any, saved: dict[str, Any]) -> None:
    loader.iteration = saved["iteration"]
    if loader.use_stateful_dataloader and saved["iteration"] > 0:
        loader.base_dataloader.load_state_dict({})  # drop the iterator of its first pass, which does not draw a seed
    write_samplers(loader.base_dataloader, saved["samplers"])


def read_samplers(outermost: Any) -> list[dict[str, Any]]:
    return [
        {
            "numbers": {name: number for name in SAMPLER_NUMBERS if type(number := vars_of(part, name)) is int},
            "generator": codec.encode(generator_state(generator) if (generator := generator_of(part)) else None),
        }
        for part in chain_of(outermost)
    ]


def write_samplers(outermost: Any, saved: list[dict[str, Any]]) -> None:
    for part, state in zip(chain_of(outermost), saved, strict=True):
        for name, number in state["numbers"].items():
            setattr(part, name, number)
        encoded = codec.decode(state["generator"])
        if encoded is not None:
            generator = generator_of(part)
            if generator is None:
                generator = part.generator = torch.Generator()
            set_generator(generator, encoded)


def chain_of(outermost: Any) -> list[Any]:
    """A loader or batch sampler, and the samplers inside it, each once."""
    found: list[Any] = []
    waiting = [outermost]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is known for known in found):
            continue
        if not isinstance(part, RepeatableBatches):
            found.append(part)
        waiting += [vars_of(part, name) for name in ("batch_sampler", "sampler", "_batches")]
    return found


def vars_of(part: Any, name: str) -> Any:
    """The attribute of the object itself, not one that it passes on from another."""
    return getattr(part, "__dict__", {}).get(name)


def generator_of(part: Any) -> torch.Generator | None:
    generator = vars_of(part, "generator")
    return generator if isinstance(generator, torch.Generator) else None
