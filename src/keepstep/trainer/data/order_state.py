"""The state that the order of a loader is drawn from: global random states of the host, and the loader's generators.

Noted when an iterator is made, so that the same iterator can be made again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from keepstep import values as codec
from keepstep.trainer.state.rng import Generator, generator_state, inline_tensor, set_generator, set_rng_state


def note_state(generators: Sequence[Generator]) -> bytes:
    """The global random states as they are now, and those of these generators. Equal bytes: equal states."""
    noted = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": inline_tensor(torch.get_rng_state()),
        "generators": [generator_state(generator) for generator in generators],
    }
    return codec.encode(noted, path="loader")


def set_noted(noted: bytes, generators: Sequence[Generator]) -> None:
    """Set what was noted."""
    saved: dict[str, Any] = codec.decode(noted)
    set_rng_state(saved)
    for generator, state in zip(generators, saved["generators"], strict=True):
        set_generator(generator, state)


def marks(generators: Sequence[Generator]) -> list[Any]:
    """For the global random states, then for each generator: what is equal where nothing was drawn in between."""
    numpy = np.random.get_state()
    assert isinstance(numpy, tuple)
    name, key, *rest = numpy
    shared = (random.getstate(), name, key.tobytes(), rest, torch.get_rng_state().numpy().tobytes())
    return [shared, *(codec.encode(generator_state(generator), path="loader") for generator in generators)]


@contextlib.contextmanager
def undrawn(generators: Sequence[Generator]) -> Iterator[None]:
    """Draw whatever is drawn inside, and leave all random states as they were."""
    before = note_state(generators)
    try:
        yield
    finally:
        set_noted(before, generators)
