"""The keeper's loop: sockets, pidfds and timers in; the core decides; effects out.

One thread owns the core. Work on bytes happens in `work`, HTTP in its own thread; both come back
through a queue that wakes the loop. A connection that misbehaves is closed and nothing else happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from keepstep.arena.records import ArenaHeader, Ledger
from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.control.framing import MAX_FDS, FrameError
from keepstep.control.messages import (
    ArenaGiven,
    CardIs,
    Ending,
    Hold,
    NodeCard,
    Refused,
    RestoreFrom,
)
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.keeper import requests
from keepstep.keeper import status as report
from keepstep.keeper.connection import Connection
from keepstep.keeper.coordinator.state import Deadlines
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.effects import (
    CancelFetches,
    CreateArena,
    DiscardFetchedArena,
    DropArena,
    DropReplicaCache,
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
from keepstep.keeper.node.events import ArenaAdded, Conn, Event, ProcessDied, SnapshotFetched, Tick
from keepstep.keeper.singleton import BACKLOG, KeeperDirectory
from keepstep.keeper.transfer.fetch_replicas import FetchedReplicas
from keepstep.keeper.transfer.network import KeeperNetwork
from keepstep.keeper.transfer.streams import ReplicaSources, find_streams
from keepstep.keeper.workers.allocation import ArenaAllocator, describe
from keepstep.keeper.workers.sealing import WorkerPool
from keepstep.parity.parity_buffer import ParityBuffer
from keepstep.types import Status, Version

TICK_S = 0.25
MAX_CONNECTIONS = 256
STATUS_S = 5.0
# A connection that does not say who it is within this time is closed.
HELLO_S = 10.0
BREATH_S = 0.01
READ_ATTEMPTS = 3

log = logging.getLogger("keepstep.keeper")


class Keeper:
    """Runs until released, told to end, or its lease is over."""

    def __init__(
        self, identity: Identity, config: Config, *, sidecar: bool = False, deadlines: Deadlines | None = None
    ) -> None:
        self.identity = identity
        self.instance = secrets.token_hex(16)
        self.post = KeeperDirectory(identity)
        self.config = config
        card = NodeCard(identity.node_id, self.instance, "", 0)
        self.core = Core(config, card, sidecar=sidecar, deadlines=deadlines)
        self.network: KeeperNetwork | None = None
        """opened when somebody asks for this keeper's card: a node alone listens to nobody"""
        self.arenas: dict[str, Arena] = {}
        self._fetched_arenas: dict[str, Arena] = {}  # new ones that the core has not decided about
        self.connections: dict[int, Connection] = {}
        self.pidfds: dict[int, int] = {}
        self.ending = ""
        self._ledger: Ledger | None = None
        """the last one written"""
        self.started = time.monotonic()
        self._next_connection = 1
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.allocator = ArenaAllocator(identity, bytes.fromhex(self.instance))
        self.work = WorkerPool(self.allocator, config.keeper, lambda ev: self.later(self.handle, ev))
        self.http = report.StatusServer(self.post.http, self._status_from_outside)

    # The loop

    def run(self) -> None:
        self.post.control.setblocking(False)
        self._selector.register(self.post.control, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        if threading.current_thread() is threading.main_thread():
            self._watch_signals()
        self.post.announce(self.instance)
        log.info("keeper serves", extra={"run_id": self.identity.run_id, "node_id": self.identity.node_id})
        last_tick = 0.0
        while not self.ending:
            for key, _ in self._selector.select(TICK_S):
                self._guard(key.data)
            self._run_tasks()
            if time.monotonic() - last_tick >= TICK_S:
                last_tick = time.monotonic()
                self._guard(self._tick)
        # Not in a finally: a keeper that fails must look like one that was killed, and be replaced.
        self._close()

    def _watch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, frame: self.end(f"signal {signal.Signals(received).name}"))

    def _guard(self, call: Callable[..., None], *args: Any) -> None:
        """A fault in one thing must not end the others: nobody else may hold the memory."""
        try:
            call(*args)
        except Exception:
            log.exception("a fault of the keeper's own")

    def _tick(self) -> None:
        self.handle(Tick())
        self._repair_pages()
        silent = time.monotonic() - HELLO_S
        for connection in list(self.connections.values()):
            if not connection.role and connection.since < silent:
                self._drop(connection)

    def _repair_pages(self) -> None:
        """A page that could not be written, or was damaged since, would stop the snapshots or hide the arena."""
        for arena in self.arenas.values():
            if arena.segment.read(0, ArenaHeader.SIZE) != (encoded := arena.header.encode()):
                arena.segment.write(0, encoded)
        for member in self.core.trainers.registered.values():
            page = self.core.grants.usable_record(member.index)
            written = self.arenas.get(page.arena_id) if page is not None else None
            if page is not None and written is not None and written.grant() != page.grant:
                written.write_grant(page.grant)
        if self._ledger is not None:
            for arena in self.arenas.values():
                if arena.ledger() != self._ledger:
                    arena.write_ledger(self._ledger)

    def later(self, call: Callable[..., None], *args: Any) -> None:
        """From any thread: have the loop do this."""
        self._tasks.put((call, args))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _run_tasks(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self.ending:
                call, args = self._tasks.get_nowait()
                self._guard(call, *args)

    def _close_what_came_too_late(self) -> None:
        """Memory that a thread handed over when the loop had ended: until the loop takes it, it is only in here."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, args = self._tasks.get_nowait()
                for arg in args:
                    if isinstance(arg, Arena | ParityBuffer | FetchedReplicas):
                        arg.segment.close()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def end(self, reason: str) -> None:
        self.ending = self.ending or reason

    def _close(self) -> None:
        log.info("keeper ends", extra={"reason": self.ending})
        for connection in list(self.connections.values()):
            with contextlib.suppress(FrameError, OSError):
                connection.queue(Ending(self.ending))
            self._drop(connection)
        if self.network is not None:
            self.network.close()
        self.allocator.close()
        self.work.close()
        self.http.close()
        self.post.close()
        for fd in [*self.pidfds.values(), self._wake_read, self._wake_write]:
            os.close(fd)
        for arena in self.arenas.values():
            arena.close()
        self._close_what_came_too_late()  # when the threads of network and work have ended
        self._selector.close()

    # Connections

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                sock, _ = self.post.control.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._make_room(error)
                return
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # gone already
            connection = Connection(self._next_connection, sock)
            self._next_connection += 1
            if connection.uid not in (os.getuid(), 0) or len(self.connections) >= MAX_CONNECTIONS:
                log.warning("connection refused", extra={"uid": connection.uid, "pid": connection.pid})
                connection.close()
                return
            self.connections[connection.number] = connection
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._serve(connection))

    def _make_room(self, error: OSError) -> None:
        """No descriptor is left for a new connection: those that have not said who they are go first."""
        strangers = [connection for connection in self.connections.values() if not connection.role]
        log.error("no connection can be taken", extra={"reason": str(error), "dropped": len(strangers)})
        for connection in strangers:
            self._drop(connection)
        time.sleep(BREATH_S)

    def _serve(self, connection: Connection) -> None:
        arrived: list[tuple[Any, list[int]]] | None = []
        try:
            if connection.wants_to_send:
                connection.flush()
            arrived = connection.read()
            for message, fds in arrived or []:
                if connection.number in self.connections:
                    requests.receive(self, connection, message, fds)
            if arrived is None:
                self._drop(connection)
            self._watch(connection)
        except FrameError as error:
            log.warning("connection closed", extra={"pid": connection.pid, "reason": str(error)})
            self._drop(connection)
        except Exception:
            log.exception("connection closed", extra={"pid": connection.pid})
            self._drop(connection)
        finally:
            for _, fds in arrived or []:
                for fd in fds:
                    with contextlib.suppress(OSError):
                        os.close(fd)

    def _watch(self, connection: Connection) -> None:
        if connection.number not in self.connections:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_send else 0)
        key = self._selector.get_key(connection.sock)
        if key.events != wanted:
            self._selector.modify(connection.sock, wanted, key.data)

    def _drop(self, connection: Connection) -> None:
        if self.connections.pop(connection.number, None) is not None:
            self._selector.unregister(connection.sock)
            connection.close()

    def send(self, connection: Connection | None, message: Any, fds: list[int] | None = None) -> None:
        if connection is None or connection.number not in self.connections:
            return
        try:
            connection.queue(message, fds)
            self._watch(connection)
        except (FrameError, OSError, KeeperError) as error:
            log.warning("connection closed", extra={"pid": connection.pid, "reason": str(error)})
            self._drop(connection)

    # Processes

    def follow(self, pid: int) -> bool:
        """Watch a process until it dies. False when it is dead already, or cannot be seen from here."""
        if pid in self.pidfds:
            return True
        if pid <= 0:
            return pid == 0  # another pid namespace: taken at its word, but it cannot be fenced
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self.pidfds[pid] = fd
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._gone(pid))
        return True

    def _gone(self, pid: int) -> None:
        fd = self.pidfds.pop(pid)
        self._selector.unregister(fd)
        os.close(fd)
        self.handle(ProcessDied(pid))

    # Effects

    def handle(self, event: Event) -> None:
        self._read_progress()
        effects = self.core.handle(event, time.monotonic())
        for effect in effects:
            try:
                _EFFECTS[type(effect)](self, effect)
            except Exception:  # pages are written again at the next tick; the effects behind it count too
                log.exception("an effect failed", extra={"effect": type(effect).__name__})

    def _read_progress(self) -> None:
        """Refresh the core's inputs from the progress records of all arenas."""
        steps: dict[str, int] = {}
        for arena_id, arena in self.arenas.items():
            try:
                record = arena.progress()
            except (OSError, Error):
                continue  # What was read before still holds.
            if record is not None and record.incarnation == self.core.incarnation:
                steps[arena_id] = record.step
                self.core.preparing.discard(arena_id)
            else:  # A trainer writes its first record when the memory is ready.
                self.core.preparing.add(arena_id)
        for trainer in self.core.trainers.registered.values():
            # A trainer that is moving to another arena has no record there yet, but no rank goes back.
            known = max(trainer.register.progress, self.core.progress.get(trainer.index, -1))
            self.core.progress[trainer.index] = max(known, steps.get(trainer.arena_id, -1))

    def _do_send(self, effect: Send) -> None:
        message, arena_ids = effect.message, [effect.arena_id] if effect.arena_id else []
        fds = [self.arenas[arena_id].segment.fd for arena_id in arena_ids]
        self.send(self.connections.get(effect.conn), message, fds)

    def _do_send_snapshot(self, effect: SendSnapshot) -> None:
        self._hand_over(effect.conn, effect.answer, effect.holders)

    def _hand_over(self, conn: Conn, answer: RestoreFrom, holders: tuple[str, ...]) -> None:
        """Give a rank its snapshot, with the chunks of replicated state wherever they lie; fetched, if need be."""
        try:
            found = self._find_streams(answer)
        except (OSError, Error) as error:
            self.send(self.connections.get(conn), Refused("RecoveryError", str(error), "", answer.ticket))
            return
        if found.missing:
            self.open_network().gather(
                answer, holders, found.missing,
                again=lambda: self._hand_over(conn, answer, holders),
                failed=lambda text: self.send(
                    self.connections.get(conn), Refused("RecoveryError", text, "", answer.ticket)
                ),
            )  # fmt: skip
            return
        message = msgspec.structs.replace(answer, streams=found.sources)
        self.send(self.connections.get(conn), message, found.fds)

    def _find_streams(self, answer: RestoreFrom) -> ReplicaSources:
        """Again when the machine fails: a rank that is refused now is a life that is lost."""
        gathered = self.network.gathered if self.network is not None else None
        for _ in range(READ_ATTEMPTS - 1):
            with contextlib.suppress(OSError):
                return find_streams(self.arenas, answer, gathered)
        return find_streams(self.arenas, answer, gathered)

    def _do_grant(self, effect: WriteGrant) -> None:
        self.arenas[effect.arena_id].write_grant(effect.grant)

    def _do_ledger(self, effect: WriteLedger) -> None:
        self._ledger = effect.ledger
        for arena in self.arenas.values():
            arena.write_ledger(effect.ledger)

    def _do_seal(self, effect: SealSlot) -> None:
        self.work.seal(self.arenas[effect.arena_id], effect)

    def _do_verify(self, effect: VerifySlot) -> None:
        self.work.verify(self.arenas[effect.arena_id], effect)

    def _do_create(self, effect: CreateArena) -> None:
        self.work.create(effect, lambda result: self.later(self._created, effect, result))

    def _created(self, effect: CreateArena, result: Arena | Error) -> None:
        wanted = effect.wanted
        connection = self.connections.get(effect.conn)
        if isinstance(result, Error):
            log.error("arena refused", extra={"reason": str(result)})
            self.send(connection, Refused(type(result).__name__, result.message, result.hint, wanted.ticket))
            return
        if connection is None:  # its trainer went away meanwhile
            result.close()
            return
        try:
            described = describe(result)
        except (OSError, Error) as error:
            result.close()
            self.send(connection, Refused("KeeperError", f"the new arena cannot be read: {error}", "", wanted.ticket))
            return
        self.add_arena(result, described)
        size = result.segment.size_bytes
        self.send(connection, ArenaGiven(result.arena_id, size, True, wanted.ticket), [result.segment.fd])
        self.offer_holds()

    def _do_drop(self, effect: DropArena) -> None:
        log.info("arena dropped", extra={"arena": effect.arena_id, "reason": effect.reason})
        if self.network is not None:
            self.network.shelf.take_away(effect.arena_id)
        self.arenas.pop(effect.arena_id).close()
        self.work.forget(effect.arena_id)  # closed before: it cannot be mapped again
        self.offer_holds()

    def _do_kill(self, effect: Kill) -> None:
        log.warning("killing trainer", extra={"pid": effect.pid, "reason": effect.reason})
        with contextlib.suppress(KeyError, ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfds[effect.pid], signal.SIGKILL)

    def _do_end(self, effect: End) -> None:
        self.end(effect.reason)

    def _do_log(self, effect: Log) -> None:
        log.log(getattr(logging, effect.level.upper()), effect.text, extra=effect.fields)

    # Other nodes

    def open_network(self) -> KeeperNetwork:
        if self.network is None:
            self.network = KeeperNetwork(
                self.identity, self.instance, self.config,
                later=self.later, handle=self.handle, holds_changed=self.offer_holds,
            )  # fmt: skip
            self.network.check = self._check_slot
            # More reports than any keeper before this one has counted.
            self.core.open_network(self.network.card, report_number=time.time_ns() // 1_000_000)
            for arena in self.arenas.values():
                self.network.shelf.put(arena)
        return self.network

    def add_arena(self, arena: Arena, described: ArenaAdded) -> None:
        self.arenas[arena.arena_id] = arena
        if self.network is not None:
            self.network.shelf.put(arena)
        self.handle(described)

    def _check_slot(self, arena_id: str, slot: int, version: Version) -> None:
        arena = self.arenas.get(arena_id)
        if arena is not None:
            self.work.verify(arena, VerifySlot(arena_id, slot, version))

    def _do_bring_in(self, effect: FetchSnapshot) -> None:
        self.open_network().bring_in(
            effect, self.arenas.get(effect.arena_id), self.allocator.create_for_fetch, self._brought_in
        )

    def _brought_in(self, event: SnapshotFetched, made: Arena | None) -> None:
        if made is not None:
            try:
                added = dataclasses.replace(describe(made), ledger=None)
            except BaseException:
                made.close()
                raise
            self._fetched_arenas[made.arena_id] = made
            event = dataclasses.replace(event, added=added)
        self.handle(event)

    def _do_keep_fetched(self, effect: KeepFetchedArena) -> None:
        arena = self._fetched_arenas.pop(effect.arena_id)
        self.arenas[arena.arena_id] = arena
        self.open_network().shelf.put(arena)
        self.offer_holds()

    def _do_discard_fetched(self, effect: DiscardFetchedArena) -> None:
        self._fetched_arenas.pop(effect.arena_id).close()

    def _do_drop_replica_cache(self, effect: DropReplicaCache) -> None:
        if self.network is not None:
            self.network.forget_gathered()

    def card_is(self, ticket: int) -> CardIs:
        """Who this keeper is, and whom it last knew: what a launcher needs to agree on an incarnation."""
        card = self.open_network().card
        core = self.core
        membership = core.orders.membership
        return CardIs(
            card, core.largest_number, list(membership.nodes) if membership else [],
            membership.incarnation.number if membership else 0, bool(self.arenas), ticket,
            membership.secret if membership else b"",
        )  # fmt: skip

    def held_fds(self) -> dict[str, int]:
        """Every memfd of this node, by name."""
        found = {arena_id: arena.segment.fd for arena_id, arena in self.arenas.items()}
        if self.network is not None:
            found |= {buffer_id: held.segment.fd for buffer_id, held in self.network.parities.items()}
        return found

    def offer_holds(self) -> None:
        """Every trainer and launcher keeps a duplicate of every memfd of the node."""
        mine = self.held_fds()
        for connection in list(self.connections.values()):
            if connection.role not in ("trainer", "launcher"):
                continue
            new = [name for name in mine if name not in connection.offered]
            gone = [name for name in connection.offered if name not in mine]
            connection.held -= set(gone)
            connection.offered = set(mine)
            for start in range(0, max(len(new), bool(gone)), MAX_FDS):
                batch = new[start : start + MAX_FDS]
                self.send(connection, Hold(batch, gone), [mine[name] for name in batch])

    # Status

    def status(self) -> Status:
        self._read_progress()
        others = (c for c in self.connections.values() if c.role in ("trainer", "launcher"))
        mine = set(self.held_fds())
        holders = sum(mine <= connection.held for connection in others)
        return report.status_of(
            self.core,
            self.identity,
            instance=self.instance,
            started=self.started,
            holders=holders,
            network=self.network,
            chosen=self.allocator.chosen,
        )

    def _status_from_outside(self) -> Status:
        future: Future[Status] = Future()
        self.later(lambda: future.set_result(self.status()))
        return future.result(STATUS_S)


_EFFECTS: dict[type, Callable[[Keeper, Any], None]] = {
    Send: Keeper._do_send,
    SendSnapshot: Keeper._do_send_snapshot,
    KeepFetchedArena: Keeper._do_keep_fetched,
    DiscardFetchedArena: Keeper._do_discard_fetched,
    DropReplicaCache: Keeper._do_drop_replica_cache,
    WriteGrant: Keeper._do_grant,
    WriteLedger: Keeper._do_ledger,
    SealSlot: Keeper._do_seal,
    VerifySlot: Keeper._do_verify,
    CreateArena: Keeper._do_create,
    DropArena: Keeper._do_drop,
    Kill: Keeper._do_kill,
    End: Keeper._do_end,
    Log: Keeper._do_log,
    SendToPeer: lambda keeper, effect: keeper.open_network().tell(effect),
    SetPeers: lambda keeper, effect: keeper.open_network().meet(effect),
    FetchSnapshot: Keeper._do_bring_in,
    CancelFetches: lambda keeper, effect: keeper.open_network().give_up_bringing(effect),
    StartExchange: lambda keeper, effect: keeper.open_network().start_exchange(effect),
    StopExchange: lambda keeper, effect: keeper.open_network().stop_exchange(effect),
    ReadReplicaDigests: lambda keeper, effect: keeper.work.read_replica_digests(list(keeper.arenas.values()), effect),
    FreeParity: lambda keeper, effect: keeper.open_network().free_parity(effect),
}
