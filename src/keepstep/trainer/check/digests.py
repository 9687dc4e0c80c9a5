"""Digests of live values, by path: what a record of `keepstep check` is made of.

A short value is written as it is in Python, and a tensor of one number as that number, so that a report can show them.
Every byte is read from the live objects, not from a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import xxhash

from keepstep import values as codec
from keepstep.trainer.state import reader as states
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.rng import GlobalEncoder, GlobalState, host_bytes
from keepstep.values import InlineTensor, TensorRef

SHORT = 48  # characters of a value that is recorded as it is
LONGEST_PATH = 400  # characters of a file's path, which is recorded as it is too: a digest would not show what differs
MAX_ITEMS = 64  # A longer list is one digest.
RNG = "rng"
NOTED = (".source.order", ".source.first", ".source.pool")


def read_state(objects: StateObjects, kinds: Collection[str] | None = None) -> dict[str, str]:
    """Every value of the state by its path, or of the objects of some kinds; global random states always."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    chosen = objects
    if kinds is not None:
        chosen = StateObjects({item.path: item.thing for item in objects.all if item.kind in kinds})
    reading = states.StateReader(chosen, rng=True, grads=False).read()
    tree = states.decode(reading.values)
    tensors = reading.tensors
    parts = {**tree["items"], RNG: tree["rng"]}
    for path, generators in tree["loaders"].items():
        if generators:
            parts[f"{path}.generators"] = generators
    digests: dict[str, str] = {}
    for path, value in leaves("", parts):
        if type(value) is bytes and value and path.endswith(NOTED):
            # What a keepstep.Loader notes of random states is compared as those are.
            noted = codec.decode(value)
            digests |= {f"{RNG}.{path}.{name}": value_text(state) for name, state in noted.items()}
        elif isinstance(value, TensorRef):
            tensor = states.local_part(tensors[value.index], path)
            digests[path] = _with_type(tensor_digest(tensor), str(tensor.dtype))
        else:
            digests[path] = value_text(value)
    return digests


def random_digest() -> str:
    """Digest of all global random states."""
    digest = xxhash.xxh3_64()
    for name, encoded in GlobalEncoder().encode(GlobalState.now()).items():
        digest.update(name.encode() + encoded)
    return digest.hexdigest()


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)) and value and (len(value) <= MAX_ITEMS or _holds_tensors(value)):
        for index, item in enumerate(value):
            yield from leaves(f"{path}.{index}", item)
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
    digest.update(host_bytes(plain).data)
    return "#" + digest.hexdigest()


def _with_type(text: str, dtype: str) -> str:
    """Append the type where it is one of floating point: kernels make only such tensors differ."""
    name = dtype.removeprefix("torch.")
    return f"{text} {name}" if name.startswith(("float", "bfloat", "complex")) else text


def value_text(value: Any) -> str:
    """A short value or a path as it is written in Python, any other as its digest."""
    if isinstance(value, InlineTensor):
        digest = xxhash.xxh3_64(f"{value.dtype} {value.shape}".encode())
        digest.update(value.data)
        return _with_type("#" + digest.hexdigest(), value.dtype)
    text = repr(value)
    limit = LONGEST_PATH if isinstance(value, str) and "/" in value else SHORT
    return text if len(text) <= limit else "#" + xxhash.xxh3_64(codec.encode(value)).hexdigest()
