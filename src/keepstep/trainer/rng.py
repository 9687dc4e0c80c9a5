"""Random states: python, numpy, torch CPU, every CUDA device, and generators of the user's own."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from keepstep.errors import IntegrityError
from keepstep.values import InlineTensor

log = logging.getLogger("keepstep")

Generator = torch.Generator | random.Random | np.random.Generator


def rng_state() -> dict[str, Any]:
    """All global random states. Devices only where CUDA is in use: asking would start it."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": inline_tensor(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [inline_tensor(device_state) for device_state in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(saved: Mapping[str, Any]) -> None:
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(from_inline(saved["torch"]))
    states = [from_inline(value) for value in saved.get("cuda", [])]
    if states and torch.cuda.is_available():
        if len(states) != torch.cuda.device_count():
            log.warning("%d CUDA random states were saved, %d devices are here", len(states), torch.cuda.device_count())
        for device, value in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value, device)


def generator_state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return inline_tensor(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state


def set_generator(generator: Generator, saved: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(from_inline(saved))
    elif isinstance(generator, random.Random):
        generator.setstate(saved)
    else:
        generator.bit_generator.state = copy.deepcopy(saved)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """A data loader's own generators: its order is wrong after a restore unless they are set too."""
    found: list[torch.Generator] = []
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts.append(getattr(parts[2], "sampler", None))
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def inline_tensor(tensor: torch.Tensor) -> InlineTensor:
    """A small tensor as a value: its shape may change from step to step."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return InlineTensor(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)


def from_inline(value: InlineTensor) -> torch.Tensor:
    dtype = dtype_named(value.dtype)
    if len(value.data) != math.prod(value.shape) * dtype.itemsize:
        raise IntegrityError("a small tensor does not have the bytes that its shape wants")
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).view(dtype).reshape(value.shape).clone()


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise IntegrityError(f"{name!r} is not a dtype of this torch")
    return found
