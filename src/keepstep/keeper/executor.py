"""Carry out the effects of the core, and take in what threads have done. It reads no state of the core.

Owns the memory of the node (arenas, parity), the worker threads and the network. Results of threads come back through
the keeper's loop, which is the only caller.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from keepstep.arena.records import ArenaHeader, Grant, Ledger
from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.control.messages import ArenaGiven, Refused, RestoreFrom, Verified
from keepstep.errors import Error
from keepstep.identity import Identity
from keepstep.keeper.node.effects import (
    CancelFetches,
    CreateArena,
    DiscardFetchedArena,
    DropArena,
    DropReplicaCache,
    Effect,
    End,
    FetchSnapshot,
    FreeParity,
    KeepFetchedArena,
    Kill,
    Log,
    ReadReplicaDigests,
    SealSlot,
    Send,
    SendSnapshot,
    SendToPeer,
    SetPeers,
    StartExchange,
    StopExchange,
    VerifySlot,
    WriteGrant,
    WriteLedger,
)
from keepstep.keeper.node.events import ArenaAdded, Conn, Event
from keepstep.keeper.transfer.fetch_replicas import ReplicasFetched, ReplicaSources, WaitingRank, find_replicas
from keepstep.keeper.transfer.fetch_snapshot import FetchEnded
from keepstep.keeper.transfer.network import CutEnded, KeeperNetwork, SlotSuspected
from keepstep.keeper.transfer.protect import ParityBuilt
from keepstep.keeper.workers.allocation import ArenaAllocator, describe
from keepstep.keeper.workers.results import ArenaCreated, Result, Results, SlotsChecked
from keepstep.keeper.workers.sealing import WorkerPool

READ_ATTEMPTS = 3

log = logging.getLogger("keepstep.keeper")


class KeeperLoop(Results, Protocol):
    """What the executor asks of the keeper's loop."""

    def handle(self, event: Event) -> None:
        """Pass an event to the core, and carry out its effects."""

    def is_connected(self, conn: Conn) -> bool: ...

    def send_to(self, conn: Conn, message: Any, fds: list[int] | None = None) -> None:
        """Send to a connection; a message to one that has closed is dropped."""

    def offer_memory(self) -> None:
        """Give new memory to its holders, and have them forget what was freed."""

    def kill(self, pid: int) -> None: ...

    def end(self, reason: str) -> None: ...


