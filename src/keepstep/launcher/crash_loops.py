"""Whether the trainers fail again and again. Pure: how incarnations ended goes in, the reason to give up comes out.

A start (of the trainers of all nodes) is fruitless when no version captured in its incarnation became complete.
Restarting does not help, and the job ends, when

- `restore()` failed with the same error, but for addresses in it, from the same version, in `FAILED_RESTORES` starts in
  a row, or
- `FRUITLESS_STARTS` starts in a row began from the same version (or from none), and a trainer ended by itself in the
  same way (exit code, or a signal that a process raises itself).

A start after which a trainer was killed from outside, or a node was lost, says nothing of the program: it ends the row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keepstep.control.membership import IncarnationEnd
from keepstep.types import Version

FAILED_RESTORES = 2
ADDRESS = re.compile(r"\b0x[0-9a-f]+")  # of an object, in the text of an error: another one in each process
FRUITLESS_STARTS = 3


@dataclass(frozen=True)
class CrashLoop:
    """Why the job ends."""

    problem: str
    version: Version | None  # What the trainers started from.


@dataclass(frozen=True)
class FruitlessStart:
    """One start of the trainers of all nodes."""

    version: Version | None
    exits: frozenset[str]
    restore_errors: frozenset[str]
    error: str  # What a trainer reported, for people.


class FailureHistory:
    """The last starts in a row that got nowhere."""

    def __init__(self) -> None:
        self._starts: list[FruitlessStart] = []
        self._round = 0

    def add(self, ends: Sequence[IncarnationEnd], *, agents: Collection[str], agents_before: Collection[str]) -> None:
        """Add the incarnation before the round that begins now: what its nodes report, and the agents of both."""
        round_ = max((end.round for end in ends), default=0)
        if round_ <= self._round:
            return  # The round after that one was ended before it began: it is added already.
        self._round = round_
        ends = [end for end in ends if end.round == round_]
        lost = not set(agents_before) <= set(agents)
        if lost or any(end.killed or end.progressed for end in ends):
            self._starts.clear()
            return
        complete = [end.complete for end in ends if end.complete is not None]
        start = FruitlessStart(
            max(complete, default=None),
            frozenset(end.exit for end in ends if end.exit),
            frozenset(ADDRESS.sub("0x...", end.restore_error) for end in ends if end.restore_error),
            next((end.error for end in ends if end.exit and end.error), ""),
        )
        if self._starts and self._starts[-1].version != start.version:
            self._starts.clear()
        self._starts = [*self._starts, start][-FRUITLESS_STARTS:]

    def crash_loop(self) -> CrashLoop | None:
        """None while another start may help."""
        restores = self._starts[-FAILED_RESTORES:]
        same = frozenset.intersection(*(start.restore_errors for start in restores)) if restores else frozenset()
        if same and len(restores) == FAILED_RESTORES:
            problem = f"restore() has failed in the same way in {FAILED_RESTORES} starts in a row: {min(same)}"
            return CrashLoop(problem, restores[-1].version)
        if len(self._starts) < FRUITLESS_STARTS:
            return None
        exits = frozenset.intersection(*(start.exits for start in self._starts))
        if not exits:
            return None
        last = self._starts[-1]
        how = f"{min(exits)}: {last.error}" if last.error else min(exits)
        origin = f"from {last.version}" if last.version is not None else "from the beginning"
        problem = (
            f"the trainers started {FRUITLESS_STARTS} times {origin} and failed each time before another "
            f"snapshot was complete ({how})"
        )
        return CrashLoop(problem, last.version)
