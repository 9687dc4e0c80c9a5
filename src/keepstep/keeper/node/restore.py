"""Restore on this node: verify own slots, fetch or rebuild the rest, answer every rank once. Pure.

Owner of `node.restore`. The coordinator plans; this node verifies what it holds and fetches what it does not.
What fails its check is reported and left out of the next plan. Trainers are answered when all nodes are ready
(BEGIN), so every rank restores the same version, or none does.
"""

from __future__ import annotations

from keepstep.control.messages import Done, Loaded, RestoreFrom, WantRestore
from keepstep.errors import RESTART_CURES, Error, IntegrityError, KeeperError, RecoveryError
from keepstep.keeper.coordinator.messages import Failure, RestoreOrder
from keepstep.keeper.node import arenas, state
from keepstep.keeper.node.effects import CancelFetches, FetchSnapshot, Send, SendSnapshot, VerifySlot
from keepstep.keeper.node.events import SlotVerified, SnapshotFetched
from keepstep.keeper.node.state import NodeState, RegisteredTrainer, SnapshotPlace
from keepstep.recovery.plan import OWN, REBUILD, RankSource
from keepstep.types import Version


def begin_incarnation(node: NodeState) -> None:
    """Nothing is planned yet, and requests of the incarnation before are refused."""
    for conn, request in node.restore.requests:
        node.reply_error(conn, request.ticket, KeeperError("a newer incarnation has begun"))
    node.restore.requests, node.restore.loaded_requests = [], []
    if any(trainer.loaded for trainer in node.trainers.registered.values()):
        node.restore.ended = node.trainers.last_end()
    node.restore.had_arenas = bool(node.arenas.by_id)
    _forget_plan(node)


def _forget_plan(node: NodeState) -> None:
    restore = node.restore
    if restore.fetching and restore.order is not None:
        node.emit(CancelFetches(restore.order.number))
    restore.order, restore.ready_number = None, 0
    for planned in (restore.verifying, restore.fetching, restore.places, restore.failures):
        planned.clear()


def requested(node: NodeState, trainer: RegisteredTrainer, wanted: WantRestore) -> None:
    node.restore.requests.append((trainer.conn, wanted))
    answer_requests(node)


def inventory_ready(node: NodeState) -> bool:
    """All that was committed is sealed, and all that others hold for this keeper was given back."""
    registers = [trainer.register for trainer in node.trainers.registered.values()]
    return not node.arenas.any_committed() and not node.trainers.awaits_launcher(node.incarnation, registers)


# The plan


def follow_plan(node: NodeState, order: RestoreOrder) -> bool:
    """Verify or fetch what the plan names; a plan with a higher number replaces one that failed.

    True when the incarnation begins with it.
    """
    if node.state != state.RESTORING:
        return False
    if not node.trainers.complete() and any(piece.source != OWN for piece in order.pieces):
        return False  # this keeper is a new one: wait for the ranks that the bytes are for
    restore = node.restore
    if restore.order is None or order.number > restore.order.number:
        _forget_plan(node)
        restore.order = order
        node.log("info", "plan", number=order.number, version=str(order.version), pieces=len(order.pieces))
        for piece in order.pieces:
            _obtain(node, order, piece)
        _check_ready(node)
    if node.state == state.RESTORING and order.begin and restore.ready_number == order.number == restore.order.number:
        restore.order = order
        _begin(node)
    elif order.failure:
        answer_requests(node)
    return node.state == state.SERVING


def _obtain(node: NodeState, order: RestoreOrder, piece: RankSource) -> None:
    """Verify the snapshot of one rank where it lies on this node, or have it fetched."""
    if piece.source == OWN:
        slot = node.arenas.slot(piece.arena_id, piece.slot)
        if slot is None or slot.version != piece.version or slot.state != state.SEALED:
            _fail_here(node, order, piece, "it is damaged or gone")  # since the node's last report
        else:
            _verify(node, piece.rank, SnapshotPlace(piece.arena_id, piece.slot, piece.size_bytes), piece.version)
        return
    trainer = node.trainers.by_rank(piece.rank)
    if trainer is None:
        _fail_here(node, order, piece, f"rank {piece.rank} has left this node")
    elif (held := _held(node, piece, trainer)) is not None:
        _verify(node, piece.rank, held, piece.version)
    else:
        node.restore.fetching.add(piece.rank)
        index, register = trainer.index, trainer.register
        generation, target = node.arenas.next_generation(index), _target(node, piece, trainer)
        sizes = (register.local_world_size, register.slots, generation)
        node.emit(FetchSnapshot(order.number, piece, index, *sizes, *target, order.holders))