class Executor:
    """Carries out effects, in order."""

    def __init__(self, identity: Identity, instance: str, config: Config, loop: KeeperLoop) -> None:
        self._identity, self._instance, self._config, self._loop = identity, instance, config, loop
        self.arenas: dict[str, Arena] = {}
        self._fetched_arenas: dict[str, Arena] = {}  # new ones that the core has not decided about
        self._ledger: Ledger | None = None  # the last one written
        # Opened when a launcher asks for this keeper's card: a single node listens to nobody.
        self.network: KeeperNetwork | None = None
        self.allocator = ArenaAllocator(identity, bytes.fromhex(instance))
        self.workers = WorkerPool(self.allocator, config.keeper, loop)

    def carry_out(self, effect: Effect) -> None:
        _EFFECTS[type(effect)](self, effect)

    def take(self, result: Result) -> None:
        """Take in the result of a thread."""
        _RESULTS[type(result)](self, result)

    def open_network(self) -> KeeperNetwork:
        if self.network is None:
            self.network = KeeperNetwork(self._identity, self._instance, self._config, self.allocator, self._loop)
            for arena in self.arenas.values():
                self.network.store.add(arena)
        return self.network

    def add_arena(self, arena: Arena) -> None:
        self.arenas[arena.arena_id] = arena
        if self.network is not None:
            self.network.store.add(arena)

    def memory_fds(self) -> dict[str, int]:
        """Every memfd of this node, by name."""
        fds = {arena_id: arena.segment.fd for arena_id, arena in self.arenas.items()}
        if self.network is not None:
            fds |= {buffer_id: buffer.segment.fd for buffer_id, buffer in self.network.parities.items()}
        return fds

    def repair_records(self, grants: Iterable[tuple[str, Grant]]) -> None:
        """Write records again that differ from what they should be: (arena_id, grant), the ledger, arena headers.

        One that could not be written, or was damaged since, would stop the snapshots or hide the arena.
        """
        for arena in self.arenas.values():
            if arena.segment.read(0, ArenaHeader.SIZE) != (encoded := arena.header.encode()):
                arena.segment.write(0, encoded)
        for arena_id, grant in grants:
            written = self.arenas.get(arena_id)
            if written is not None and written.grant() != grant:
                written.write_grant(grant)
        if self._ledger is not None:
            for arena in self.arenas.values():
                if arena.ledger() != self._ledger:
                    arena.write_ledger(self._ledger)

    def close(self) -> None:
        if self.network is not None:
            self.network.close()
        self.allocator.close()
        self.workers.close()
        for arena in [*self.arenas.values(), *self._fetched_arenas.values()]:
            arena.close()

    # Processes of this node

    def _send(self, effect: Send) -> None:
        fds = [self.arenas[effect.arena_id].segment.fd] if effect.arena_id else []
        self._loop.send_to(effect.conn, effect.message, fds)

    def _kill(self, effect: Kill) -> None:
        log.warning("killing trainer", extra={"pid": effect.pid, "reason": effect.reason})
        self._loop.kill(effect.pid)

    def _end(self, effect: End) -> None:
        self._loop.end(effect.reason)

    def _log(self, effect: Log) -> None:
        log.log(getattr(logging, effect.level.upper()), effect.text, extra=effect.fields)

    # Arenas and slots

    def _write_grant(self, effect: WriteGrant) -> None:
        self.arenas[effect.arena_id].write_grant(effect.grant)

    def _write_ledger(self, effect: WriteLedger) -> None:
        self._ledger = effect.ledger
        for arena in self.arenas.values():
            arena.write_ledger(effect.ledger)

    def _seal(self, effect: SealSlot) -> None:
        self.workers.seal(self.arenas[effect.arena_id], effect)

    def _verify(self, effect: VerifySlot) -> None:
        self.workers.verify(self.arenas[effect.arena_id], effect)

    def _verify_suspected(self, suspected: SlotSuspected) -> None:
        arena = self.arenas.get(suspected.arena_id)
        if arena is not None:
            self.workers.verify(arena, VerifySlot(suspected.arena_id, suspected.slot, suspected.version))

    def _report_checks(self, checked: SlotsChecked) -> None:
        for event in checked.damaged:
            self._loop.handle(event)
        self._loop.send_to(checked.conn, Verified(checked.results, checked.ticket))

    def _read_replica_digests(self, effect: ReadReplicaDigests) -> None:
        self.workers.read_replica_digests(list(self.arenas.values()), effect)

    def _create(self, effect: CreateArena) -> None:
        self.workers.create(effect)

    def _give_arena(self, created: ArenaCreated) -> None:
        arena, conn, ticket = created.arena, created.effect.conn, created.effect.wanted.ticket
        if isinstance(arena, Error):
            log.error("arena refused", extra={"reason": str(arena)})
            self._loop.send_to(conn, Refused(type(arena).__name__, arena.message, arena.hint, ticket))
            return
        if not self._loop.is_connected(conn):  # its trainer has died meanwhile
            arena.close()
            return
        try:
            added = describe(arena)
        except (OSError, Error) as error:
            arena.close()
            self._loop.send_to(conn, Refused("KeeperError", f"the new arena cannot be read: {error}", "", ticket))
            return
        self._add(arena, added)
        self._loop.send_to(conn, ArenaGiven(arena.arena_id, arena.segment.size_bytes, True, ticket), [arena.segment.fd])
        self._loop.offer_memory()

    def _add(self, arena: Arena, added: ArenaAdded) -> None:
        self.add_arena(arena)
        self._loop.handle(added)

    def _drop(self, effect: DropArena) -> None:
        log.info("arena dropped", extra={"arena": effect.arena_id, "reason": effect.reason})
        if self.network is not None:
            self.network.store.remove(effect.arena_id)
        self.arenas.pop(effect.arena_id).close()
        self.workers.forget(effect.arena_id)  # closed before: the worker cannot map it again
        self._loop.offer_memory()

    # Restore

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        self._answer_rank(WaitingRank(effect.conn, effect.answer, effect.holders))

    def _answer_rank(self, rank: WaitingRank) -> None:
        """Send a rank its snapshot and the chunks of its replica sets; fetch those that this node does not hold."""
        answer = rank.answer
        try:
            replicas = self._find_replicas(answer)
        except (OSError, Error) as error:
            self._refuse_restore(rank, str(error))
            return
        if not replicas.missing:
            self._loop.send_to(rank.conn, msgspec.structs.replace(answer, streams=replicas.sources), replicas.fds)
            return
        if self.network is None:
            problem = "replicated state is missing on this node, which has no peers"
        else:
            problem = self.network.replicas.fetch(rank, replicas.missing)
        if problem:
            self._refuse_restore(rank, problem)

    def _find_replicas(self, answer: RestoreFrom) -> ReplicaSources:
        """Try again when the machine fails: a rank that is refused now costs an incarnation."""
        fetched = self.network.replicas.replicas if self.network is not None else None
        for _ in range(READ_ATTEMPTS - 1):
            with contextlib.suppress(OSError):
                return find_replicas(self.arenas, answer, fetched)
        return find_replicas(self.arenas, answer, fetched)

    def _refuse_restore(self, rank: WaitingRank, problem: str) -> None:
        self._loop.send_to(rank.conn, Refused("RecoveryError", problem, "", rank.answer.ticket))

    def _answer_waiting(self, fetched: ReplicasFetched) -> None:
        for rank in self._opened().replicas.add(fetched):
            if fetched.problem:
                self._refuse_restore(rank, fetched.problem)
            else:
                self._answer_rank(rank)

    def _drop_replicas(self, effect: DropReplicaCache) -> None:
        if self.network is not None:
            self.network.replicas.drop()

    def _fetch(self, effect: FetchSnapshot) -> None:
        self._opened().fetch_snapshot(effect, self.arenas.get(effect.arena_id))

    def _cancel_fetches(self, effect: CancelFetches) -> None:
        self._opened().cancel_fetches()

    def _end_fetch(self, ended: FetchEnded) -> None:
        if not self._opened().take_fetched(ended):
            return
        if ended.arena is not None:
            self._fetched_arenas[ended.arena.arena_id] = ended.arena
        self._loop.handle(ended.event)

    def _keep_fetched(self, effect: KeepFetchedArena) -> None:
        self.add_arena(self._fetched_arenas.pop(effect.arena_id))
        self._loop.offer_memory()

    def _discard_fetched(self, effect: DiscardFetchedArena) -> None:
        self._fetched_arenas.pop(effect.arena_id).close()

    # Other nodes

    def _opened(self) -> KeeperNetwork:
        assert self.network is not None, "the core names no other node before a membership, which opens the network"
        return self.network

    def _set_peers(self, effect: SetPeers) -> None:
        self._opened().set_peers(effect)

    def _send_to_peer(self, effect: SendToPeer) -> None:
        self._opened().send(effect)

    def _end_cut(self, ended: CutEnded) -> None:
        self._opened().end_cut(ended)

    def _start_exchange(self, effect: StartExchange) -> None:
        self._opened().start_exchange(effect)

    def _stop_exchange(self, effect: StopExchange) -> None:
        self._opened().stop_exchange(effect)

    def _take_parity(self, built: ParityBuilt) -> None:
        placed = self._opened().take_parity(built)
        if placed is not None:
            self._loop.offer_memory()
            self._loop.handle(placed)

    def _free_parity(self, effect: FreeParity) -> None:
        if self._opened().free_parity(effect):
            self._loop.offer_memory()


