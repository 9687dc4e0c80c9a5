"""Trainers and launchers: registration, incarnations, the fence between two of them, orphans. Pure.

Owner of `node.trainers`. An incarnation opens only when every trainer of older ones is dead: they are killed, and
what one that cannot die may still write is quarantined.
"""

from __future__ import annotations

from keepstep.arena.records import Progress
from keepstep.arena.slots import may_request
from keepstep.control.messages import Failed, Goodbye, Register, Registered
from keepstep.errors import Error, KeeperError
from keepstep.keeper.node import arenas, restore, snapshots, state
from keepstep.keeper.node.effects import Kill, Send
from keepstep.keeper.node.events import ArenaAdded, LauncherSeen, ProcessDied, TrainerRegisters
from keepstep.keeper.node.state import MAX_STEP, NodeState, OpeningIncarnation, RegisteredTrainer
from keepstep.types import Incarnation


def register(node: NodeState, event: TrainerRegisters) -> None:
    """A trainer joins the current incarnation, waits for the one that opens, or opens a new one."""
    problem = _registration_problem(node, event)
    if problem:
        node.reply_error(event.conn, event.register.ticket, problem)
        return
    if event.register.launcher_pid:
        node.trainers.launchers.add(event.register.launcher_pid)
    wanted, opening = _incarnation_of(node, event), node.trainers.opening
    if opening is not None and wanted == opening.incarnation:
        opening.waiting.append(event)
    elif wanted == node.incarnation:
        _join(node, event)
    elif event.register.rejoin and node.incarnation.number == 0:
        # This keeper started without a ledger: the trainers know the incarnation.
        node.set_incarnation(wanted)
        node.trainers.label = event.register.label
        node.enter(state.SERVING)
        _join(node, event)
    else:
        _open(node, wanted, event)


# Whether a trainer may register


def _registration_problem(node: NodeState, event: TrainerRegisters) -> Error | None:
    register = event.register
    if not event.alive:
        return KeeperError("the registering process is already dead")
    if not 0 <= register.local_index < register.local_world_size <= register.world_size:
        return KeeperError(f"local rank {register.local_index} of {register.local_world_size} makes no sense")
    if not 0 <= register.rank < register.world_size:
        return KeeperError(f"rank {register.rank} of {register.world_size} makes no sense")
    if not (register.every >= 1 and may_request(register.slots) and -1 <= register.progress < MAX_STEP):
        settings = f"every={register.every}, slots={register.slots}, progress={register.progress}"
        return KeeperError(f"{settings} is out of range")
    return _wrong_incarnation(node, event) or _place_taken(node, event) or _other_settings(node, register)


def _wrong_incarnation(node: NodeState, event: TrainerRegisters) -> Error | None:
    wanted, opening = event.register.incarnation, node.trainers.opening
    newest = opening.incarnation if opening else node.incarnation
    if wanted is None:
        return None
    if not (1 <= wanted.number < MAX_STEP and 0 <= wanted.nonce < 1 << 64):
        return KeeperError(f"incarnation {wanted} makes no sense")
    if wanted != newest and wanted.number <= newest.number:
        return KeeperError(
            f"incarnation {wanted.number} is over, this node is at {newest.number}",
            hint="this trainer belongs to an older round and should end",
        )
    return None


def _place_taken(node: NodeState, event: TrainerRegisters) -> Error | None:
    register = event.register
    current = node.trainers.registered.get(register.local_index)
    if current is None or current.pid == event.pid:
        return None
    if register.incarnation == node.incarnation and node.trainers.opening is None:
        place = f"local rank {register.local_index} of incarnation {node.incarnation.number}"
        hint = "a trainer that died is replaced in a new incarnation, with all others"
        return KeeperError(f"{place} is, or was, process {current.pid}", hint=hint)
    # A running trainer in the same place, under another living launcher: two jobs with one run id.
    launcher = current.register.launcher_pid
    if current.running and launcher in node.trainers.launchers and launcher != register.launcher_pid:
        return KeeperError(
            f"local rank {register.local_index} of this run is taken by process {current.pid}, whose launcher is alive",
            hint="give the new job a run id of its own, or end the old one",
        )
    return None


