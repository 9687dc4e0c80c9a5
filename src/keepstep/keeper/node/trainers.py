"""Trainers and launchers come and go: which incarnation they belong to, and the fence between two. Pure."""

from __future__ import annotations

from keepstep.arena.slots import MAX_SLOTS
from keepstep.control.messages import Goodbye, Register, Registered
from keepstep.errors import Error, KeeperError
from keepstep.keeper.node import restore, snapshots
from keepstep.keeper.node.effects import Kill, SealSlot, Send
from keepstep.keeper.node.events import Conn, LauncherSeen, ProcessDied, TrainerRegisters
from keepstep.keeper.node.grants import Grants
from keepstep.keeper.node.state import (
    FENCING,
    FREE,
    GRANTED,
    MAX_STEP,
    RESTORING,
    SERVING,
    WAITING,
    NodeState,
    OpeningIncarnation,
    RegisteredTrainer,
)  # fmt: skip
from keepstep.types import Incarnation


def register(node: NodeState, event: TrainerRegisters) -> None:
    problem = _registration_problem(node, event)
    if problem:
        node.refuse(event.conn, event.register.ticket, problem)
        return
    if event.register.launcher_pid:
        node.launchers.add(event.register.launcher_pid)
    wanted = _incarnation_of(node, event)
    if node.opening is not None and wanted == node.opening.incarnation:
        node.opening.waiting.append(event)
    elif wanted == node.incarnation:
        _join(node, event)
    elif event.register.rejoin and node.incarnation.number == 0:
        # This keeper came back with no ledger: the trainers know better.
        node.incarnation, node.label, node.state = wanted, event.register.label, SERVING
        _join(node, event)
    else:
        _open(node, wanted, event)


def _registration_problem(node: NodeState, event: TrainerRegisters) -> Error | None:
    register = event.register
    if not event.alive:
        return KeeperError("the registering process is already dead")
    if not 0 <= register.local_index < register.local_world_size <= register.world_size:
        return KeeperError(f"local rank {register.local_index} of {register.local_world_size} makes no sense")
    if not 0 <= register.rank < register.world_size:
        return KeeperError(f"rank {register.rank} of {register.world_size} makes no sense")
    if not (register.every >= 1 and 2 <= register.slots <= MAX_SLOTS and -1 <= register.progress < MAX_STEP):
        return KeeperError(f"every={register.every}, slots={register.slots}, progress={register.progress}?")
    return _wrong_life(node, event) or _wrong_place(node, event) or _other_settings(node, register)


def _wrong_life(node: NodeState, event: TrainerRegisters) -> Error | None:
    wanted = event.register.incarnation
    if wanted is None:
        return None
    newest = node.opening.incarnation if node.opening else node.incarnation
    if not (1 <= wanted.number < MAX_STEP and 0 <= wanted.nonce < 1 << 64):
        return KeeperError(f"incarnation {wanted} makes no sense")
    if wanted != newest and wanted.number <= newest.number:
        return KeeperError(
            f"incarnation {wanted.number} is over, this node is at {newest.number}",
            hint="this trainer belongs to an older round and should end",
        )
    return None


def _wrong_place(node: NodeState, event: TrainerRegisters) -> Error | None:
    register = event.register
    known = node.members.get(register.local_index)
    same_life = register.incarnation == node.incarnation and node.opening is None
    if same_life and known is not None and known.pid != event.pid:
        return KeeperError(
            f"local rank {register.local_index} of incarnation {node.incarnation.number} is, or was, "
            f"process {known.pid}",
            hint="a trainer that died is replaced in a new incarnation, with all others",
        )
    rival = _rival(node, event)
    if rival is not None:
        return KeeperError(
            f"local rank {register.local_index} of this run is taken by process {rival.pid}, whose launcher lives",
            hint="give the new job a run id of its own, or end the old one",
        )
    return None


