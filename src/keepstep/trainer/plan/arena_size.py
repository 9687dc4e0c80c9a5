"""Size of the arena, before optimizer state exists.

Optimizers create their state at their first step. It is predicted by stepping the same class on one tiny CPU tensor per
parameter group; the first real `take` corrects a wrong prediction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.layout import CHUNK_BYTES, ReplicaSet, SnapshotSize, align, num_chunks
from keepstep.trainer.connection.environment import Ranks
from keepstep.trainer.plan.copy_plan import CopyPlan
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.replication import Replicas
from keepstep.trainer.state.dtensors import local_tensor
from keepstep.trainer.state.objects import MAX_NESTING, StateObject
from keepstep.trainer.state.reader import INLINE_BYTES, INLINE_KINDS, local_part

log = logging.getLogger("keepstep")

VALUES_SPARE_BYTES = 1 << 20  # For values that grow: loss lists, shuffle buffers, loader state.
LAYOUT_SPARE_BYTES = 1 << 16
ENTRY_BYTES = 256
CHUNK_LISTED_BYTES = 8
REFERENCE_BYTES = 64
TINY = (2, 2)


@dataclass(frozen=True)
class MissingTensor:
    """A tensor that does not exist yet."""

    size_bytes: int
    ranks: Ranks | None = None  # the ranks that will hold it; None: this rank alone


def need_of(
    plan: CopyPlan, values_bytes: int, missing: list[MissingTensor], sharing: ReplicaShares | None = None
) -> SnapshotSize:
    """Size of the state as it is now, with the missing tensors."""
    unique = plan.layout.unique_bytes + sum(align(tensor.size_bytes) for tensor in missing if tensor.ranks is None)
    shared = _shared_bytes(plan.layout.replica_sets, missing, sharing)
    listed = ENTRY_BYTES * len(missing) + CHUNK_LISTED_BYTES * num_chunks(shared)
    return SnapshotSize(
        layout_bytes=len(plan.encoded) + len(plan.encoded) // 4 + LAYOUT_SPARE_BYTES + listed,
        values_bytes=2 * values_bytes + VALUES_SPARE_BYTES + REFERENCE_BYTES * len(missing),
        payload_bytes=unique + shared,
    )


def _shared_bytes(streams: tuple[ReplicaSet, ...], missing: list[MissingTensor], sharing: ReplicaShares | None) -> int:
    """This rank's part of the replica sets as they will be; each begins at a multiple of a chunk."""
    if sharing is None:
        return 0
    sizes = [(stream.ranks, align(stream.size_bytes)) for stream in streams]
    for ranks in {tensor.ranks for tensor in missing if tensor.ranks is not None}:
        more = sum(align(tensor.size_bytes) for tensor in missing if tensor.ranks == ranks)
        index = next((i for i, (holders, _) in enumerate(sizes) if holders == ranks), None)
        if index is None:
            sizes.append((ranks, more))
        else:
            sizes[index] = (ranks, sizes[index][1] + more)
    return sum(align(sharing.stored_bytes(ranks, size), CHUNK_BYTES) for ranks, size in sizes)


