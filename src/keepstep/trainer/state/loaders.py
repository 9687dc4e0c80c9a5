"""What the order and the samples of a data loader depend on: its random sources, and the epochs of its samplers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

MAX_DEPTH = 3  # A Subset of a ConcatDataset of datasets with transforms.
MAX_PARTS = 256  # for each loader: `take` looks at all of them
PARTS = ("dataset", "datasets", "transform", "transforms", "target_transform", "sampler", "batch_sampler", "collate_fn")


def loader_generators(loader: Any) -> list[Generator]:
    """The random sources of a loader, its samplers, dataset and collate function: all are set by a restore."""
    roots = [*order_parts(loader), getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)]
    return _distinct([getattr(loader, "generator", None), *_random_sources(roots)])


def worker_generators(dataset: Any, collate: Any) -> list[Generator]:
    """The random sources that a loader worker has."""
    return _distinct(_random_sources([dataset, collate]))


def _distinct(sources: list[Any]) -> list[Generator]:
    generators = {id(source): source for source in sources if isinstance(source, Generator)}
    return [source for source in generators.values() if not isinstance(source, random.SystemRandom)]


def _random_sources(roots: list[Any]) -> list[Any]:
    """Attributes that are random sources, of these objects and of the parts inside them."""
    seen: set[int] = set()
    found: list[Any] = []
    level = roots
    for _ in range(MAX_DEPTH + 1):
        inside: list[Any] = []
        for part in level:
            if id(part) in seen or len(seen) >= MAX_PARTS:
                continue
            seen.add(id(part))
            found += _held_by(part)
            inside += _parts_of(part)
        level = inside
    return found


def _held_by(part: Any) -> list[Any]:
    values = list(getattr(part, "__dict__", {}).values())
    return [value for value in (getattr(part, "generator", None), *values) if isinstance(value, Generator)]


def _parts_of(part: Any) -> Iterator[Any]:
    attributes = getattr(part, "__dict__", {})
    for name in PARTS:
        value = attributes.get(name)
        if isinstance(value, (list, tuple)):
            yield from value[:MAX_PARTS]
        elif isinstance(value, Mapping):
            yield from list(value.values())[:MAX_PARTS]
        elif value is not None:
            yield value


def order_parts(loader: Any) -> list[Any]:
    """The samplers of a loader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found: list[Any] = []
    for part in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if part is not None and all(part is not known for known in found):
            found.append(part)
    return found


def sampler_epochs(loader: Any) -> list[int | None]:
    """The epoch of each sampler that has `set_epoch`; None where it does not tell."""
    epochs = [getattr(sampler, "epoch", None) for sampler in _samplers_with_epochs(loader)]
    return [epoch if type(epoch) is int else None for epoch in epochs]


def set_sampler_epochs(loader: Any, epochs: list[int | None]) -> None:
    """Set what `sampler_epochs` returned. Do it before an iterator is made: that is when samplers read it."""
    for sampler, epoch in zip(_samplers_with_epochs(loader), epochs, strict=False):
        if epoch is not None:
            sampler.set_epoch(epoch)


def set_all_epochs(loader: Any, epoch: int) -> None:
    """Begin an epoch: for all samplers, and for an iterable dataset."""
    dataset = getattr(loader, "dataset", None)
    streams = [dataset] if isinstance(dataset, torch.utils.data.IterableDataset) else []
    for part in (*_samplers_with_epochs(loader), *streams):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def _samplers_with_epochs(loader: Any) -> list[Any]:
    return [part for part in order_parts(loader) if callable(getattr(part, "set_epoch", None))]


def is_untouched(loader: Any) -> bool:
    """Whether a StatefulDataLoader was never iterated nor loaded. Its `state_dict()` would build its iterator, which
    draws from the RNG and starts workers: the run would differ from one without keepstep."""
    return getattr(loader, "_iterator", loader) is None and getattr(loader, "next_iter_state", loader) is None


def prime(loader: Any) -> None:
    """Build the iterator of a loader that was loaded, which draws from the RNG; the next `for` uses this one.

    A wrapper may answer `state_dict()` from a cache (accelerate): then the loader inside it is primed.
    """
    loader.state_dict()
    inner: Any = getattr(loader, "base_dataloader", None)
    if hasattr(inner, "next_iter_state") and inner._iterator is None:
        inner.state_dict()