def _other_settings(node: NodeState, register: Register) -> Error | None:
    others = [m for m in node.members.values() if m.index != register.local_index]
    if register.incarnation != node.incarnation or node.opening is not None or not others:
        return None
    first = others[0].register
    for name in ("world_size", "local_world_size", "every", "slots"):
        if getattr(first, name) != getattr(register, name):
            return KeeperError(
                f"rank {register.rank} has {name}={getattr(register, name)}, "
                f"rank {first.rank} has {getattr(first, name)}",
                hint="all ranks of a job need the same settings",
            )
    return None


def _rival(node: NodeState, event: TrainerRegisters) -> RegisteredTrainer | None:
    """A living trainer in the same place, under another living launcher: two jobs with one run id."""
    known = node.members.get(event.register.local_index)
    if known is None or not known.alive or known.finished is not None or known.pid == event.pid:
        return None
    launcher = known.register.launcher_pid
    return known if launcher in node.launchers and launcher != event.register.launcher_pid else None


def _incarnation_of(node: NodeState, event: TrainerRegisters) -> Incarnation:
    register = event.register
    if register.incarnation is not None:
        return register.incarnation
    if node.opening is not None and node.opening.label == register.label:
        if all(w.register.local_index != register.local_index for w in node.opening.waiting):
            return node.opening.incarnation
    elif node.opening is None and node.label == register.label and node.incarnation.number:
        fresh = all(m.alive and m.finished is None for m in node.members.values())
        if fresh and register.local_index not in node.members:
            return node.incarnation
    return Incarnation(node.largest_number + 1, event.nonce)


def _open(node: NodeState, incarnation: Incarnation, event: TrainerRegisters) -> None:
    """Begin the fence: nothing of the new incarnation happens before the old trainers are dead."""
    stale = node.opening.waiting if node.opening else []
    for waiting in stale:
        node.refuse(waiting.conn, waiting.register.ticket, KeeperError("a newer incarnation has begun"))
    node.opening = OpeningIncarnation(incarnation, event.register.label, node.now + node.limits.fence_s, [event])
    node.state = FENCING
    for member in node.members.values():
        if member.alive and member.finished is None and member.pid != event.pid:
            node.zombies.add(member.pid)
    for pid, life in list(node.strangers.items()):
        if life.number < incarnation.number and pid != event.pid:
            node.zombies.add(pid)
            del node.strangers[pid]
    for pid in sorted(node.zombies):
        node.do(Kill(pid, f"incarnation {incarnation.number} begins"))
    node.log("info", "incarnation opens", number=incarnation.number, fenced=sorted(node.zombies))
    try_open(node)


def try_open(node: NodeState) -> None:
    if node.opening is None:
        return
    if node.awaits_launcher(node.opening.incarnation, [event.register for event in node.opening.waiting]):
        return  # whom to fence is known from what it gives back
    if node.zombies and node.now < node.opening.deadline:
        return
    if node.zombies:
        _abandon_arenas(node)
    opening, node.opening = node.opening, None
    if node.incarnation.number >= opening.incarnation.number:
        # The memory that was given back meanwhile says so: a keeper before this one has opened it, or a later one.
        node.state = WAITING
    else:
        _begin_life(node, opening)
    for event in opening.waiting:
        register(node, event)
    for pid in sorted(opening.dead):
        died(node, ProcessDied(pid))


def _begin_life(node: NodeState, opening: OpeningIncarnation) -> None:
    node.incarnation, node.label = opening.incarnation, opening.label
    for conn, request in node.restore_requests:
        node.refuse(conn, request.ticket, KeeperError("a newer incarnation has begun"))
    node.members, node.restore_requests, node.loaded_requests = {}, [], []
    node.grants, node.orders, node.job, node.settled = Grants(), None, None, 0
    node.state = RESTORING
    restore.forget(node)
    node.last_grant.clear()
    node.progress.clear()
    node.early.clear()
    _reclaim_slots(node)