def larger(need: SnapshotSize, *, times: int) -> SnapshotSize:
    """The first correction is exact. State that goes on growing gets half as much again, or it would never catch up."""
    payload = need.payload_bytes + (need.payload_bytes // 2 if times else 0)
    return SnapshotSize(need.layout_bytes, need.values_bytes, payload)


def missing_state(optimizers: list[torch.optim.Optimizer], replicas: Replicas) -> list[MissingTensor]:
    """The state tensors that these optimizers have not created yet."""
    missing: list[MissingTensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            waiting = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
            if waiting:
                missing += _predict(optimizer, group, waiting, replicas)
    return missing


def held_by(items: Iterable[StateObject], found: Iterable[torch.Tensor]) -> tuple[list[MissingTensor], int]:
    """Tensors in the attributes of objects that are not asked for their state yet, and the bytes of inline ones.

    Without those that were found elsewhere. What lies deeper is found at the first `take`.
    """
    known = {_address(tensor) for tensor in found}
    sizes: dict[int, tuple[int, bool]] = {}  # by storage: bytes of the largest tensor in it, and whether it is a value
    left: list[tuple[Any, int, bool]] = [
        (vars(item.thing), 0, item.kind in INLINE_KINDS) for item in items if hasattr(item.thing, "__dict__")
    ]
    while left:
        value, depth, inline = left.pop()
        if isinstance(value, torch.Tensor):
            size = local_tensor(value).nbytes
            if _address(value) not in known and size > sizes.get(_address(value), (0, False))[0]:
                sizes[_address(value)] = size, inline and size <= INLINE_BYTES and value.device.type == "cpu"
        elif depth < MAX_NESTING and isinstance(value, (dict, list, tuple)):
            left += [(item, depth + 1, inline) for item in (value.values() if isinstance(value, dict) else value)]
    large = [MissingTensor(size) for size, is_value in sizes.values() if not is_value]
    return large, sum(size for size, is_value in sizes.values() if is_value)


def _address(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else id(local)


def missing_grads(optimizers: list[torch.optim.Optimizer]) -> list[MissingTensor]:
    """The gradients that do not exist yet."""
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return [MissingTensor(local_part(p, "parameter").nbytes) for p in parameters if p.requires_grad and p.grad is None]


def _predict(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], waiting: list[torch.Tensor], replicas: Replicas
) -> list[MissingTensor]:
    if "history_size" in group:
        return [MissingTensor(size) for size in _predict_history(group, waiting)]
    created = {dtype: _step_tiny(optimizer, group, dtype) for dtype in {parameter.dtype for parameter in waiting}}
    missing = []
    for parameter in waiting:
        local = local_part(parameter, "parameter")
        for shape, item_bytes in created[parameter.dtype]:
            if shape == TINY:
                size = local.numel() * item_bytes
                missing.append(MissingTensor(size, replicas.ranks_of_state(optimizer, parameter, size)))
            else:
                missing.append(MissingTensor(item_bytes))
    return missing


def _predict_history(group: dict[str, Any], waiting: list[torch.Tensor]) -> list[int]:
    """LBFGS keeps flat vectors of all parameters: two and a scalar per step of its history, and a few more."""
    flat = sum(local_part(parameter, "parameter").nbytes for parameter in waiting)
    history = int(group["history_size"])
    return [flat] * (2 * history + 4) + [8] * (2 * history + 4)


def _step_tiny(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> list[tuple[Any, int]]:
    """(shape, element or total bytes) of each state tensor of one tiny parameter after one step."""
    options = {key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)}
    options.update({key: False for key in ("capturable", "fused") if options.get(key)})
    before = torch.get_rng_state()
    try:
        tiny = torch.nn.Parameter(torch.zeros(TINY, dtype=dtype))
        tiny.grad = torch.zeros_like(tiny)
        twin = type(optimizer)([{"params": [tiny], **options}], **_required(optimizer, options))
        twin.step()
        return [
            (tuple(value.shape), value.element_size() if tuple(value.shape) == TINY else value.nbytes)
            for value in twin.state[tiny].values()
            if isinstance(value, torch.Tensor)
        ]
    except Exception as error:
        # Two moments in full precision and a counter is what most optimizers keep; the first take corrects it.
        log.debug("the state of %s could not be predicted (%r); assuming two fp32 moments", type(optimizer), error)
        return [(TINY, 4), (TINY, 4), ((), 8)]
    finally:
        torch.set_rng_state(before)


def _required(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the constructor insists on, from the group."""
    import inspect

    wanted = inspect.signature(type(optimizer)).parameters
    return {
        name: options[name]
        for name, parameter in wanted.items()
        if name in options and parameter.default is inspect.Parameter.empty
    }
