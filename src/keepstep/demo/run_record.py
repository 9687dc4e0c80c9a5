"""The record of one run: its events, the failures, and their outcomes.

Pure: nothing here starts, kills or waits. The events are the JSON lines that rank 0 of `examples/gpt.py` logs, the
results are the digests that every rank writes at its end; `RunRecord.observe` reads the first, `comparison` the second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

SOURCES = ("", "memory", "parity", "disk")


# Events of the training


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started"):
    """An incarnation has started."""

    incarnation: int
    pids: list[int]  # by rank
    nodes: list[str]
    time: float


class RestoreRecord(msgspec.Struct, frozen=True, tag_field="event", tag="restored"):
    """`restore()` has returned a step."""

    step: int
    sources: list[str]  # by rank
    seconds: float
    time: float

    @property
    def source(self) -> str:
        """The most distant source of any rank."""
        return max(self.sources, key=SOURCES.index)


class StepRecord(msgspec.Struct, frozen=True, tag_field="event", tag="step"):
    """A step is finished."""

    step: int
    loss: float
    loss_hex: str
    incarnation: int
    time: float


Event = Started | RestoreRecord | StepRecord


class FinalState(msgspec.Struct, frozen=True):
    """The final state of one rank, as digests."""

    sha256: str
    parts: dict[str, str]


# Failures and their outcomes


class PlannedFailure(msgspec.Struct, frozen=True):
    """A failure that the demo causes."""

    name: str
    after: float  # the fraction of the run that is done by then
    target: Literal["trainer", "keeper", "nodes"]
    positions: tuple[int, ...]  # the nodes that fail, by rank


# The last one includes the coordinator, and the node that serves the trainers' store.
FAULTS = (
    PlannedFailure("a trainer", after=1 / 6, target="trainer", positions=(2,)),
    PlannedFailure("a keeper", after=1 / 3, target="keeper", positions=(1,)),
    PlannedFailure("a node", after=1 / 2, target="nodes", positions=(3,)),
    PlannedFailure("two nodes at once", after=3 / 4, target="nodes", positions=(0, 2)),
)


class FailureOutcome(msgspec.Struct):
    """One failure: created when it is caused, completed by the first step after it."""

    fault: PlannedFailure
    killed_at: float
    last_step: int
    restored: RestoreRecord | None = None
    resumed_at: float | None = None
    restarts: int = 0

    @property
    def expects_restart(self) -> bool:
        return self.fault.target != "keeper"

    @property
    def expected_source(self) -> str | None:
        """The state of dead processes is in the memory of their nodes, that of a dead node in parity on the others."""
        return {"trainer": "memory", "keeper": None, "nodes": "parity"}[self.fault.target]

    @property
    def steps_lost(self) -> int:
        """Finished steps that were repeated."""
        if not self.restarts:
            return 0
        return max(0, self.last_step - (self.restored.step if self.restored else -1))


@dataclass
class RunRecord:
    """Everything known about one run: grows by `observe`, and decides nothing else."""

    steps: list[StepRecord] = field(default_factory=list)
    outcomes: list[FailureOutcome] = field(default_factory=list)
    results: list[FinalState] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    duration_s: float = 0.0
    unprovoked: int = 0  # restarts without a failure that the demo caused

    def observe(self, event: Event) -> None:
        match event:
            case Started():
                self._observe_start(event)
            case RestoreRecord() if not self.settled:
                self.outcomes[-1].restored = event
            case StepRecord():
                self._observe_step(event)

    def _observe_start(self, event: Started) -> None:
        if self.pids and self.settled:
            self.unprovoked += 1
        elif self.pids:
            self.outcomes[-1].restarts += 1
        self.pids = event.pids

    def _observe_step(self, event: StepRecord) -> None:
        self.steps.append(event)
        if self.settled:
            return
        outcome = self.outcomes[-1]
        if outcome.expects_restart and not outcome.restarts:
            outcome.last_step = event.step  # finished before the signal arrived
        elif event.time > outcome.killed_at:
            outcome.resumed_at = event.time

    @property
    def settled(self) -> bool:
        """Whether training has continued after every failure so far."""
        return not self.outcomes or self.outcomes[-1].resumed_at is not None

    def median_step_s(self) -> float:
        pauses = [after.time - before.time for before, after in zip(self.steps, self.steps[1:], strict=False)]
        return statistics.median(pauses) if pauses else 0.0


def last_disturbance(run: RunRecord) -> int:
    """The newest step at the last failure; -1 when there was none."""
    return run.outcomes[-1].last_step if run.outcomes else -1


def find_due(run: RunRecord, event: Event, *, faults: Sequence[PlannedFailure], steps: int) -> PlannedFailure | None:
    """The failure to cause after this event: the next one, once its step is done and the previous one is over."""
    num_done = len(run.outcomes)
    if num_done == len(faults) or not run.settled or not isinstance(event, StepRecord):
        return None
    return faults[num_done] if event.step + 1 >= faults[num_done].after * steps else None
