"""Cache of the copy plan. `lookup` runs inside `take`, on the training thread; `validate` on the copy thread.

A plan is valid while every place of the state holds the same tensor at the same address, and the same optimizer writes
it. To check all of them takes the training thread about a microsecond per tensor. So the rule is:

lookup    checks everything until `SETTLED_AFTER` snapshots in a row were found unchanged. From then on it checks one
          random subset of the places. Subsets are spread over the whole state, so that a change of many tensors
          (`module.to`, a swap with averaged weights, off-loading) shows in each of them. A change leads to a new plan.
validate  checks everything that a `lookup` relied on, before the commit. A change that the lookup had missed voids the
          snapshot, and the next lookup makes a new plan.

A state is `unstable` when it moves whenever training goes on, as FSDP's does in forward: it changed between a full
check and its validation, or changes were missed `MAX_MISSED` times. Then every lookup checks everything.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from keepstep.trainer.plan.copy_plan import CopyPlan, PlanTurns
from keepstep.trainer.plan.replication import ReplicaProver
from keepstep.trainer.plan.tensor_blocks import TensorAddresses, build
from keepstep.trainer.state.objects import MODULE, OPTIMIZER, PLAIN, STATEFUL
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.trainer.state.reader import StateReader, StateReading
from keepstep.trainer.state.structure import MAX_SUBSETS, Check

SETTLED_AFTER = 3  # Full checks in `lookup`, and as many in `validate`, before a subset is enough.
MAX_MISSED = 3  # Changes that a spot check missed, before a state is never spot-checked again.

# For this long checks may hold the interpreter. To get it back from a thread that never waits takes ten times as long,
# so it is not released after every check: the snapshot would be committed late.
HOLD_S = 0.0005

# What a program updates by itself; loaders and generators change whenever a batch is fetched.
UPDATED = (MODULE, OPTIMIZER, STATEFUL, PLAIN)

MOVED = "a tensor of the state was moved or replaced without being noticed inside take"


@dataclass
class PlannedState:
    """One layout of the state: its plans, and what they were made from."""

    plans: PlanTurns
    addresses: TensorAddresses
    owned: list[list[list[int]]]  # parameters by optimizer
    full_checks: int = 0  # Passed since the last change. Written by `validate` only.


@dataclass(frozen=True)
class CachedPlan:
    """A reading of the state, the plan of its copy, and how much of the state was checked for it."""

    reading: StateReading
    plan: CopyPlan
    state: PlannedState
    subset: int | None  # None: everything


class PlanCache:
    """The plans of one state, from snapshot to snapshot."""

    def __init__(
        self,
        reader: StateReader,
        fence: OptimizerFence,
        replication: ReplicaProver,
        *,
        small_bytes: int,
        unstable: bool = False,
    ) -> None:
        """`unstable`: the state is known to move."""
        self._reader, self._fence, self._replication = reader, fence, replication
        self._small_bytes = small_bytes
        self.unstable = unstable
        self.current: PlannedState | None = None
        self._missed = 0
        self._outdated = False
        self._random = random.Random()

    def outdate(self) -> None:
        """From any thread: the next lookup makes a new layout."""
        self._outdated = True

    def prepare(self) -> CachedPlan:
        """Make a new plan, for the state as it is before the first step."""
        reading = self._reader.read(before_first_step=True)
        self.current = self._make(reading)
        self._outdated = bool(reading.skipped)
        return CachedPlan(reading, self.current.plans.first, self.current, None)

    def lookup(self, step: int) -> CachedPlan:
        """The state as it is now, and the plan of its copy."""
        subset = self._choose_subset()
        reading = self._reader.read(subset)
        if subset is not None and not self._is_current(reading, subset):
            assert self.current is not None
            # A new object: validations of earlier lookups count for the old one.
            subset, self.current = None, replace(self.current, full_checks=0)
            reading = self._reader.read()
        if subset is None and not self._is_current(reading, None):
            self.current = self._make(reading)
        assert self.current is not None
        return CachedPlan(reading, self.current.plans.at(step), self.current, subset)

    def validate(self, cached: CachedPlan) -> str:
        """Check all that a lookup relied on. Returns why its snapshot is void, or nothing."""
        state = cached.state
        if not _all_pass(state.addresses.geometry_checks()):  # `lookup` does not check it: training never changes it
            return self._void()
        if self.unstable and cached.subset is None:
            return ""  # Everything was checked, and nothing is to be learned.
        if _all_pass(self._checks(cached)):
            state.full_checks += 1
            return ""
        if cached.subset is None:  # It was unchanged at the lookup and has moved since.
            self.unstable = True
            return ""
        self._missed += 1
        self.unstable = self.unstable or self._missed >= MAX_MISSED
        return self._void()

    def close(self) -> None:
        """Release every tensor."""
        self.current = None

    def _choose_subset(self) -> int | None:
        state = self.current
        if state is None or self._outdated or self.unstable or state.full_checks < SETTLED_AFTER:
            return None
        return self._random.randrange(MAX_SUBSETS)

    def _is_current(self, reading: StateReading, subset: int | None) -> bool:
        state = self.current
        if state is None or self._outdated or self._fence.owned() != state.owned:
            return False
        return state.addresses.unchanged(reading.found.runs, subset)

    def _checks(self, cached: CachedPlan) -> Iterable[Check]:
        yield from cached.state.addresses.checks()
        yield lambda: self._fence.owned() == cached.state.owned
        for structure in cached.reading.relied_on:
            yield from structure.checks()

    def _void(self) -> str:
        self.outdate()
        return MOVED

    def _make(self, reading: StateReading) -> PlannedState:
        self._outdated = False  # before anything is read that the layout depends on
        try:
            owned, sharing = self._fence.owned(), self._replication.sharing
            blocks = build(
                reading.tensors, reading.paths(), sharing=sharing, ranks_of=self._replication.prove().ranks_of,
                small_bytes=self._small_bytes,
            )  # fmt: skip
            updated = {item.path for item in self._reader.items.all if item.kind in UPDATED}
            self._fence.cover(reading.tensors_of(updated), self._small_bytes)
            plans = PlanTurns(blocks, sharing, self._fence.watched, self._small_bytes)
            return PlannedState(plans, TensorAddresses(reading.tensors, reading.found.runs), owned)
        except BaseException:
            self._outdated = True  # the old plans are not those of this state
            raise


def _all_pass(checks: Iterable[Check]) -> bool:
    """Each check runs in one call of C and holds the interpreter, which the training thread may be waiting for."""
    since = time.perf_counter()
    for check in checks:
        if not check():
            return False
        if time.perf_counter() - since > HOLD_S:
            time.sleep(0)
            since = time.perf_counter()
    return True