def stranger_found(node: NodeState, pid: int, life: Incarnation) -> None:
    """A living trainer that this keeper knows only from the memory it writes. One of an older life is fenced."""
    opening = node.opening
    if opening is None or life.number >= opening.incarnation.number:
        node.strangers[pid] = life
    elif pid not in node.zombies and all(event.pid != pid for event in opening.waiting):
        node.zombies.add(pid)
        opening.deadline = max(opening.deadline, node.now + node.limits.fence_s)
        node.do(Kill(pid, f"incarnation {opening.incarnation.number} begins"))


def _abandon_arenas(node: NodeState) -> None:
    stuck = {member.index for member in node.members.values() if member.pid in node.zombies}
    for arena in node.arenas.values():
        if arena.local_index in stuck or arena.writer_pid in node.zombies:
            arena.evidence = True
    node.problem(f"trainers {sorted(node.zombies)} could not be killed: their ranks get new arenas")
    node.zombies.clear()


def _reclaim_slots(node: NodeState) -> None:
    """Granted and half-written slots are nobody's any more. Committed ones are sealed before a decision."""
    for arena in node.arenas.values():
        for slot in arena.slots:
            if slot.state in (GRANTED, FREE):
                # Look again: its writer may have committed without a word, or not have begun.
                slot.read_again()
                node.do(SealSlot(arena.arena_id, slot.index, None, node.remembered))


def _join(node: NodeState, event: TrainerRegisters) -> None:
    register = event.register
    member = RegisteredTrainer(event.conn, event.pid, register)
    known = node.members.get(register.local_index)
    if known is not None and known.pid == event.pid:
        member.loaded, member.arena_id = known.loaded, known.arena_id
    member.loaded = member.loaded or register.rejoin
    node.members[register.local_index] = member
    node.strangers.pop(event.pid, None)
    arena = node.arenas.get(register.arena_id) or node.arena_of(register.local_index)
    if register.rejoin and arena is not None and arena.local_index == register.local_index:
        member.arena_id = arena.arena_id
    node.count("registrations")
    node.do(Send(event.conn, Registered(node.incarnation, register.ticket)))
    if register.rejoin:
        node.state = SERVING
        snapshots.advance(node)
    elif node.state == WAITING:
        # The keeper died while the job was restoring: decide again, from what was given back.
        node.state = RESTORING


def launcher_seen(node: NodeState, event: LauncherSeen) -> None:
    if event.alive:
        node.launchers.add(event.pid)
    node.launcher_reported = True
    try_open(node)


def died(node: NodeState, event: ProcessDied) -> None:
    node.launchers.discard(event.pid)
    node.zombies.discard(event.pid)
    node.strangers.pop(event.pid, None)
    if node.opening is not None and any(waiting.pid == event.pid for waiting in node.opening.waiting):
        node.opening.dead.add(event.pid)
    for member in node.members.values():
        if member.pid == event.pid and member.alive:
            member.alive = False
            node.count("trainer_deaths", 0 if member.finished else 1)
            node.log("info", "trainer ended", rank=member.register.rank, pid=member.pid)
            node.grants.withdraw(member.index, member.register.rank, "its trainer ended")
            restore.fail_loading(node, restore.ended_meanwhile(member.register.rank))
    try_open(node)
    snapshots.advance(node)


def said_goodbye(node: NodeState, conn: Conn, message: Goodbye) -> None:
    member = node.member_of(conn)
    if member is None:
        return
    member.finished = message.finished
    node.grants.withdraw(member.index, member.register.rank, "its trainer ended")


def watch_orphans(node: NodeState) -> None:
    """Trainers whose launcher has died may run on for a while, not for ever."""
    orphans = [m for m in node.members.values() if m.alive and m.register.launcher_pid]
    lost = [m for m in orphans if m.register.launcher_pid not in node.launchers]
    if not lost:
        node.orphaned_since = None
    elif node.orphaned_since is None:
        node.orphaned_since = node.now
    elif node.now - node.orphaned_since >= node.limits.orphan_s:
        for member in lost:
            node.do(Kill(member.pid, "its launcher is dead"))
        node.orphaned_since = node.now
