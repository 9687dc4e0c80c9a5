"""The grant that `take` may use next, or the reason why there is none; how long it waits, and how takes end.

The keeper writes grants into the arena's grant record, so that `take` needs no message. Each grant is used once, in the
order of serials. Called by the training thread only.

The host usually runs ahead of its devices, so `take` is called long before the device reaches that point. Skipping the
snapshot then would be wrong: by the time the device is there the keeper has sealed the last one. So `take` waits while
the devices still work on what was queued before it. A device never becomes idle because of it for longer than one
pause, and a loop that is in step with its devices never waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from keepstep.trainer.connection.keeper_link import KeeperLink
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.memory.rank_arena import PREPARING, RankArena
from keepstep.types import (
    COPYING,
    FAILED,
    LATER_STEP,
    NO_GRANT,
    NO_KEEPER,
    NO_MEMORY,
    SEALING,
    SKIP_KINDS,
    TakeCounts,
)

log = logging.getLogger("keepstep")

PAUSE_S = 0.001  # Between two checks of grant and devices: short beside a step, and it releases the GIL.
MIN_ASKED = 20  # Takes before the share of skipped ones says anything.
MAX_SKIPPED_SHARE = 0.1
START_S = 60.0  # From the first take: until then other ranks may prepare their memory (21 s for 68 GB).
ADVICE = {
    SEALING: "set arena.slots=3 or higher, or take less often (every)",
    COPYING: "set arena.slots=3 or higher, or take less often (every)",
    LATER_STEP: "set arena.slots=3 or higher, or take less often (every)",
    NO_GRANT: "see whether all ranks call restore() and take()",
    NO_KEEPER: "see the keeper's log",
    NO_MEMORY: "",  # Not counted for the warning: the arena is made or replaced once, and the log says so.
    FAILED: "see the warnings above",
}


@dataclass(frozen=True)
class Skip:
    """Why a `take` captures nothing: one of SKIP_KINDS, and a sentence."""

    kind: str
    reason: str

    @classmethod
    def copying(cls) -> Skip:
        return cls(COPYING, "the snapshot before it is still being copied")

    @classmethod
    def failed(cls, error: Exception) -> Skip:
        return cls(FAILED, str(error) or repr(error))

    @property
    def is_passing(self) -> bool:
        """Whether a grant for this very step may follow."""
        return self.kind in (SEALING, NO_GRANT)


@dataclass(frozen=True)
class SlotGrant:
    """The slot that a `take` may write."""

    view: ArenaView
    slot: int
    serial: int

    @property
    def arena_id(self) -> str:
        return self.view.arena.arena_id


class PendingWork(Protocol):
    """What devices had queued when `take` was called."""

    def is_pending(self) -> bool: ...


class TakeWait:
    """Decides, for one `take`, whether it may go on waiting."""

    def __init__(
        self,
        limit_s: float,
        queued_work: Callable[[], PendingWork],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`queued_work` marks the end of what is queued now; called when `take` first has to wait."""
        self._limit_s, self._queued_work, self._clock, self._sleep = limit_s, queued_work, clock, sleep
        self._work: PendingWork | None = None
        self._started = 0.0
        self._over = False
        self.waited_s = 0.0

    def pause(self) -> bool:
        """Wait a moment. Returns whether the caller should try again: once more after the devices became idle."""
        if self._over or not self._limit_s:
            return False
        if self._work is None:
            self._work, self._started = self._queued_work(), self._clock()
            if not self._work.is_pending():
                self._over = True
                return False
        if self.waited_s >= self._limit_s or not self._work.is_pending():
            self._over = True
            return True
        self._sleep(PAUSE_S)
        self.waited_s = self._clock() - self._started
        return True


class GrantReader:
    """Reads the grant record, and remembers which grants were used."""

    def __init__(self, link: KeeperLink, memory: RankArena) -> None:
        self._link, self._memory = link, memory
        # Arena and serial of the last grant that was used.
        self._used = ("", 0)

    def next(self, step: int) -> SlotGrant | Skip:
        """Return the grant for a `take` at `step`. It stays unused until `use`."""
        busy = self._memory.busy  # Read first: a view is replaced, and the old one closed, only while this is set.
        view = self._memory.view
        if view is None or busy:
            return Skip(NO_MEMORY, PREPARING)
        record = view.arena.grant()
        if record is None or record.incarnation != self._link.incarnation:
            return self._no_keeper() or Skip(NO_GRANT, "not granted yet: the keeper waits for all ranks")
        used_arena, used_serial = self._used
        grant = record.after(used_serial if used_arena == view.arena.arena_id else 0)
        if grant is None:
            return self._no_keeper() or Skip(SEALING, "not granted: the last snapshot is still being sealed")
        if step < grant.step:
            return Skip(LATER_STEP, f"not granted: the next snapshot is at step {grant.step}")
        return SlotGrant(view, grant.slot, grant.serial)

    def wait(self, step: int, wait: TakeWait) -> SlotGrant | Skip:
        """Wait until there is a grant for `step`, or there will be none for it, or `wait` is over.

        Meanwhile the published progress must be below `step`: the keeper grants steps that no rank has reached.
        """
        while True:
            grant = self.next(step)
            if isinstance(grant, SlotGrant) or not grant.is_passing or not wait.pause():
                return grant

    def use(self, grant: SlotGrant) -> None:
        """Mark a grant as used: it is committed or voided, and never returned again."""
        self._used = (grant.arena_id, grant.serial)

    def _no_keeper(self) -> Skip | None:
        if self._link.up:
            return None
        ended = self._link.ended
        return Skip(NO_KEEPER, f"the keeper has ended: {ended}" if ended else "the keeper is away")


class TakeStatistics:
    """Counts how takes end, and logs once when too many are skipped."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = TakeCounts()
        self._clock = clock
        self._start: float | None = None  # of the first take
        self._expected = 0  # Takes without a grant while the job starts.
        self._warned = False

    def count(self, skipped: str, waited_s: float) -> TakeCounts:
        """Add one take: `skipped` is one of SKIP_KINDS, or empty. Returns the new counts."""
        before = self.counts
        kinds = tuple(n + (kind == skipped) for kind, n in zip(SKIP_KINDS, before.skipped, strict=True))
        self.counts = replace(
            before, asked=before.asked + 1, waited=before.waited + (waited_s > 0),
            waited_us=before.waited_us + round(1e6 * waited_s), skipped=kinds,
        )  # fmt: skip
        now = self._clock()
        self._start = now if self._start is None else self._start
        self._expected += skipped == NO_GRANT and now - self._start < START_S
        if skipped:
            self._warn()
        return self.counts

    def _warn(self) -> None:
        skipped = {kind: n for kind, n in zip(SKIP_KINDS, self.counts.skipped, strict=True) if ADVICE[kind]}
        skipped[NO_GRANT] -= self._expected
        total, asked = sum(skipped.values()), self.counts.asked - sum(self.counts.skipped) + sum(skipped.values())
        if self._warned or asked < MIN_ASKED or total <= MAX_SKIPPED_SHARE * asked:
            return
        self._warned = True
        kind = max(skipped, key=lambda kind: skipped[kind])
        log.warning(
            "%d of %d takes were skipped, most often (%d) because of %r: %s",
            total, asked, skipped[kind], kind, ADVICE[kind],
        )  # fmt: skip
