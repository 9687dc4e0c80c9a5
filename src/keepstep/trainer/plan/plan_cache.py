"""The state at one boundary, and the plan for its copy. Runs inside `take`, on the training thread.

Plans are cached while every tensor is where and what it was and is written by the same optimizer. A state that stands
still is looked at in part (`stillness`); what `take` relies on is looked at in full behind it (`CachedPlan.look`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from keepstep.trainer.plan import tensor_blocks
from keepstep.trainer.plan.copy_plan import CopyPlan, PlanTurns
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.replication import Replicas
from keepstep.trainer.plan.stillness import Check, SpotCheck, Stillness
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.trainer.state.reader import StateReader, StateReading
from keepstep.trainer.state.structure import StateStructure


@dataclass(frozen=True)
class CachedPlan:
    reading: StateReading
    plan: CopyPlan
    look: Callable[[], str]
    """on the copy thread: why the snapshot is void, or nothing"""


class PlanCache:
    """Of one state, again and again."""

    def __init__(
        self,
        reader: StateReader,
        fence: OptimizerFence,
        sharing: ReplicaShares | None,
        replicas: Callable[[], Replicas],
        stillness: Stillness,
        small_bytes: int,
    ) -> None:
        """`replicas`: what other nodes hold too, as far as is known when it is asked."""
        self._reader, self._fence, self._sharing = reader, fence, sharing
        self._replicas, self._small_bytes = replicas, small_bytes
        self.stillness = stillness
        self.plans: PlanTurns | None = None
        self._signature: tensor_blocks.Signature | None = None
        self._owned: list[list[list[int]]] = []
        self._outdated = False

    def outdate(self) -> None:
        """From any thread: the next snapshot needs a new layout."""
        self._outdated = True

    def begin(self) -> tuple[StateReading, CopyPlan]:
        """The first look, whatever was seen before."""
        reading = self._reader.read()
        self.plans = self._make_plans(reading)
        return reading, self.plans.first

    def at(self, step: int) -> CachedPlan:
        glance = self.stillness.glance()
        reading = self._reader.read(glance.share)
        if glance.share is not None and not self._is_known(reading, glance.share):
            glance = self.stillness.start_again()
            reading = self._reader.read()
        if glance.share is None and not self._is_known(reading, None):
            self.plans = self._make_plans(reading)
            glance = self.stillness.start_again()
        assert self.plans is not None
        assert self._signature is not None
        look = partial(self._look, self._signature, self._owned, reading.relied_on, glance)
        return CachedPlan(reading, self.plans.at(step), look)

    def _look(
        self,
        signature: tensor_blocks.Signature,
        owned: list[list[list[int]]],
        relied_on: list[StateStructure],
        glance: SpotCheck,
    ) -> str:
        """At all that a `take` has relied on."""
        checks: list[Check] = [*signature.checks(), lambda: self._fence.owned() == owned]
        checks += (check for one in relied_on for check in one.checks())
        void = self.stillness.look(checks, glance, signature.close_checks())
        if void:
            self.outdate()
        return void

    def close(self) -> None:
        """Let go of every tensor."""
        self.plans = self._signature = None

    def _is_known(self, reading: StateReading, share: int | None) -> bool:
        if self._signature is None or self._outdated or self._fence.owned() != self._owned:
            return False
        return self._signature.matches(reading.found.runs, share)

    def _make_plans(self, reading: StateReading) -> PlanTurns:
        self._outdated = False  # before anything is read that it depends on
        try:
            owned = self._fence.owned()
            built = tensor_blocks.build(
                reading.tensors, reading.paths(), sharing=self._sharing, ranks_of=self._replicas().ranks_of,
                small_bytes=self._small_bytes,
            )  # fmt: skip
            plans = PlanTurns(built, self._sharing, self._fence.watched, self._small_bytes)
            self._signature = tensor_blocks.Signature(reading.tensors, reading.found.runs)
            self._owned = owned
        except BaseException:
            self._outdated = True  # the old plans must not be taken for these
            raise
        return plans
