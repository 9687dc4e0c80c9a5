"""Everything that is planned about one state: what is replicated, the plan of each copy, the memory for it.

Used by the training thread; the copy thread validates plans through `plans`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch

from keepstep.config import Config
from keepstep.layout import SnapshotSize
from keepstep.trainer.connection.environment import World
from keepstep.trainer.plan import arena_size
from keepstep.trainer.plan.copy_plan import SMALL_BYTES, CopyPlan
from keepstep.trainer.plan.plan_cache import CachedPlan, PlanCache
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.replication import ReplicaProver
from keepstep.trainer.state.module_memory import reshard, sharded_parts
from keepstep.trainer.state.objects import MODULE, StateObjects
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.trainer.state.reader import StateReader
from keepstep.trainer.state.side_effects import FirstQuestions


@dataclass(frozen=True)
class StateForecast:
    """What snapshots will need, together with the optimizer state that does not exist yet."""

    size: SnapshotSize
    device_bytes: dict[torch.device, int]  # On each CUDA device, spread as the state is now.
    codes: set[tuple[int, int]]  # (k, m) of the parity that is computed while copying.
    cached: CachedPlan  # Of the state as it is now.


class StatePlanner:
    """Plans the snapshots of one state."""

    def __init__(self, objects: StateObjects, fence: OptimizerFence, world: World | None, config: Config) -> None:
        """`world`: None on a single node, where everything is this rank's own."""
        self._objects, self._fence, self._grads = objects, fence, config.grads
        parity = config.parity
        shares = ReplicaShares(world, parity.replicated, parity.losses, parity.group_size) if world else None
        self.replication = ReplicaProver(objects, shares, config.replicated)
        self._sharded = [part for item in objects.of(MODULE) for part in sharded_parts(item.thing)]
        reader = StateReader(objects, rng=config.rng, grads=config.grads, questions=FirstQuestions(objects))
        self.plans = PlanCache(
            reader, fence, self.replication, small_bytes=SMALL_BYTES, unstable=bool(self._sharded)
        )  # fmt: skip

    def forecast(self, restored: SnapshotSize | None = None) -> StateForecast:
        """Estimate what snapshots will need, before the first step; at least as much as the restored one."""
        self.reshard()
        cached = self.plans.prepare()
        self._fence.muted = True
        try:
            missing = arena_size.missing_state(self._objects.optimizers, self.replication.prove())
            missing += arena_size.missing_grads(self._objects.optimizers) if self._grads else []
        finally:
            self._fence.muted = False
        values_bytes = len(cached.reading.values)
        skipped = [item for item in self._objects.all if item.path in cached.reading.skipped]
        held, inline_bytes = arena_size.held_by(skipped, cached.reading.tensors)
        values_bytes = max(values_bytes + inline_bytes, restored.values_bytes if restored else 0)
        size = arena_size.need_of(cached.plan, values_bytes, missing + held, self.replication.sharing)
        if restored is not None:
            size = msgspec.structs.replace(size, payload_bytes=max(size.payload_bytes, restored.payload_bytes))
        return StateForecast(size, _device_bytes(cached.plan, size), _codes(cached.plan), cached)

    def arena_for(self, plan: CopyPlan, values_bytes: int) -> SnapshotSize:
        """Size of an arena for a state that has outgrown its own."""
        return arena_size.need_of(plan, values_bytes, [], self.replication.sharing)

    def exclude(self, paths: Iterable[str]) -> None:
        """Plan replicas that differ between nodes as each rank's own, from the next snapshot on."""
        self.replication.exclude(paths)
        self.plans.outdate()

    def reshard(self) -> None:
        """Free unsharded parameters of FSDP: the sharded ones are the state."""
        if self._sharded:
            reshard(self._sharded)

    def lookup(self, step: int) -> CachedPlan:
        """Read the state as it is now, and return it with the plan of its copy."""
        return self.plans.lookup(step)

    def close(self) -> None:
        """Release every tensor."""
        self.plans.close()


def _device_bytes(plan: CopyPlan, size: SnapshotSize) -> dict[torch.device, int]:
    now: Counter[torch.device] = Counter()
    for op in plan.ops:
        now[op.device] += op.size_bytes
    total = sum(now.values())
    return {d: size.payload_bytes * n // total for d, n in now.items() if d.type == "cuda"}


def _codes(plan: CopyPlan) -> set[tuple[int, int]]:
    return {(replicas.n - replicas.m, replicas.m) for replicas in plan.layout.replica_sets if replicas.m}