def _verify(node: NodeState, rank: int, place: SnapshotPlace, version: Version) -> None:
    key = (place.arena_id, place.slot)
    node.restore.places[rank] = place
    if key not in node.restore.verifying:
        node.restore.verifying.add(key)
        node.emit(VerifySlot(place.arena_id, place.slot, version))


def _held(node: NodeState, piece: RankSource, trainer: RegisteredTrainer) -> SnapshotPlace | None:
    """Where an earlier plan, or an earlier keeper, has put it already: it is only verified again."""
    for arena, slot in node.arenas.slots():
        info = slot.info
        if slot.state != state.SEALED or info is None or (info.version, info.rank) != (piece.version, piece.rank):
            continue
        if arena.local_index == trainer.index and not arena.quarantined:
            return SnapshotPlace(arena.arena_id, slot.index, info.size_bytes)
    return None


def _target(node: NodeState, piece: RankSource, trainer: RegisteredTrainer) -> tuple[str, int]:
    """Arena and slot to fetch into; "": a new arena."""
    arena = node.arenas.of(trainer.index)
    if arena is None or any(s.version == piece.version and s.state == state.SEALED for s in arena.slots):
        return "", 0  # another rank's snapshot of this version stays there: both would leave no slot to write
    slot = next((s for s in arena.slots if s.state in (state.FREE, state.CORRUPT)), None)
    return (arena.arena_id, slot.index) if slot is not None else ("", 0)


def follows(node: NodeState, plan: int) -> bool:
    return node.restore.order is not None and node.restore.order.number == plan


def fetched(node: NodeState, event: SnapshotFetched) -> None:
    restore = node.restore
    if not follows(node, event.plan) or event.rank not in restore.fetching:
        return
    restore.fetching.discard(event.rank)
    for failure in event.failures:
        _fail(node, failure)
    slot = node.arenas.slot(event.arena_id, event.slot)
    if event.info is not None and slot is not None:
        slot.fetched(event.info, node.now)
        restore.places[event.rank] = SnapshotPlace(event.arena_id, event.slot, event.info.size_bytes)
        node.count("brought_in_bytes", event.info.size_bytes)
    _check_ready(node)


def verified(node: NodeState, event: SlotVerified) -> None:
    """A slot was verified: for the plan, or because a peer received bytes that do not match."""
    key, slot = (event.arena_id, event.slot), node.arenas.slot(event.arena_id, event.slot)
    if event.problem and slot is not None:
        rank = slot.info.rank if slot.info is not None else -1
        corrupt = slot.version == event.version and slot.state == state.SEALED
        if corrupt:
            arenas.mark_corrupt(node, slot, f"rank {rank}, {event.version}: {event.problem}")
        if corrupt or key in node.restore.verifying:
            _fail_own(node, rank, event)
    if key in node.restore.verifying:
        node.restore.verifying.discard(key)
        _check_ready(node)


def _fail_own(node: NodeState, rank: int, event: SlotVerified) -> None:
    order = node.restore.order
    if order is not None and node.state == state.RESTORING:
        node.restore.places.pop(rank, None)
        _fail(node, Failure(order.number, node.card.node_id, rank, event.version, True, event.problem))


def _fail_here(node: NodeState, order: RestoreOrder, piece: RankSource, text: str) -> None:
    _fail(node, Failure(order.number, node.card.node_id, piece.rank, piece.version, False, text))


def _fail(node: NodeState, failure: Failure) -> None:
    node.restore.failures.append(failure)
    node.log("warning", "a source failed", peer=failure.node_id, rank=failure.rank, reason=failure.text)


def _check_ready(node: NodeState) -> None:
    restore, order = node.restore, node.restore.order
    if order is None or order.failure or restore.verifying or restore.fetching:
        return
    if not restore.failures:
        if any(piece.rank not in restore.places for piece in order.pieces):
            return
        restore.ready_number = order.number
    # All others have begun. This keeper is a new one, or it is too late for another plan: then requests are refused.
    if order.begin and node.state == state.RESTORING:
        _begin(node)


def _begin(node: NodeState) -> None:
    assert node.restore.order is not None
    node.enter(state.SERVING)
    node.log("info", "restore decided", plan=list(node.restore.order.reasons), failure=node.restore.order.failure)
    _refuse_other_versions(node)


# Answers


