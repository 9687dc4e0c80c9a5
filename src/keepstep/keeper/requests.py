"""Requests on the control socket: each becomes an event for the core, or is answered at once."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from keepstep.arena.slots import Arena, may_request
from keepstep.control.framing import MAX_FDS, FrameError
from keepstep.control.messages import (
    PROTOCOL,
    Adopted,
    CardIs,
    Committed,
    CutLinks,
    Done,
    Failed,
    GiveBack,
    Goodbye,
    Held,
    Hello,
    Hold,
    LauncherHello,
    LauncherNote,
    Loaded,
    Membership,
    OutcomeIs,
    ProcessesAre,
    Refused,
    Register,
    Release,
    StatusIs,
    TrainerFailure,
    VerifyResult,
    Void,
    WantArena,
    WantArenas,
    WantCard,
    WantOutcome,
    WantPlan,
    WantProcesses,
    WantRestore,
    WantStatus,
    WantVerify,
    Welcome,
)
from keepstep.errors import Error, KeeperError, printable
from keepstep.identity import Identity, start_time
from keepstep.keeper.connection import Connection
from keepstep.keeper.node.events import (
    ArenaAdded,
    ArenaRefused,
    Event,
    FromTrainer,
    LauncherSeen,
    MembershipSet,
    ParityPlaced,
    TrainerMessage,
    TrainerRegisters,
)
from keepstep.keeper.node.state import SEALED, NodeState
from keepstep.keeper.transfer.network import KeeperNetwork, adopt_parity
from keepstep.keeper.what_if import forecast
from keepstep.keeper.workers.allocation import ArenaAllocator, describe
from keepstep.keeper.workers.sealing import WorkerPool
from keepstep.parity.parity_buffer import is_parity
from keepstep.types import Status

log = logging.getLogger("keepstep.keeper")
MAX_CUT_S = 600.0
MAX_NOTE = 500


class KeeperServices(Protocol):
    """What a request may use of the keeper."""

    identity: Identity
    instance: str

    @property
    def core(self) -> NodeState: ...

    @property
    def arenas(self) -> dict[str, Arena]: ...

    @property
    def allocator(self) -> ArenaAllocator: ...

    @property
    def workers(self) -> WorkerPool: ...

    @property
    def network(self) -> KeeperNetwork | None: ...

    def open_network(self) -> KeeperNetwork: ...

    def handle(self, event: Event) -> None: ...

    def send(self, connection: Connection, message: Any, fds: list[int] | None = None) -> None: ...

    def watch_process(self, pid: int) -> bool: ...

    def add_arena(self, arena: Arena, added: ArenaAdded) -> None: ...

    def memory_fds(self) -> dict[str, int]: ...

    def offer_memory(self) -> None: ...

    def status(self) -> Status: ...

    def end(self, reason: str) -> None: ...


def receive(keeper: KeeperServices, connection: Connection, message: Any, fds: list[int]) -> None:
    if isinstance(message, Hello):
        _greet(keeper, connection, message)
        return
    if not connection.role:
        raise FrameError("the first message must be Hello")
    call = _RECEIVE.get(type(message))
    if call is None:
        raise FrameError(f"a keeper does not accept {type(message).__name__}")
    call(keeper, connection, message, fds)


def _greet(keeper: KeeperServices, connection: Connection, hello: Hello) -> None:
    error: Error | None = None
    if hello.protocol != PROTOCOL:
        error = KeeperError(
            f"this keeper speaks protocol {PROTOCOL}, the other side {hello.protocol}",
            hint="use one version of keepstep on the node; keepstep release ends this keeper",
        )
    elif (hello.run_id, hello.node_id) != (keeper.identity.run_id, keeper.identity.node_id):
        error = KeeperError(
            f"this keeper belongs to run {keeper.identity.run_id!r} on node {keeper.identity.node_id!r}, "
            f"not to {hello.run_id!r} on {hello.node_id!r}"
        )
    elif hello.role not in ("trainer", "launcher", "cli"):
        error = KeeperError(f"{hello.role!r} is not a role")
    if error is not None:
        keeper.send(connection, Refused(type(error).__name__, error.message, error.hint, hello.ticket))
        return
    connection.role = hello.role
    keeper.send(connection, Welcome(keeper.instance, os.getpid(), keeper.core.largest_number, hello.ticket))
    if connection.role != "cli":
        keeper.offer_memory()


def _registers(keeper: KeeperServices, connection: Connection, register: Register, fds: list[int]) -> None:
    alive = keeper.watch_process(connection.pid)
    if register.launcher_pid and not keeper.watch_process(register.launcher_pid):
        register = msgspec.structs.replace(register, launcher_pid=0)
    keeper.handle(TrainerRegisters(connection.number, connection.pid, alive, register, secrets.randbits(63)))


def _launcher(keeper: KeeperServices, connection: Connection, hello: LauncherHello, fds: list[int]) -> None:
    pid = connection.pid or hello.pid
    keeper.handle(LauncherSeen(pid, alive=pid > 0 and keeper.watch_process(pid)))
    keeper.send(connection, Done(ticket=hello.ticket))


def _launcher_notes(keeper: KeeperServices, connection: Connection, note: LauncherNote, fds: list[int]) -> None:
    connection.note = printable(note.text)[:MAX_NOTE]


def _arena_wanted(keeper: KeeperServices, connection: Connection, wanted: WantArena, fds: list[int]) -> None:
    need = wanted.need
    if min(need.layout_bytes, need.values_bytes, need.payload_bytes) < 0 or not may_request(wanted.slots):
        raise FrameError("an arena of this shape is not possible")
    _from_trainer(keeper, connection, wanted, fds)


def _given_back(keeper: KeeperServices, connection: Connection, given: GiveBack, fds: list[int]) -> None:
    adopted, refused = [], {}
    if len(given.arena_ids) != len(fds):
        raise FrameError("names and descriptors do not match")
    for arena_id, fd in zip(given.arena_ids, fds, strict=True):
        if arena_id in keeper.memory_fds():
            adopted.append(arena_id)
            continue
        try:
            if is_parity(fd):
                _adopt_parity(keeper, fd)
                adopted.append(arena_id)
                continue
            arena, described = _adopt(keeper, fd)
        except OSError as error:  # the machine's fault, not the arena's: its holder reconnects and gives it again
            raise FrameError(f"an arena cannot be adopted now: {error}") from error
        except Error as error:
            refused[arena_id] = str(error)
            log.error("arena refused", extra={"arena": arena_id, "reason": str(error)})
            keeper.handle(ArenaRefused(arena_id[:64], str(error)))
            continue
        if arena.arena_id in keeper.arenas:
            arena.close()
        else:
            keeper.allocator.track(arena)
            keeper.add_arena(arena, described)
            log.info("arena adopted", extra={"arena": arena.arena_id, "local_index": arena.header.local_index})
        adopted.append(arena_id)
    connection.held.update(adopted)
    connection.offered.update(adopted)
    keeper.send(connection, Adopted(adopted, refused, given.ticket))
    keeper.offer_memory()


def _adopt(keeper: KeeperServices, fd: int) -> tuple[Arena, ArenaAdded]:
    own = os.dup(fd)
    try:
        arena = Arena.adopt(own, run_id=keeper.identity.run_id, node_id=keeper.identity.node_id)
        return arena, _with_living_writer(keeper, describe(arena))
    except BaseException:
        os.close(own)
        raise


def _adopt_parity(keeper: KeeperServices, fd: int) -> None:
    buffer, parity_set = adopt_parity(fd, keeper.identity)
    keeper.open_network().add_parity(buffer)
    keeper.offer_memory()
    keeper.handle(ParityPlaced(parity_set))
    log.info("parity adopted", extra={"buffer": buffer.buffer_id, "version": str(parity_set.key.version)})


def _with_living_writer(keeper: KeeperServices, event: ArenaAdded) -> ArenaAdded:
    """Watch the trainer that may still write into an adopted arena, unless its pid belongs to another process now."""
    writer = event.writer
    lives = writer is not None and writer.pid > 0 and keeper.watch_process(writer.pid)
    if writer is not None and lives and start_time(writer.pid) == writer.started:
        return event
    return msgspec.structs.replace(event, writer=None)


def _status_wanted(keeper: KeeperServices, connection: Connection, wanted: WantStatus, fds: list[int]) -> None:
    keeper.send(connection, StatusIs(msgspec.json.encode(keeper.status()), wanted.ticket))


def _verify_wanted(keeper: KeeperServices, connection: Connection, wanted: WantVerify, fds: list[int]) -> None:
    # Values, not the core's slots: those may be granted again while the threads still read.
    slots = [
        (
            keeper.arenas[arena.arena_id],
            VerifyResult(slot.info.rank, slot.index, slot.info.version.step, slot.info.size_bytes, ""),
            slot.info.version,
        )
        for arena, slot in keeper.core.arenas.slots()
        if slot.state == SEALED and slot.info is not None
    ]
    keeper.workers.check(connection.number, wanted.ticket, slots)


def _arenas_wanted(keeper: KeeperServices, connection: Connection, wanted: WantArenas, fds: list[int]) -> None:
    ids = list(keeper.arenas)[:MAX_FDS]
    keeper.send(connection, Hold(ids, [], wanted.ticket), [keeper.arenas[i].segment.fd for i in ids])


def _release(keeper: KeeperServices, connection: Connection, release: Release, fds: list[int]) -> None:
    alive = [t.pid for t in keeper.core.trainers.registered.values() if t.running]
    if alive and not release.force:
        text = f"trainers {alive} of this run are alive"
        keeper.send(connection, Refused("KeeperError", text, "end the job first, or use --force", release.ticket))
        return
    keeper.send(connection, Done("released", release.ticket))
    keeper.end("released")


def _held(keeper: KeeperServices, connection: Connection, held: Held, fds: list[int]) -> None:
    mine = keeper.memory_fds()
    connection.held.update(name for name in held.arena_ids if name in mine)


def _from_trainer(keeper: KeeperServices, connection: Connection, message: TrainerMessage, fds: list[int]) -> None:
    keeper.handle(FromTrainer(connection.number, message))


def _card_wanted(keeper: KeeperServices, connection: Connection, wanted: WantCard, fds: list[int]) -> None:
    """The card of this keeper and the last membership: what a launcher needs to agree on an incarnation."""
    core, membership = keeper.core, keeper.core.orders.membership
    card = CardIs(
        keeper.open_network().card, core.largest_number, list(membership.nodes) if membership else [],
        membership.incarnation.number if membership else 0, bool(keeper.arenas), wanted.ticket,
        membership.secret if membership else b"",
    )  # fmt: skip
    keeper.send(connection, card)


def _outcome_wanted(keeper: KeeperServices, connection: Connection, wanted: WantOutcome, fds: list[int]) -> None:
    trainers = keeper.core.trainers.registered.values()
    failures = [TrainerFailure(t.pid, t.failure) for t in trainers if t.failure is not None]
    keeper.send(connection, OutcomeIs(keeper.core.orders.active.complete, failures, wanted.ticket))


def _members_set(keeper: KeeperServices, connection: Connection, membership: Membership, fds: list[int]) -> None:
    ids = [card.node_id for card in membership.nodes]
    known = 0 <= membership.node_rank < len(ids) and ids[membership.node_rank] == keeper.identity.node_id
    if not known or len(set(ids)) != len(ids):
        text = f"a membership of {ids} in which this node is number {membership.node_rank} makes no sense"
        keeper.send(connection, Refused("KeeperError", text, "", membership.ticket))
        return
    keeper.open_network()
    keeper.handle(MembershipSet(membership))
    keeper.send(connection, Done(ticket=membership.ticket))


def _plan_wanted(keeper: KeeperServices, connection: Connection, wanted: WantPlan, fds: list[int]) -> None:
    try:
        keeper.send(connection, msgspec.structs.replace(forecast(keeper.core, wanted.lost), ticket=wanted.ticket))
    except Error as error:
        keeper.send(connection, Refused(type(error).__name__, error.message, error.hint, wanted.ticket))


def _processes_wanted(keeper: KeeperServices, connection: Connection, wanted: WantProcesses, fds: list[int]) -> None:
    trainers = keeper.core.trainers
    pids = {trainer.pid for trainer in trainers.registered.values() if trainer.alive} | set(trainers.unregistered)
    keeper.send(connection, ProcessesAre(sorted(trainers.launchers), sorted(pids - {0}), wanted.ticket))


def _links_cut(keeper: KeeperServices, connection: Connection, cut: CutLinks, fds: list[int]) -> None:
    if not 0 < cut.seconds <= MAX_CUT_S:
        raise FrameError(f"links are cut for up to {MAX_CUT_S:g} s, not for {cut.seconds:g}")
    if keeper.network is None:
        text = "this keeper has no peers"
        keeper.send(connection, Refused("KeeperError", text, "drill a job of several nodes", cut.ticket))
        return
    keeper.network.cut(cut.seconds)
    keeper.send(connection, Done(ticket=cut.ticket))


_RECEIVE: dict[type, Callable[[KeeperServices, Connection, Any, list[int]], None]] = {
    Register: _registers,
    LauncherHello: _launcher,
    LauncherNote: _launcher_notes,
    WantArena: _arena_wanted,
    GiveBack: _given_back,
    Held: _held,
    WantStatus: _status_wanted,
    WantVerify: _verify_wanted,
    WantArenas: _arenas_wanted,
    Release: _release,
    WantCard: _card_wanted,
    WantOutcome: _outcome_wanted,
    Membership: _members_set,
    WantPlan: _plan_wanted,
    WantProcesses: _processes_wanted,
    CutLinks: _links_cut,
    Committed: _from_trainer,
    Void: _from_trainer,
    WantRestore: _from_trainer,
    Loaded: _from_trainer,
    Failed: _from_trainer,
    Goodbye: _from_trainer,
}