def _other_settings(node: NodeState, register: Register) -> Error | None:
    others = [t for t in node.trainers.registered.values() if t.index != register.local_index]
    if register.incarnation != node.incarnation or node.trainers.opening is not None or not others:
        return None
    first = others[0].register
    for name in ("world_size", "local_world_size", "every", "slots"):
        own, other = getattr(register, name), getattr(first, name)
        if own != other:
            text = f"rank {register.rank} has {name}={own}, rank {first.rank} has {other}"
            return KeeperError(text, hint="all ranks of a job need the same settings")
    return None


# Incarnations


def _incarnation_of(node: NodeState, event: TrainerRegisters) -> Incarnation:
    """The incarnation that a trainer belongs to; without a launcher that agreed on one, the label decides."""
    register, opening = event.register, node.trainers.opening
    if register.incarnation is not None:
        return register.incarnation
    if opening is not None and opening.label == register.label:
        if all(w.register.local_index != register.local_index for w in opening.waiting):
            return opening.incarnation
    elif opening is None and node.trainers.label == register.label and node.incarnation.number:
        trainers = node.trainers.registered
        if register.local_index not in trainers and all(t.running for t in trainers.values()):
            return node.incarnation
    return Incarnation(node.largest_number + 1, event.nonce)


def _open(node: NodeState, incarnation: Incarnation, event: TrainerRegisters) -> None:
    """Begin the fence: nothing of the new incarnation happens before the old trainers are dead."""
    trainers = node.trainers
    for waiting in trainers.opening.waiting if trainers.opening else []:
        node.reply_error(waiting.conn, waiting.register.ticket, KeeperError("a newer incarnation has begun"))
    deadline = node.now + node.config.keeper.fence_s
    trainers.opening = OpeningIncarnation(incarnation, event.register.label, deadline, [event])
    node.enter(state.FENCING)
    for trainer in trainers.registered.values():
        if trainer.running and trainer.pid != event.pid:
            trainers.dying.add(trainer.pid)
    for pid, older in list(trainers.unregistered.items()):
        if older.number < incarnation.number and pid != event.pid:
            trainers.dying.add(pid)
            del trainers.unregistered[pid]
    for pid in sorted(trainers.dying):
        node.emit(Kill(pid, f"incarnation {incarnation.number} begins"))
    node.log("info", "incarnation opens", number=incarnation.number, fenced=sorted(trainers.dying))
    try_open(node)


def try_open(node: NodeState) -> None:
    """Open the incarnation, if all older trainers are dead or have had `fence_s` to die."""
    trainers, opening = node.trainers, node.trainers.opening
    if opening is None:
        return
    if trainers.awaits_launcher(opening.incarnation, [event.register for event in opening.waiting]):
        return  # what it gives back names the processes to fence
    if trainers.dying:
        if node.now < opening.deadline:
            return
        arenas.quarantine(node, trainers.dying)
        node.problem(f"trainers {sorted(trainers.dying)} could not be killed: their ranks get new arenas")
        trainers.dying.clear()
    trainers.opening = None
    if node.incarnation.number >= opening.incarnation.number:
        # Memory that was given back meanwhile shows that an earlier keeper has opened it, or a later one.
        node.enter(state.WAITING)
    else:
        _begin(node, opening)
    for event in opening.waiting:
        register(node, event)
    for pid in sorted(opening.dead):
        died(node, ProcessDied(pid))


def _begin(node: NodeState, opening: OpeningIncarnation) -> None:
    node.begin_incarnation(opening.incarnation)
    node.enter(state.RESTORING)
    restore.begin_incarnation(node)
    node.orders.begin_incarnation()
    node.grants.begin_incarnation()
    node.trainers.label, node.trainers.registered = opening.label, {}
    arenas.read_again(node)