def answer_requests(node: NodeState) -> None:
    """Answer the ranks that wait for their snapshots, once the incarnation has begun or the plan has failed."""
    order = node.restore.order
    if node.state != state.SERVING and not (order is not None and order.failure):
        return
    requests, node.restore.requests = node.restore.requests, []
    for conn, request in requests:
        trainer = node.trainers.by_conn(conn)
        if trainer is None:
            continue
        answer = _answer(node, trainer, request.ticket)
        if isinstance(answer, Error):
            node.reply_error(conn, request.ticket, answer)
        elif answer.version is None:
            node.emit(Send(conn, answer))
        else:
            node.emit(SendSnapshot(conn, answer, order.holders if order is not None else ()))


def _answer(node: NodeState, trainer: RegisteredTrainer, ticket: int) -> RestoreFrom | Error:
    order = node.restore.order
    if order is None:  # this keeper took over a job that was training already
        return RecoveryError("the training has begun", hint="call restore() once, before the first take()")
    if order.failure:
        kind = IntegrityError if order.damage else RecoveryError
        return kind(order.failure, hint="keepstep inspect shows what is held; keepstep release gives it up")
    if order.version is None:
        return RestoreFrom(None, "", 0, 0, list(order.reasons), ticket, had_arenas=node.restore.had_arenas)
    register = trainer.register
    piece = next((p for p in order.pieces if p.rank == register.rank), None)
    place = node.restore.places.get(register.rank)
    if piece is not None and place is None:
        return IntegrityError(
            f"rank {register.rank} of {order.version} was damaged after it was checked", hint=RESTART_CURES
        )
    moved = piece is not None and piece.source == OWN and piece.local_index != trainer.index
    if piece is None or place is None or moved or order.world_size != register.world_size:
        saved = f"{order.version} was saved by {order.local_world_size} local ranks of {order.world_size}"
        return RecoveryError(
            f"{saved}, this job has {register.local_world_size} of {register.world_size}",
            hint="start with the same number of ranks, or give the state up with keepstep release",
        )
    if order.version not in node.retain:
        text = f"{order.version} is gone: newer versions have taken its place"
        return RecoveryError(text, hint="call restore() once, before the first take()")
    source = "parity" if piece.source == REBUILD else "memory"
    return RestoreFrom(
        order.version, place.arena_id, place.slot, place.size_bytes, list(order.reasons), ticket, source,
        ended=node.restore.ended,
    )  # fmt: skip


# Loaded


def loaded(node: NodeState, trainer: RegisteredTrainer, message: Loaded) -> None:
    dead = [t.rank for t in node.trainers.registered.values() if not t.alive]
    if dead:
        node.reply_error(trainer.conn, message.ticket, _ended_meanwhile(dead[0]))
        return
    arena = node.arenas.of(trainer.index)
    if not trainer.arena_id and arena is not None:  # the keeper before this one gave it the arena
        trainer.move_to(arena.arena_id)
    trainer.set_loaded(True)
    node.restore.loaded_requests.append((trainer.conn, message))
    _refuse_other_versions(node)


def _refuse_other_versions(node: NodeState) -> None:
    """A rank may have loaded what an earlier keeper planned, and another rank what this one did: refuse the first."""
    order, restore = node.restore.order, node.restore
    if order is None or node.state != state.SERVING:
        return
    for conn, request in list(restore.loaded_requests):
        if request.step is None or (order.version is not None and request.step == order.version.step):
            continue
        restore.loaded_requests.remove((conn, request))
        text = f"step {request.step} was restored here, and {order.version or 'nothing'} was decided for all since"
        node.reply_error(conn, request.ticket, RecoveryError(text, hint=RESTART_CURES))
        if (trainer := node.trainers.by_conn(conn)) is not None:
            trainer.set_loaded(False)


def answer_loaded(node: NodeState) -> None:
    """All ranks of all nodes are loaded: they may begin."""
    for conn, request in node.restore.loaded_requests:
        node.emit(Send(conn, Done(ticket=request.ticket)))
    node.restore.loaded_requests = []


def fail_loading(node: NodeState, rank: int) -> None:
    """A rank has ended before all were loaded: refuse those that wait."""
    for conn, request in node.restore.loaded_requests:
        node.reply_error(conn, request.ticket, _ended_meanwhile(rank))
    node.restore.loaded_requests = []


def _ended_meanwhile(rank: int) -> Error:
    return RecoveryError(f"rank {rank} ended while the job was restoring", hint=RESTART_CURES)
