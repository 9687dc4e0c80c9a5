"""The plans of one layout, one for each turn of its shares.

Of a replica that is kept in shares a rank reads its own chunks and those that it makes parity of. So the shares move
on from version to version: in time every rank has read all of its replica, and one that has drifted apart is found by
the audit of the keepers (PROTOCOL 51). The turn is drawn from the step, on which all ranks agree; not the step itself,
which may share a factor with the number of nodes for ever.
"""

from __future__ import annotations

import xxhash

from keepstep.layout import SHARE
from keepstep.trainer.plan.copy_plan import CopyPlan, plan_copies
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.tensor_blocks import Blocks, turned
from keepstep.trainer.state.optimizer_fence import WatchedOptimizer


class PlanTurns:
    """Valid while the tensors' addresses and shapes are; `first` is the plan at turn 0."""

    def __init__(
        self, blocks: Blocks, sharing: ReplicaShares | None, watched: list[WatchedOptimizer], small_bytes: int
    ) -> None:
        self._blocks, self._sharing = blocks, sharing
        self._watched, self._small_bytes = watched, small_bytes
        self.first = plan_copies(blocks, watched, small_bytes)
        self._num_turns = max((one.stream.n for one in blocks.shared if one.stream.mode == SHARE), default=1)
        self._known = {0: self.first}

    def at(self, step: int) -> CopyPlan:
        turn = turn_of(step, self._num_turns)
        if turn not in self._known:
            assert self._sharing is not None
            plan = plan_copies(turned(self._blocks, self._sharing, turn), self._watched, self._small_bytes)
            plan.history = self.first.history
            self._known[turn] = plan
        return self._known[turn]


def turn_of(step: int, num_turns: int) -> int:
    return xxhash.xxh3_64_intdigest(step.to_bytes(8, "little")) % num_turns
