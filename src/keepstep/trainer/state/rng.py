"""Random states: python, numpy, torch CPU, every CUDA device, and generators of the user's own."""

from __future__ import annotations

import copy
import logging
import math
import random
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepstep import values as codec
from keepstep.errors import IntegrityError
from keepstep.values import InlineTensor

log = logging.getLogger("keepstep")

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


@dataclass(frozen=True)
class GlobalState:
    """All global random states at one moment, as their owners give them."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    host: torch.Tensor
    cuda: list[torch.Tensor] | None  # by device, where CUDA is in use: asking would start it

    @classmethod
    def now(cls) -> GlobalState:
        numpy = np.random.get_state()
        assert isinstance(numpy, tuple)
        used = torch.cuda.is_initialized()
        cuda = [generator.get_state() for generator in torch.cuda.default_generators] if used else None
        return cls(random.getstate(), numpy, torch.default_generator.get_state(), cuda)


class GlobalEncoder:
    """Encodes global states. What nobody draws from in the training loop is encoded once. For one thread at a time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, bytes]] = {}

    def encode(self, state: GlobalState) -> dict[str, bytes]:
        python, numpy, host = state.python, state.numpy, state.host
        # Marks of few bytes in one piece: to compare hundreds of numbers that left the cache a step ago takes longest.
        # By repr, in which zero has a sign.
        version, words, gauss = python
        name, key, *rest = numpy
        found = {
            "python": self._encode("python", (version, array("I", words).tobytes(), repr(gauss)), lambda: python),
            "numpy": self._encode("numpy", (name, key.tobytes(), repr(rest)), lambda: numpy),
            "torch": self._encode("torch", host.numpy().tobytes(), lambda: inline_tensor(host)),
        }
        if (devices := state.cuda) is not None:
            marks = [state.numpy().tobytes() for state in devices]
            found["cuda"] = self._encode("cuda", marks, lambda: [inline_tensor(state) for state in devices])
        return found

    def _encode(self, name: str, mark: Any, state: Callable[[], Any]) -> bytes:
        """`mark` is equal when the state is."""
        last = self._last.get(name)
        if last is None or last[0] != mark:
            last = self._last[name] = (mark, codec.encode(state(), path=name))
        return last[1]


def decode_globals(parts: Mapping[str, bytes]) -> dict[str, Any]:
    """What `GlobalEncoder.encode` has made."""
    return {name: codec.decode(part) for name, part in parts.items()}


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
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def set_generator(generator: Generator, saved: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(from_inline(saved))
    elif isinstance(generator, random.Random):
        generator.setstate(saved)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(saved)
    else:
        generator.bit_generator.state = copy.deepcopy(saved)


def inline_tensor(tensor: torch.Tensor) -> InlineTensor:
    """A small tensor as a value: its shape may change from step to step."""
    return InlineTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), host_bytes(tensor).tobytes())


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor's elements, in their order; not a copy where it is contiguous on the host."""
    plain = tensor if _is_bytes(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if not plain.numel():
        return np.empty(0, np.uint8)
    # A tensor of one element is contiguous whatever its stride is, and `view` wants a stride of 1.
    flat: npt.NDArray[np.uint8] = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _is_bytes(tensor: torch.Tensor) -> bool:
    """As random states are: nothing has to be done to them."""
    return tensor.dtype is torch.uint8 and tensor.device.type == "cpu" and tensor.is_contiguous()


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
