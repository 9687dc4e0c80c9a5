"""The keeper's loop: sockets, pidfds, timers and results of threads in; the core decides; the executor acts.

One thread owns the core and the executor. Work on bytes happens in threads, HTTP in its own; all of them hand results
to the loop through one queue that wakes it. A connection that misbehaves is closed and nothing else happens.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from keepstep.arena.slots import Arena
from keepstep.config import Config
from keepstep.control.framing import MAX_FDS, FrameError
from keepstep.control.messages import Ending, Hold, NodeCard
from keepstep.control.secret_file import security_level
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.keeper import requests
from keepstep.keeper.connection import Connection
from keepstep.keeper.coordinator.state import Deadlines
from keepstep.keeper.executor import Executor
from keepstep.keeper.node.core import Core
from keepstep.keeper.node.events import ArenaAdded, Conn, Event, ProcessDied, Tick
from keepstep.keeper.singleton import BACKLOG, KeeperDirectory
from keepstep.keeper.status import status_of
from keepstep.keeper.status_server import StatusRequest, StatusServer
from keepstep.keeper.transfer.network import KeeperNetwork
from keepstep.keeper.workers.allocation import ArenaAllocator
from keepstep.keeper.workers.results import Result
from keepstep.keeper.workers.sealing import WorkerPool
from keepstep.types import Status, TakeCounts

TICK_S = 0.25
MAX_CONNECTIONS = 256
HELLO_S = 10.0  # a connection that sends no Hello for so long is closed
ACCEPT_PAUSE_S = 0.01  # before the next attempt, when there was no descriptor for a connection

log = logging.getLogger("keepstep.keeper")


class Keeper:
    """Runs until released, ended by a signal, or its lease is over."""

    def __init__(
        self, identity: Identity, config: Config, *, sidecar: bool = False, deadlines: Deadlines | None = None
    ) -> None:
        self.identity = identity
        self.instance = secrets.token_hex(16)
        self._directory = KeeperDirectory(identity)
        card = NodeCard(identity.node_id, self.instance, "", 0)
        self.core = Core(config, card, sidecar=sidecar, deadlines=deadlines)
        self.connections: dict[Conn, Connection] = {}
        self.pidfds: dict[int, int] = {}
        self.takes: dict[int, TakeCounts] = {}  # By local index, as last read from the progress records.
        self.ending = ""
        self._started = time.monotonic()
        self._security = security_level(config)
        self._next_connection = 1
        self._results: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.executor = Executor(identity, self.instance, config, self)
        self._http = StatusServer(self._directory.http, self)

    # The loop

    def run(self) -> None:
        self._directory.control.setblocking(False)
        self._selector.register(self._directory.control, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        if threading.current_thread() is threading.main_thread():
            self._watch_signals()
        self._directory.announce(self.instance)
        log.info("keeper serves", extra={"run_id": self.identity.run_id, "node_id": self.identity.node_id})
        last_tick = 0.0
        while not self.ending:
            for key, _ in self._selector.select(TICK_S):
                self._guard(key.data)
            self._take_results()
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
        """An error in one call must not end the keeper: no other process may hold the memory."""
        try:
            call(*args)
        except Exception:
            log.exception("an error of the keeper itself")

    def _tick(self) -> None:
        self.handle(Tick())
        records = [self.core.grants.usable_record(index) for index in self.core.trainers.registered]
        self.executor.repair_records([(record.arena_id, record.grant) for record in records if record is not None])
        hello_by = time.monotonic() - HELLO_S
        for connection in list(self.connections.values()):
            if not connection.role and connection.since < hello_by:
                self._drop(connection)

    def put(self, result: object, /) -> None:
        self._results.put(result)
        with contextlib.suppress(OSError):  # the pipe is full, or closed after the last iteration
            os.write(self._wake_write, b"x")

    def _take_results(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self.ending:
                self._guard(self._take, self._results.get_nowait())

    def _take(self, result: Any) -> None:
        if isinstance(result, StatusRequest):
            result.answer(self.status())
        elif isinstance(result, Result):
            self.executor.take(result)
        else:
            self.handle(result)

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
        self.executor.close()
        self._http.close()
        self._directory.close()
        self._close_late_results()  # when the threads that put them have ended
        for fd in [*self.pidfds.values(), self._wake_read, self._wake_write]:
            os.close(fd)
        self._selector.close()

    def _close_late_results(self) -> None:
        """Free memory that threads handed over after the loop ended: nothing else refers to it."""
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._results.get_nowait()
                if isinstance(result, Result):
                    result.close()

    # Connections

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                sock, _ = self._directory.control.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._drop_unidentified(error)
                return
            self._add_connection(sock)

    def _add_connection(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed already
            connection = Connection(self._next_connection, sock)
            self._next_connection += 1
            if connection.uid not in (os.getuid(), 0) or len(self.connections) >= MAX_CONNECTIONS:
                log.warning("connection refused", extra={"uid": connection.uid, "pid": connection.pid})
                connection.close()
                return
            self.connections[connection.number] = connection
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._serve(connection))

    def _drop_unidentified(self, error: OSError) -> None:
        """Free descriptors for a new connection: those that have sent no Hello are closed."""
        unidentified = [connection for connection in self.connections.values() if not connection.role]
        log.error("no connection can be accepted", extra={"reason": str(error), "dropped": len(unidentified)})
        for connection in unidentified:
            self._drop(connection)
        time.sleep(ACCEPT_PAUSE_S)

    def _serve(self, connection: Connection) -> None:
        received: list[tuple[Any, list[int]]] | None = []
        try:
            if connection.wants_to_send:
                connection.flush()
            received = connection.read()
            for message, fds in received or []:
                if connection.number in self.connections:
                    requests.receive(self, connection, message, fds)
            if received is None:
                self._drop(connection)
            self._watch(connection)
        except FrameError as error:
            log.warning("connection closed", extra={"pid": connection.pid, "reason": str(error)})
            self._drop(connection)
        except Exception:
            log.exception("connection closed", extra={"pid": connection.pid})
            self._drop(connection)
        finally:
            for _, fds in received or []:
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

    def is_connected(self, conn: Conn) -> bool:
        return conn in self.connections

    def send_to(self, conn: Conn, message: Any, fds: list[int] | None = None) -> None:
        connection = self.connections.get(conn)
        if connection is not None:
            self.send(connection, message, fds)

    def send(self, connection: Connection, message: Any, fds: list[int] | None = None) -> None:
        if connection.number not in self.connections:
            return
        try:
            connection.queue(message, fds)
            self._watch(connection)
        except (FrameError, OSError, KeeperError) as error:
            log.warning("connection closed", extra={"pid": connection.pid, "reason": str(error)})
            self._drop(connection)

    # Processes

    def watch_process(self, pid: int) -> bool:
        """Watch a process until it dies. False when it is dead already, or cannot be watched from here."""
        if pid in self.pidfds:
            return True
        if pid <= 0:
            return pid == 0  # another pid namespace: assumed to live, but it cannot be fenced
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self.pidfds[pid] = fd
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._died(pid))
        return True

    def _died(self, pid: int) -> None:
        fd = self.pidfds.pop(pid)
        self._selector.unregister(fd)
        os.close(fd)
        self.handle(ProcessDied(pid))

    def kill(self, pid: int) -> None:
        with contextlib.suppress(KeyError, ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfds[pid], signal.SIGKILL)

    # The core

    def handle(self, event: Event) -> None:
        self._read_progress()
        for effect in self.core.handle(event, time.monotonic()):
            try:
                self.executor.carry_out(effect)
            except Exception:  # records are written again at the next tick; the effects behind this one count too
                log.exception("an effect failed", extra={"effect": type(effect).__name__})

    def _read_progress(self) -> None:
        """Refresh the core's inputs from the progress records of all arenas."""
        steps: dict[str, int] = {}
        for arena_id, arena in self.executor.arenas.items():
            try:
                record = arena.progress()
            except (OSError, Error):
                continue  # What was read before still holds.
            if record is not None and record.incarnation == self.core.incarnation:
                steps[arena_id] = record.step
                self.takes[arena.header.local_index] = record.takes
                self.core.preparing.discard(arena_id)
            else:  # A trainer writes its first record when the memory is ready.
                self.core.preparing.add(arena_id)
        for trainer in self.core.trainers.registered.values():
            # A trainer that is moving to another arena has no record there yet, but no rank goes back.
            step = max(trainer.register.progress, self.core.progress.get(trainer.index, -1))
            self.core.progress[trainer.index] = max(step, steps.get(trainer.arena_id, -1))

    def status(self) -> Status:
        self._read_progress()
        others = (c for c in self.connections.values() if c.role in ("trainer", "launcher"))
        names = set(self.memory_fds())
        network, chosen = self.network, self.allocator.chosen
        return status_of(
            self.core,
            self.identity,
            instance=self.instance,
            started=self._started,
            holders=sum(names <= connection.held for connection in others),
            parity_bytes=network.parity_bytes if network is not None else 0,
            traffic=network.transport.counters() if network is not None else None,
            slots_reason=chosen.reason if chosen is not None else "",
            takes=list(self.takes.values()),
            notes=[connection.note for connection in self.connections.values() if connection.note],
            security=self._security,
        )

    # Memory and other nodes

    @property
    def network(self) -> KeeperNetwork | None:
        return self.executor.network

    @property
    def arenas(self) -> dict[str, Arena]:
        return self.executor.arenas

    @property
    def allocator(self) -> ArenaAllocator:
        return self.executor.allocator

    @property
    def workers(self) -> WorkerPool:
        return self.executor.workers

    def open_network(self) -> KeeperNetwork:
        if self.executor.network is None:
            network = self.executor.open_network()
            # More reports than any keeper before this one has counted.
            self.core.open_network(network.card, report_number=time.time_ns() // 1_000_000)
        return self.executor.open_network()

    def add_arena(self, arena: Arena, added: ArenaAdded) -> None:
        self.executor.add_arena(arena)
        self.handle(added)

    def memory_fds(self) -> dict[str, int]:
        return self.executor.memory_fds()

    def offer_memory(self) -> None:
        """Give every trainer and launcher a duplicate of every memfd of the node that it does not have."""
        fds = self.memory_fds()
        for connection in list(self.connections.values()):
            if connection.role not in ("trainer", "launcher"):
                continue
            new = [name for name in fds if name not in connection.offered]
            freed = [name for name in connection.offered if name not in fds]
            connection.held -= set(freed)
            connection.offered = set(fds)
            for start in range(0, max(len(new), bool(freed)), MAX_FDS):
                batch = new[start : start + MAX_FDS]
                self.send(connection, Hold(batch, freed), [fds[name] for name in batch])