_EFFECTS: dict[type, Callable[[Executor, Any], None]] = {
    Send: Executor._send,
    Kill: Executor._kill,
    End: Executor._end,
    Log: Executor._log,
    WriteGrant: Executor._write_grant,
    WriteLedger: Executor._write_ledger,
    SealSlot: Executor._seal,
    VerifySlot: Executor._verify,
    CreateArena: Executor._create,
    DropArena: Executor._drop,
    ReadReplicaDigests: Executor._read_replica_digests,
    SendSnapshot: Executor._send_snapshot,
    FetchSnapshot: Executor._fetch,
    CancelFetches: Executor._cancel_fetches,
    KeepFetchedArena: Executor._keep_fetched,
    DiscardFetchedArena: Executor._discard_fetched,
    DropReplicaCache: Executor._drop_replicas,
    SetPeers: Executor._set_peers,
    SendToPeer: Executor._send_to_peer,
    StartExchange: Executor._start_exchange,
    StopExchange: Executor._stop_exchange,
    FreeParity: Executor._free_parity,
}
_RESULTS: dict[type, Callable[[Executor, Any], None]] = {
    ArenaCreated: Executor._give_arena,
    SlotsChecked: Executor._report_checks,
    SlotSuspected: Executor._verify_suspected,
    ReplicasFetched: Executor._answer_waiting,
    FetchEnded: Executor._end_fetch,
    ParityBuilt: Executor._take_parity,
    CutEnded: Executor._end_cut,
}
