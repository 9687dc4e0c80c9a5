"""What the order of a data loader depends on: its generators, and the epochs of its samplers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator

MAX_DATASETS = 4  # datasets inside datasets, as torch's Subset has one


def loader_generators(loader: Any) -> list[Generator]:
    """The generators of a loader, its samplers and its dataset: its order is wrong unless they are set too."""
    found = [getattr(part, "generator", None) for part in _order_parts(loader)]
    found += dataset_generators(getattr(loader, "dataset", None))
    generators: list[Generator] = []
    for generator in found:
        if isinstance(generator, Generator) and all(generator is not known for known in generators):
            generators.append(generator)
    return generators


def dataset_generators(dataset: Any) -> list[Generator]:
    """Generators that are attributes of a dataset, or of the one inside it."""
    generators: list[Generator] = []
    for _ in range(MAX_DATASETS):
        if not hasattr(dataset, "__dict__"):
            break
        generators += [value for value in vars(dataset).values() if isinstance(value, Generator)]
        dataset = vars(dataset).get("dataset")
    return generators


def _order_parts(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


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
    found: list[Any] = []
    for part in _order_parts(loader)[1:]:
        if callable(getattr(part, "set_epoch", None)) and all(part is not known for known in found):
            found.append(part)
    return found


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