def _join(node: NodeState, event: TrainerRegisters) -> None:
    register, trainers = event.register, node.trainers
    trainer = RegisteredTrainer(event.conn, event.pid, register)
    earlier = trainers.registered.get(register.local_index)
    if earlier is not None and earlier.pid == event.pid:
        trainer.loaded, trainer.arena_id = earlier.loaded, earlier.arena_id
    trainer.loaded = trainer.loaded or register.rejoin
    trainers.registered[register.local_index] = trainer
    trainers.unregistered.pop(event.pid, None)
    arena = node.arenas.by_id.get(register.arena_id) or node.arenas.of(register.local_index)
    if register.rejoin and arena is not None and arena.local_index == register.local_index:
        trainer.arena_id = arena.arena_id
    node.count("registrations")
    node.emit(Send(event.conn, Registered(node.incarnation, register.ticket)))
    if register.rejoin:
        node.enter(state.SERVING)
        snapshots.take_up_grants(node)
    elif node.state == state.WAITING:
        node.enter(state.RESTORING)  # the keeper died while the job was restoring: plan again, from what was given back


# What adopted arenas show of trainers


def adopt_incarnation(node: NodeState, event: ArenaAdded) -> None:
    """Take over the newest incarnation of an adopted arena; too late for one that has begun here."""
    if node.trainers.registered:
        return
    incarnations = [slot.info.version.incarnation for slot in event.slots if slot.info is not None]
    incarnations += [r.incarnation for r in (event.ledger, event.grant, event.writer) if r is not None]
    node.set_incarnation(max([node.incarnation, *incarnations]))


def adopt_writer(node: NodeState, writer: Progress) -> None:
    """A living trainer that is known only from the arena it writes. One of an older incarnation is fenced."""
    trainers, opening = node.trainers, node.trainers.opening
    if any(trainer.pid == writer.pid for trainer in trainers.registered.values()):
        return
    if opening is None or writer.incarnation.number >= opening.incarnation.number:
        trainers.unregistered[writer.pid] = writer.incarnation
    elif writer.pid not in trainers.dying and all(event.pid != writer.pid for event in opening.waiting):
        trainers.dying.add(writer.pid)
        opening.deadline = max(opening.deadline, node.now + node.config.keeper.fence_s)
        node.emit(Kill(writer.pid, f"incarnation {opening.incarnation.number} begins"))


# Launchers and ends


def launcher_seen(node: NodeState, event: LauncherSeen) -> None:
    """A launcher is connected, and has given back all it held."""
    if event.alive:
        node.trainers.launchers.add(event.pid)
    node.trainers.launcher_reported = True
    try_open(node)


def died(node: NodeState, event: ProcessDied) -> None:
    trainers = node.trainers
    trainers.launchers.discard(event.pid)
    trainers.dying.discard(event.pid)
    trainers.unregistered.pop(event.pid, None)
    if trainers.opening is not None and any(waiting.pid == event.pid for waiting in trainers.opening.waiting):
        trainers.opening.dead.add(event.pid)
    for trainer in trainers.registered.values():
        if trainer.pid == event.pid and trainer.alive:
            trainer.alive = False
            node.count("trainer_deaths", 0 if trainer.finished else 1)
            node.log("info", "trainer ended", rank=trainer.rank, pid=trainer.pid)
            node.grants.withdraw(trainer.index, trainer.rank, "its trainer ended")
            restore.fail_loading(node, trainer.rank)
    try_open(node)


def failed(node: NodeState, trainer: RegisteredTrainer, message: Failed) -> None:
    """Its program ends with this error: the launcher asks for it before it starts the next incarnation."""
    trainer.fail(message)
    node.log("info", "trainer failed", rank=trainer.rank, kind=message.kind, reason=message.text)


def goodbye(node: NodeState, trainer: RegisteredTrainer, message: Goodbye) -> None:
    trainer.finished = message.finished
    node.grants.withdraw(trainer.index, trainer.rank, "its trainer ended")


def watch_orphans(node: NodeState) -> None:
    """Kill trainers whose launcher has been dead for `orphan_s`."""
    trainers = node.trainers
    launched = [t for t in trainers.registered.values() if t.alive and t.register.launcher_pid]
    lost = [t for t in launched if t.register.launcher_pid not in trainers.launchers]
    if not lost:
        trainers.orphaned_since = None
    elif trainers.orphaned_since is None:
        trainers.orphaned_since = node.now
    elif node.now - trainers.orphaned_since >= node.config.keeper.orphan_s:
        for trainer in lost:
            node.emit(Kill(trainer.pid, "its launcher is dead"))
        trainers.orphaned_since = node.now
