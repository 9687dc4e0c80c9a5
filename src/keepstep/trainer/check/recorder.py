"""Records of the state for `keepstep check`: digests of everything captured, at each `take` and after a restore.

Switched on by the environment variable `KEEPSTEP_CHECK` alone; without it nothing here runs. Correct before fast: the
devices are waited for, and every byte is read from the live objects, not from the snapshot.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from keepstep import values as codec
from keepstep.control.check_events import (
    AFTER,
    BEFORE,
    CHECK,
    KEPT,
    KILLED,
    OPENED,
    REACHED,
    REFUSED,
    RESTORED,
    SKIPPED,
    TAKE,
    TrainerEvent,
    killed_path,
    read_orders,
    record_path,
)
from keepstep.errors import Error
from keepstep.trainer.state import reader as states
from keepstep.trainer.state.objects import LOADER, StateObjects
from keepstep.values import InlineTensor, TensorRef

GRANT_S = 30.0  # `take` waits this long for a grant: a kill at step k must restore k or the step before it
COMPLETE_S = 60.0  # and this long until the snapshot is complete
PAUSE_S = 0.002
HELD_S = 600.0  # A trainer that reached the last step waits this long for its end.
GIVEN_UP = 75  # its exit code after that
SHORT = 48  # characters of a value that is recorded as it is
MAX_ITEMS = 64  # A longer list is one digest.


class StateRecorder:
    """Writes the events of one trainer."""

    def __init__(self, directory: Path, objects: StateObjects, rank: int, world_size: int) -> None:
        self._directory, self._objects = directory, objects
        self._rank, self._world_size = rank, world_size
        self._orders = read_orders(directory)
        self._taken: set[int] = set()
        self._write(OPENED)

    @classmethod
    def from_environment(cls, objects: StateObjects, rank: int, world_size: int) -> StateRecorder | None:
        """None unless this process is under `keepstep check`."""
        directory = os.environ.get(CHECK)
        return cls(Path(directory), objects, rank, world_size) if directory else None

    def restored(self, step: int | None) -> None:
        """Record what the live objects hold after `restore()`."""
        if step is None:
            self._write(RESTORED)
        else:
            # Asking a loader for its state may build its iterator.
            loaders = {item.path for item in self._objects.of(LOADER)}
            state = {path: value for path, value in self._read().items() if not _is_below(path, loaders)}
            self._write(RESTORED, step=step, state=state)

    def refused(self, error: Exception) -> None:
        """Record why `restore()` raised."""
        self._write(REFUSED, text=str(error))

    def begin_take(self, step: int) -> None:
        """Record the state as it is now, before anything of it is captured."""
        output, size = _output()
        try:
            state, text = self._read(), ""
        except Error as error:
            state, text = {}, str(error)
        self._write(TAKE, step=step, text=text, state=state, output=output, output_bytes=size)
        self._taken.add(step)
        self._kill(step, BEFORE)

    def end_take(self, step: int, reason: str) -> None:
        """Record the outcome. `reason`: why the snapshot was skipped or void."""
        self._write(SKIPPED if reason else KEPT, step=step, text=reason)
        self._kill(step, AFTER)
        limit, last = self._orders.takes, self._orders.last_step
        if (limit and len(self._taken) >= limit) or (last >= 0 and step >= last):
            self._write(REACHED, step=step)
            time.sleep(HELD_S)  # The check ends the run.
            os._exit(GIVEN_UP)

    def _kill(self, step: int, moment: str) -> None:
        for order in self._orders.kills:
            if (order.rank, order.step, order.moment) == (self._rank, step, moment):
                try:
                    killed_path(self._directory, order).touch(exist_ok=False)
                except FileExistsError:
                    continue
                self._write(KILLED, step=step, text=moment)
                os.kill(os.getpid(), signal.SIGKILL)

    def _read(self) -> dict[str, str]:
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return read_digests(self._objects)

    def _write(self, kind: str, **fields: Any) -> None:
        event = TrainerEvent(
            kind=kind, at=time.time(), pid=os.getpid(), rank=self._rank, world_size=self._world_size, **fields
        )
        line = msgspec.json.encode(event) + b"\n"
        fd = os.open(record_path(self._directory, self._rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def wait_for(is_done: Callable[[], bool], timeout_s: float = GRANT_S) -> None:
    """Wait until it is done, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)


def read_digests(objects: StateObjects) -> dict[str, str]:
    """Every value of the state by its path."""
    reading = states.StateReader(objects, rng=True, grads=False).read()
    tree = states.decode(reading.values)
    tensors = reading.tensors
    parts = {**tree["items"], "rng": tree["rng"]}
    for path, generators in tree["loaders"].items():
        if generators:
            parts[f"{path}.generators"] = generators
    found: dict[str, str] = {}
    for path, value in _leaves("", parts):
        if isinstance(value, TensorRef):
            found[path] = tensor_digest(states.local_part(tensors[value.index], path))
        else:
            found[path] = value_text(value)
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)) and value and (len(value) <= MAX_ITEMS or _holds_tensors(value)):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item)
    else:
        yield path, value


def _holds_tensors(values: list[Any] | tuple[Any, ...]) -> bool:
    return any(isinstance(value, (TensorRef, dict, list, tuple)) for value in values)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of type, shape and bytes; the number itself where there is only one."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.numel() == 1 and (plain.is_floating_point() or plain.dtype in (torch.int64, torch.int32, torch.bool)):
        return repr(plain.item())
    digest = xxhash.xxh3_64(f"{plain.dtype} {tuple(plain.shape)}".encode())
    if plain.numel():
        digest.update(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return "#" + digest.hexdigest()


def value_text(value: Any) -> str:
    """A short value as it is written in Python, any other as its digest."""
    if isinstance(value, InlineTensor):
        digest = xxhash.xxh3_64(f"{value.dtype} {value.shape}".encode())
        digest.update(value.data)
        return "#" + digest.hexdigest()
    text = repr(value)
    return text if len(text) <= SHORT else "#" + xxhash.xxh3_64(codec.encode(value)).hexdigest()


def _is_below(path: str, tops: set[str]) -> bool:
    return any(path == top or path.startswith(f"{top}.") for top in tops)


def _output() -> tuple[str, int]:
    """The file that standard output is, and its length; nothing where it is no file."""
    try:
        sys.stdout.flush()
        path = os.readlink("/proc/self/fd/1")
        return (path, os.fstat(1).st_size) if os.path.isfile(path) else ("", -1)
    except (OSError, ValueError, AttributeError):
        return "", -1
