"""What the keeper decides. Pure: no clock, socket, file or thread; `handle` takes an event and returns effects.

The life of an incarnation:

    waiting ──register──▶ fencing ──old trainers dead──▶ restoring ──decided──▶ serving
                             ▲                         (seal what was committed,      │
                             └────────── a trainer of the next round registers ◀──────┘
                                                        plan, verify, else re-plan)

Rules (numbers of docs/protocol.md): an incarnation opens only when every trainer of older ones is dead
(8); a committed slot found after a crash is sealed before anything is decided (6); what to restore is
decided once per incarnation, and only failed verification of a version's own bytes counts against it
(9); the lease runs only when neither launcher nor trainer is left (12).

    node       what is known             members    who is there, incarnations, the fence
    arenas     the memory of the ranks   snapshots  grants, completion, retention
    restoring  the way back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.control.messages import Committed, Goodbye, Loaded, Void, WantArena, WantRestore
from keepstep.keeper.node import arenas, orders, protection, restore, snapshots, trainers
from keepstep.keeper.node.effects import Effect, End
from keepstep.keeper.node.events import (
    ArenaAdded,
    ArenaRefused,
    Conn,
    Event,
    ExchangeAdvanced,
    FromTrainer,
    LauncherSeen,
    MembershipSet,
    ParityPlaced,
    PeerLink,
    PeerMessage,
    ProcessDied,
    ReplicaDigestsRead,
    SlotSealed,
    SlotVerified,
    SnapshotFetched,
    Tick,
    TrainerRegisters,
)
from keepstep.keeper.node.state import GrantPage, NodeState


class Core(NodeState):
    """One node of one run. `handle` is the only way in."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; returns what is to be done, in order."""
        self.now = max(now, self.now)
        self.effects, self.touched = [], True
        _DISPATCH[type(event)](self, event)
        orders.follow(self)
        self._watch_lease()
        said_last, self.said_last = self.said_last, []
        return [*self.effects, *said_last]

    def granted(self, index: int) -> GrantPage | None:
        """The grants that this rank may use now: what must stand in its arena."""
        own = self.last_grant.get(index)
        if own is None:
            return None
        serials = {grant.serial for grant in own.grant.both}
        usable = any(grant.serial in serials and not grant.resolved_for(index) for grant in self.grants.open)
        return own if usable else None

    def _watch_lease(self) -> None:
        in_use = bool(self.launchers or self.strangers) or any(m.alive for m in self.members.values())
        in_use = in_use or (self.opening is not None and self.opening.wanted)
        in_use = in_use or (self.limits.sidecar and not self.arenas and not self.members)
        if in_use:
            self.lease_since = None
        elif self.lease_since is None:
            self.lease_since = self.now
        elif self.now - self.lease_since >= self.limits.lease_s:
            self.do(End("the lease ran out: no launcher and no trainer is left"))

    def lease_left_s(self) -> float | None:
        if self.lease_since is None:
            return None
        return max(0.0, self.limits.lease_s - (self.now - self.lease_since))


def _sealed(node: NodeState, event: SlotSealed) -> None:
    if snapshots.sealed(node, event):
        snapshots.advance(node)


def _tick(node: NodeState, event: Tick) -> None:
    trainers.try_open(node)
    trainers.watch_orphans(node)
    orders.watch_peers(node)


def _from_trainer(node: NodeState, event: FromTrainer) -> None:
    _FROM_TRAINER[type(event.message)](node, event.conn, event.message)


_FROM_TRAINER: dict[type, Callable[[NodeState, Conn, Any], None]] = {
    WantRestore: restore.restore_wanted,
    WantArena: arenas.arena_wanted,
    Loaded: restore.loaded,
    Committed: snapshots.committed,
    Void: snapshots.void,
    Goodbye: trainers.said_goodbye,
}
_DISPATCH: dict[type, Callable[[NodeState, Any], None]] = {
    TrainerRegisters: trainers.register,
    FromTrainer: _from_trainer,
    LauncherSeen: trainers.launcher_seen,
    ProcessDied: trainers.died,
    ArenaAdded: arenas.arena_added,
    ArenaRefused: arenas.arena_refused,
    SlotSealed: _sealed,
    SlotVerified: restore.verified,
    Tick: _tick,
    MembershipSet: orders.members_set,
    PeerMessage: orders.peer_said,
    PeerLink: orders.peer_link,
    SnapshotFetched: restore.brought_in,
    ParityPlaced: protection.placed,
    ExchangeAdvanced: protection.moved,
    ReplicaDigestsRead: orders.shares_read,
}
