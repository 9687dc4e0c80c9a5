"""The grant that `take` may use next, or the reason why there is none.

The keeper writes grants into the arena's grant record, so that `take` needs no message. Each grant is used once, in the
order of serials. Called by the training thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.trainer.capture.take_wait import TakeWait
from keepstep.trainer.connection.keeper_link import KeeperLink
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.memory.rank_arena import PREPARING, RankArena
from keepstep.types import COPYING, FAILED, LATER_STEP, NO_GRANT, NO_KEEPER, NO_MEMORY, SEALING


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
