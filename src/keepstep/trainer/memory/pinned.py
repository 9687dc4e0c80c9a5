"""Page-locking host memory for CUDA, and not more than that: no context on a device that this process does not use."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

log = logging.getLogger("keepstep")

PORTABLE = 1


def in_use() -> bool:
    """Whether this process has begun to use CUDA at all."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def lock_pages(address: int, size_bytes: int) -> int:
    """Returns CUDA's error, 0 for none. Where CUDA is not used there is nothing to lock for."""
    if not in_use():
        return 1
    with _device_in_use():
        failure = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, PORTABLE))  # type: ignore[no-untyped-call]
    if failure:
        _clear_error()
    return failure


def unlock_pages(addresses: Iterable[int]) -> None:
    with _device_in_use():
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _device_in_use() -> AbstractContextManager[Any]:
    """A thread's current device is the first one: to use that from every rank of a node would start CUDA on it."""
    started = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    used = [index for index in range(torch.cuda.device_count()) if started is not None and started(index)]
    return torch.cuda.device(used[0]) if used else nullcontext()


def _clear_error() -> None:
    """A failed registration leaves an error behind that the next, innocent call would report."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
