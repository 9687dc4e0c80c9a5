"""What the keeper decides. Pure: no clock, socket, file or thread; `handle` takes an event and returns effects.

States of an incarnation:

    waiting ──register──▶ fencing ──old trainers dead──▶ restoring ──planned──▶ serving
                             ▲                       (seal what was committed,     │
                             └───── a trainer of the next round registers ◀────────┘
                                                      plan, verify, else re-plan)

Rules (numbers of docs/protocol.md): an incarnation opens only when every trainer of older ones is dead
(8); a committed slot found after a crash is sealed before anything is decided (6); what to restore is
decided once per incarnation, and only failed verification of a version's own bytes counts against it
(9); the lease runs only when neither launcher nor trainer is left (12).

`state` lists the sections and their owners. Each module imports only those before it, and none imports `core`:

    grants < state < arenas, protection < snapshots, restore < orders, trainers < core
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.control.messages import Committed, Failed, Goodbye, Loaded, NodeCard, Void, WantArena, WantRestore
from keepstep.errors import KeeperError
from keepstep.keeper.node import arenas, events, orders, protection, restore, snapshots, trainers
from keepstep.keeper.node.effects import DiscardFetchedArena, Effect, End, KeepFetchedArena
from keepstep.keeper.node.state import NodeState, RegisteredTrainer

# No rank reports anything with these, and no slot changes: there is no grant to take up.
NOT_OF_RANKS = (
    events.Tick, events.MembershipSet, events.PeerMessage, events.PeerLink, events.ParityPlaced,
    events.ExchangeAdvanced, events.ReplicaDigestsRead,
)  # fmt: skip


class Core(NodeState):
    """One node of one run. `handle` is the only way in."""

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """Take in one event; returns what is to be done, in order."""
        self.now = max(now, self.now)
        self.begin_event()
        orders.begin_event(self)
        _HANDLERS[type(event)](self, event)
        if not isinstance(event, NOT_OF_RANKS):
            snapshots.take_up_grants(self)
        orders.follow(self)
        self._watch_lease()
        return [*self.effects, *self.effects_last]

    def open_network(self, card: NodeCard, *, report_number: int) -> None:
        """Peers reach this keeper at `card`; its reports count on from a number that no earlier keeper reached."""
        self.card = card
        orders.count_reports_from(self, report_number)

    def _watch_lease(self) -> None:
        node = self.trainers
        in_use = bool(node.launchers or node.unregistered) or any(t.alive for t in node.registered.values())
        in_use = in_use or (node.opening is not None and node.opening.wanted)
        in_use = in_use or (self.sidecar and not self.arenas.by_id and not node.registered)
        if in_use:
            self.lease_since = None
        elif self.lease_since is None:
            self.lease_since = self.now
        elif self.now - self.lease_since >= self.config.keeper.lease_s:
            self.emit(End("the lease ran out: no launcher and no trainer is left"))


def _arena_added(node: NodeState, event: events.ArenaAdded) -> None:
    """An arena was created for a trainer, or adopted with everything its headers hold."""
    arenas.add(node, event)
    trainer = node.trainers.registered.get(event.local_index)
    if trainer is not None and event.ledger is None:
        arenas.move_to(node, trainer, event.arena_id)
        arenas.write_ledger(node)
    trainers.adopt_incarnation(node, event)
    if event.ledger is not None:
        orders.adopt_ledger(node, event.ledger)
    if event.writer is not None:
        trainers.adopt_writer(node, event.writer)
    if event.grant is not None:
        node.grants.adopt_record(event.local_index, event.arena_id, event.grant)
    arenas.seal_committed(node, event.arena_id)


def _snapshot_fetched(node: NodeState, event: events.SnapshotFetched) -> None:
    """A snapshot has arrived, maybe in a new arena: keep that, unless its plan no longer counts."""
    if event.added is not None:
        if not restore.follows(node, event.plan):
            node.emit(DiscardFetchedArena(event.arena_id))
            return
        node.emit(KeepFetchedArena(event.arena_id))
        _arena_added(node, event.added)
    restore.fetched(node, event)


def _from_trainer(node: NodeState, event: events.FromTrainer) -> None:
    trainer, message = node.trainers.by_conn(event.conn), event.message
    if trainer is not None:
        _FROM_TRAINER[type(message)](node, trainer, message)
    elif isinstance(message, WantRestore | WantArena | Loaded):
        node.reply_error(event.conn, message.ticket, KeeperError("register first"))


def _tick(node: NodeState, event: events.Tick) -> None:
    trainers.try_open(node)
    trainers.watch_orphans(node)
    orders.watch_peers(node)


_FROM_TRAINER: dict[type, Callable[[NodeState, RegisteredTrainer, Any], None]] = {
    WantRestore: restore.requested,
    WantArena: arenas.requested,
    Loaded: restore.loaded,
    Committed: snapshots.committed,
    Void: snapshots.void,
    Failed: trainers.failed,
    Goodbye: trainers.goodbye,
}
_HANDLERS: dict[type, Callable[[NodeState, Any], None]] = {
    events.TrainerRegisters: trainers.register,
    events.FromTrainer: _from_trainer,
    events.LauncherSeen: trainers.launcher_seen,
    events.ProcessDied: trainers.died,
    events.MembershipSet: orders.members_set,
    events.ArenaAdded: _arena_added,
    events.ArenaRefused: arenas.refused,
    events.SlotSealed: snapshots.sealed,
    events.SlotVerified: restore.verified,
    events.PeerMessage: orders.peer_message,
    events.PeerLink: orders.peer_link,
    events.SnapshotFetched: _snapshot_fetched,
    events.ParityPlaced: protection.placed,
    events.ExchangeAdvanced: protection.advanced,
    events.ReplicaDigestsRead: orders.digests_read,
    events.Tick: _tick,
}
