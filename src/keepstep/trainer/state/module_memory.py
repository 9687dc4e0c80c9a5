"""The state of a module, read from its memory: parameters and persistent buffers, and what it keeps beside them.

`state_dict()` is not called: its hooks may make up entries (split a fused weight, gather shards over the network) that
nothing can be written back into, and may communicate inside `take`. The names are those that `state_dict()` would give
without hooks; wrappers that hide their own level in them (FSDP1, activation checkpoints) are left out here too.

A part whose class overrides `state_dict`, `_save_to_state_dict` or `get_extra_state` may keep more than tensors of its
own. Only of such a part that method is called, without hooks, and only what is not its memory is kept: `extras`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from keepstep.errors import CaptureError, RecoveryError

EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` gives
_HIDDEN_LEVELS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_LOAD_METHODS = ("load_state_dict", "_load_from_state_dict")
_OWN_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def read_memory(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live parameters and persistent buffers by name. A tied one is there under each of its names."""
    memory: dict[str, torch.Tensor] = {}
    for prefix, part in _parts(module):
        hidden = part._non_persistent_buffers_set
        tensors = [*part._parameters.items(), *((n, b) for n, b in part._buffers.items() if n not in hidden)]
        memory.update((prefix + name, tensor) for name, tensor in tensors if tensor is not None)
    if _has_flat_shards(module):  # These objects keep showing the shards.
        return {name: tensor.detach() for name, tensor in memory.items()}
    return memory


def read_extras(module: torch.nn.Module, memory: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What parts keep beside their memory, by name. Calls methods of the user's classes."""
    extras: dict[str, Any] = {}
    owned: set[int] | None = None
    for prefix, part in _odd_parts(module):
        if owned is None:
            owned = storages(memory.values())
        for name, value in _call_own(prefix, part).items():
            if prefix + name not in memory and not (isinstance(value, torch.Tensor) and storages([value]) <= owned):
                extras[prefix + name] = value
    return extras


def expected_extras(module: torch.nn.Module) -> set[str]:
    """Names of extras that are there without fail."""
    return {prefix + EXTRA_STATE for prefix, part in _odd_parts(module) if _overrides(part, "get_extra_state")}


def untaken_extras(module: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Those of these extras that no part of the module would take back: it has no method of its own that could."""
    left, untaken = set(names), set[str]()
    for prefix, part in _odd_parts(module):
        own = {name for name in left if _belongs(name, prefix, part)}
        left -= own
        if not (part._load_state_dict_pre_hooks or any(_overrides(part, name) for name in _LOAD_METHODS)):
            takes = {prefix + EXTRA_STATE} if _overrides(part, "set_extra_state") else set[str]()
            untaken |= own - takes
    return untaken | left


def write_extras(module: torch.nn.Module, extras: Mapping[str, Any], path: str) -> None:
    """Give each part what it kept beside its memory, which has been written before."""
    left = dict(extras)
    for prefix, part in _odd_parts(module):
        own = {name.removeprefix(prefix): left.pop(name) for name in list(left) if _belongs(name, prefix, part)}
        if own:
            _give(part, own, f"{path}.{prefix}".rstrip("."))
    if left:
        raise RecoveryError(
            f"{path}: {', '.join(sorted(left)[:5])} was saved, and no part of the module takes it now",
            hint="start with the code and settings that saved it",
        )


def is_odd(part: torch.nn.Module) -> bool:
    """Whether a part may keep more than its parameters and buffers."""
    return any(_overrides(part, name) for name in _OWN_METHODS)


def sharded_parts(module: torch.nn.Module) -> list[Any]:
    """The modules under `module` that FSDP manages, either kind."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return [part for part in module.modules() if isinstance(part, (FSDPModule, FullyShardedDataParallel))]


def reshard(parts: Iterable[Any]) -> None:
    """Let the parameters of modules that FSDP manages be the shards: those are the state.

    FSDP2 computes with stale weights when shards are written while a module is unsharded. FSDP1 always shows the shards
    after forward and backward.
    """
    for part in parts:
        if not _is_flat(part):
            part.reshard()


def is_plain(module: torch.nn.Module) -> bool:
    """Whether it is its parameters and buffers, and these objects always show the same memory."""
    return not (any(map(is_odd, module.modules())) or _has_flat_shards(module))


def _has_flat_shards(module: torch.nn.Module) -> bool:
    """Whether FSDP1 manages a part: it exchanges the data of the same parameters in every forward."""
    return any(map(_is_flat, sharded_parts(module)))


def _is_flat(part: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(part, FullyShardedDataParallel)


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of the memory of these tensors, as far as this rank holds it."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # that of a DTensor
    return {part.untyped_storage().data_ptr() for part in parts if part.layout is torch.strided and part.numel()}


def _parts(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for level in _HIDDEN_LEVELS:
            prefix = prefix.replace(level, "")
        yield prefix, part


def _odd_parts(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Innermost first: a part that gives the extras of its children leaves nothing new of them."""
    return ((prefix, part) for prefix, part in reversed(list(_parts(module))) if is_odd(part))


def _overrides(part: torch.nn.Module, name: str) -> bool:
    own = getattr(type(part), name)
    return (own is not getattr(torch.nn.Module, name) or name in vars(part)) and not _is_of_torch(own)


def _is_of_torch(method: Any) -> bool:
    """torch's wrappers override methods only to rename or gather what is memory."""
    return str(getattr(method, "__module__", "")).startswith(("torch.distributed.", "torch._dynamo."))


def _call_own(prefix: str, part: torch.nn.Module) -> dict[str, Any]:
    try:
        if _overrides(part, "state_dict"):
            return dict(part.state_dict())
        if _overrides(part, "_save_to_state_dict"):
            found: dict[str, Any] = {}
            part._save_to_state_dict(found, "", False)
            return found
        return {EXTRA_STATE: part.get_extra_state()}
    except Exception as error:
        where = f" of {prefix.rstrip('.')}" if prefix else ""
        raise CaptureError(f"the state{where} ({type(part).__name__}) cannot be read: {error!r}") from error


def _belongs(name: str, prefix: str, part: torch.nn.Module) -> bool:
    """Whether this part takes an extra of that name: its own ones, or those below it if it reads its children."""
    if not name.startswith(prefix):
        return False
    return _overrides(part, "state_dict") or "." not in name.removeprefix(prefix)


def _give(part: torch.nn.Module, extras: dict[str, Any], path: str) -> None:
    problems: list[str] = []
    try:
        if _overrides(part, "state_dict"):
            part.load_state_dict({**part.state_dict(), **extras})
        elif set(extras) == {EXTRA_STATE}:
            part.set_extra_state(extras[EXTRA_STATE])
        else:
            state: dict[str, Any] = {}
            part._save_to_state_dict(state, "", False)
            metadata = {"version": part._version}
            missing: list[str] = []
            unexpected: list[str] = []
            part._load_from_state_dict({**state, **extras}, "", metadata, True, missing, unexpected, problems)
            problems += [f"{name} is missing" for name in missing]
    except Exception as error:
        problems.append(repr(error))
    if problems:
        raise RecoveryError(
            f"{path} refused {', '.join(sorted(extras)[:5])}, which it gave: {'; '.join(problems[:3])}",
            hint="start with the code and settings that saved it",
        )
