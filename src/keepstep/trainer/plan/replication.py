"""Which tensors other ranks hold with the same bytes: proven by structure, never by comparing bytes.

Equal bytes prove nothing: at a warm-up from lr 0 pipeline stages look equal, and diverge one step later
(PROTOCOL 6). What counts as proof:

DDP       the parameters of a DistributedDataParallel module, over the ranks of its process group, and the
          state that torch's own optimizers keep for them; its buffers are every rank's own
DTensor   ranks of its mesh whose coordinates differ in Replicate dimensions only
named     paths that the user declares the same on all ranks (`Config.replicated`)

Everything else, and everything odd, is the rank's own: that costs network, a wrong proof would cost the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from keepstep.trainer.connection.environment import Ranks
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.state.dtensors import is_dtensor, local_tensor
from keepstep.trainer.state.objects import MODULE, OPTIMIZER, StateObjects, unwrap_optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MIN_REPLICA_BYTES = 1 << 20  # Smaller tensors are stored as the rank's own: a replica set would cost more.

# Gradient hooks after which all ranks have the same gradients. Others (post-local SGD) let parameters drift apart.
_SAME_GRADIENTS = tuple(
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}"
    for name in ("default_hooks", "powerSGD_hook", "mixed_precision_hooks")
)


class ReplicaProver:
    """How this job stores replicated state, and what is proven to be replicated."""

    def __init__(self, objects: StateObjects, sharing: ReplicaShares | None, named: str = "") -> None:
        """`sharing`: None on a single node, where everything is this rank's own. `named`: see `Config.replicated`."""
        self.sharing = sharing
        self._objects, self._named = objects, named
        self._diverged: frozenset[str] = frozenset()

    def exclude(self, paths: Iterable[str]) -> None:
        """Paths whose replicas differ, whatever the structure proves: from now on each rank's own."""
        self._diverged |= frozenset(paths)

    def prove(self) -> Replicas:
        """The proof for the state as it is now."""
        return Replicas(self._objects, self.sharing, named=self._named, diverged=self._diverged)


class Replicas:
    """The proof for the state as it is now. Made again with each layout: optimizers create their state late."""

    def __init__(
        self, items: StateObjects, sharing: ReplicaShares | None, *, named: str = "", diverged: Set[str] = frozenset()
    ) -> None:
        """`diverged`: paths whose replicas differ, whatever the structure proves."""
        self.sharing = sharing  # None on a single node: nothing is shared
        self._diverged = diverged
        self._named = tuple(prefix.strip().rstrip(".") for prefix in named.split(",") if prefix.strip())
        self._paths = {id(unwrap_optimizer(item.thing)): item.path for item in items.of(OPTIMIZER)}
        self._proven: dict[tuple[int, int], Ranks] = {}
        self._meshes: dict[Any, Ranks | None] = {}
        if sharing is not None:
            for item in items.of(MODULE):
                self._prove_parameters(item.thing)
            for optimizer in items.optimizers:
                self._prove_state(optimizer)

    def ranks_of(self, tensor: torch.Tensor, path: str) -> Ranks | None:
        """The ranks that hold these bytes, on enough nodes to matter; None: they are this rank's own."""
        part = local_tensor(tensor)
        if self.sharing is None or _is_gradient(path) or path in self._diverged:
            return None
        if part.layout is not torch.strided or part.nbytes < MIN_REPLICA_BYTES or not part.is_contiguous():
            return None
        return self.sharing.holders(self._class_of(self.sharing, tensor, path))

    def ranks_of_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, nbytes: int) -> Ranks | None:
        """The same for state of the parameter's shape that the optimizer is still to make."""
        if self.sharing is None or nbytes < MIN_REPLICA_BYTES:
            return None
        ranks = self._proven.get(_key(local_tensor(parameter))) if _updates_alike(optimizer) else None
        if ranks is None and is_dtensor(parameter):
            ranks = self._mesh_ranks(parameter)
        if ranks is None and self._is_named(f"{self._paths.get(id(optimizer), '')}.state"):
            ranks = tuple(range(len(self.sharing.world.nodes)))
        return self.sharing.holders(ranks)

    def _class_of(self, sharing: ReplicaShares, tensor: torch.Tensor, path: str) -> Ranks | None:
        ranks = self._proven.get(_key(local_tensor(tensor)))
        if ranks is not None:
            return ranks
        if is_dtensor(tensor):
            return self._mesh_ranks(tensor)
        return tuple(range(len(sharing.world.nodes))) if self._is_named(path) else None

    def _is_named(self, path: str) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}.") for prefix in self._named)

    def _prove_parameters(self, module: torch.nn.Module) -> None:
        for part in module.modules():
            if not isinstance(part, torch.nn.parallel.DistributedDataParallel):
                continue
            ranks = _group_ranks(part.process_group)
            if ranks is None or not _reduces_alike(part):
                continue
            for name, parameter in part.module.named_parameters(remove_duplicate=False):
                if name not in part.parameters_to_ignore and local_tensor(parameter).numel():
                    self._proven[_key(local_tensor(parameter))] = ranks

    def _prove_state(self, optimizer: torch.optim.Optimizer) -> None:
        """State of a parameter's shape follows from the parameter's history and its gradients, equal on all ranks."""
        if not _updates_alike(optimizer):
            return
        for parameter, state in optimizer.state.items():
            ranks = self._proven.get(_key(local_tensor(parameter))) if isinstance(parameter, torch.Tensor) else None
            if ranks is None or not isinstance(state, dict):
                continue
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and local_tensor(value).numel():
                    self._proven.setdefault(_key(local_tensor(value)), ranks)

    def _mesh_ranks(self, tensor: DTensor) -> Ranks | None:
        try:
            key = (tensor.device_mesh, tensor.placements)
            if key not in self._meshes:
                mesh = tensor.device_mesh
                self._meshes[key] = replica_ranks(mesh.mesh, mesh.get_coordinate(), tensor.placements)
            return self._meshes[key]
        except Exception:  # A mesh that is not torch's own proves nothing.
            return None


def replica_ranks(mesh: torch.Tensor, coordinate: Iterable[int] | None, placements: Iterable[Any]) -> Ranks | None:
    """The ranks of a mesh that hold the same local tensor as the rank at `coordinate`."""
    placements = list(placements)
    if coordinate is None or any(placement.is_partial() for placement in placements):
        return None
    if not any(placement.is_replicate() for placement in placements):
        return None
    places = zip(coordinate, placements, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else at for at, placement in places)
    return tuple(sorted(mesh[index].flatten().tolist()))


def _group_ranks(group: Any) -> Ranks | None:
    """The job's ranks in a process group; None for one that torch does not know (a fault-tolerant one, a fake)."""
    try:
        return tuple(sorted(torch.distributed.get_process_group_ranks(group)))
    except Exception:
        return None


def _reduces_alike(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether every rank gets the same gradients from this DDP."""
    hooks = [hook for hook, _ in getattr(module, "_comm_hooks", [])]
    return all(getattr(hook, "__module__", "") in _SAME_GRADIENTS for hook in hooks)


def _updates_alike(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is torch's own: others (ZeRO, distributed Muon or Shampoo) keep state on some ranks only."""
    steps = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return steps.__module__.startswith("torch.optim.") and steps is not torch.optim.Optimizer


def _is_gradient(path: str) -> bool:
    """Between accumulation steps gradients are not reduced yet."""
    return path == "grads" or path.startswith("grads.")


def _key(part: torch.Tensor) -> tuple[int, int]:
    """A range of memory: tensors that cover exactly the same range have the same bytes."""
    return part.data_ptr(), part.nbytes
