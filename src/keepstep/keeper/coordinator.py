"""Grants, completion and retention: which step is captured next, and which slots may be reused. Pure.

One node coordinates itself; the rules have the form that many nodes need (docs/protocol.md):

1. All ranks are granted the same step at once, at least one beyond the furthest rank: a rank captures
   at its first `take` at or after it. One grant is open at a time.
2. A rank that cannot honour it voids it for all; ranks that captured different steps void it too.
3. A slot is free if and only if its version is not in `retain` and no open grant names it.
4. With two slots a grant waits until the last one is resolved: sealed on all ranks, or void. With
   more, it waits only until all ranks have committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.types import Version

MAX_LEAD = 8


@dataclass
class OpenGrant:
    """A grant and how far each rank (by local index) has come with it."""

    serial: int
    step: int
    slots: dict[int, int]
    committed: dict[int, Version] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    void: tuple[int, str] | None = None
    """who could not honour it, and why"""
    voided: set[int] = field(default_factory=set)

    def resolved_for(self, index: int) -> bool:
        """Nothing more will be written into this rank's slot under this grant."""
        return index in self.committed or index in self.voided

    @property
    def resolved(self) -> bool:
        return all(self.resolved_for(index) for index in self.slots)

    @property
    def versions(self) -> set[Version]:
        return set(self.committed.values())


@dataclass
class Coordinator:
    """The small state that decides; `members` are the local indexes that must take part."""

    every: int = 1
    num_slots: int = 2
    members: set[int] = field(default_factory=set)
    open: list[OpenGrant] = field(default_factory=list)
    complete: Version | None = None
    base: Version | None = None
    serial: int = 0
    lead: int = 1

    @property
    def retain(self) -> set[Version]:
        return {version for version in (self.complete, self.base) if version is not None}

    def why_no_grant(self) -> str:
        """Empty when the next step may be granted."""
        if not self.members:
            return "no trainer is ready"
        if not self.open:
            return ""
        latest = self.open[-1]
        if not latest.resolved:
            return f"the snapshot at step {latest.step} is still being copied"
        if len(self.open) >= self.num_slots - 1:
            return f"the snapshot at step {latest.step} is still being sealed"
        return ""

    def next_step(self, progress: int) -> int:
        step = progress + self.lead
        return -(-step // self.every) * self.every

    def grant(self, progress: int, slots: dict[int, int]) -> OpenGrant:
        """Open the next grant: `slots` says which slot each rank will write."""
        assert not self.why_no_grant(), self.why_no_grant()
        assert set(slots) == self.members, "every rank is granted, or none"
        self.serial += 1
        opened = OpenGrant(self.serial, self.next_step(progress), slots)
        self.open.append(opened)
        return opened

    def find(self, index: int, slot: int) -> OpenGrant | None:
        """The open grant under which rank `index` writes `slot`."""
        return next((grant for grant in self.open if grant.slots.get(index) == slot), None)

    def commit(self, index: int, slot: int, version: Version) -> OpenGrant | None:
        """None: a word that is said again, of a grant that is over. Grants name steps that nobody has reached."""
        grant = self.find(index, slot)
        if grant is None or version.step < grant.step:
            return None
        grant.committed[index] = version
        if len(grant.versions) > 1 and grant.void is None:
            grant.void = (index, f"ranks captured different steps: {sorted(v.step for v in grant.versions)}")
            # The grant came too late for one of them: give the next one more lead.
            self.lead = min(self.lead + 1, MAX_LEAD)
        return grant

    def refuse(self, index: int, step: int, reason: str) -> OpenGrant | None:
        """Rank `index` could not honour its grant at `step`. None: of a grant that is over."""
        waiting = (grant for grant in self.open if index in grant.slots and not grant.resolved_for(index))
        grant = next((grant for grant in waiting if grant.step <= step), None)
        if grant is not None:
            grant.voided.add(index)
            grant.void = grant.void or (index, reason)
        return grant

    def withdraw(self, index: int, reason: str) -> None:
        """Rank `index` will not write under any grant that it has not resolved."""
        for grant in self.open:
            if index in grant.slots and not grant.resolved_for(index):
                grant.voided.add(index)
                grant.void = grant.void or (index, reason)

    def fail_seal(self, index: int, slot: int, reason: str) -> OpenGrant | None:
        grant = self.find(index, slot)
        if grant is not None:
            grant.void = grant.void or (index, reason)
        return grant

    def settle(self) -> list[tuple[OpenGrant, Version | None]]:
        """Take out the grants that are over, oldest first: (grant, complete version or None when void)."""
        over: list[tuple[OpenGrant, Version | None]] = []
        while self.open:
            grant = self.open[0]
            if not grant.resolved or (grant.void is None and not grant.slots.keys() <= grant.sealed):
                break
            if grant.void is not None:
                over.append((grant, None))
            else:
                (version,) = grant.versions
                over.append((grant, version))
                self._completed(version)
            self.open.pop(0)
        return over

    def _completed(self, version: Version) -> None:
        if self.complete is None or version > self.complete:
            self.complete = version
        # A version of this incarnation stands: the one it was restored from may go.
        self.base = None
        self.lead = max(1, self.lead - 1)

    def begin(self, base: Version | None) -> None:
        """A new incarnation: nothing is open, and what it starts from is kept until it has its own."""
        self.open.clear()
        self.members.clear()
        self.base = self.complete = base
        self.lead = 1

    def forget(self, index: int) -> None:
        """A rank died or left: it resolves everything it had not written."""
        self.members.discard(index)
        self.withdraw(index, "its trainer ended")
