"""The way back: seal what was committed, say what is held, bring in what the plan asks for, answer once. Pure.

The coordinator plans (`job`); this node verifies its own slots and fetches or rebuilds the rest. What
fails its check is reported and left out of the next plan; trainers are answered when all nodes are
ready (BEGIN), so every rank restores the same version or none does.
"""

from __future__ import annotations

from keepstep.control.messages import Loaded, RestoreFrom, WantRestore
from keepstep.errors import Error, IntegrityError, KeeperError, RecoveryError
from keepstep.keeper.coordinator.messages import Failure, RestoreOrder
from keepstep.keeper.node import snapshots
from keepstep.keeper.node.effects import CancelFetches, FetchSnapshot, Send, VerifySlot
from keepstep.keeper.node.events import Conn, SlotVerified, SnapshotFetched
from keepstep.keeper.node.state import (
    COMMITTED,
    CORRUPT,
    FREE,
    RESTORING,
    SEALED,
    SERVING,
    NodeState,
    RegisteredTrainer,
    SnapshotPlace,
)
from keepstep.recovery.plan import OWN, REBUILD, RankSource


def forget(node: NodeState) -> None:
    """A new incarnation: nothing is decided."""
    if node.bringing and node.decision is not None:
        node.do(CancelFetches(node.decision.number))
    node.decision, node.restored = None, 0
    node.verifying.clear()
    node.bringing.clear()
    node.places.clear()
    node.failures.clear()


def restore_wanted(node: NodeState, conn: Conn, wanted: WantRestore) -> None:
    if node.member_of(conn) is None:
        node.refuse(conn, wanted.ticket, KeeperError("register first"))
        return
    node.restore_requests.append((conn, wanted))
    answer_requests(node)


def inventory_ready(node: NodeState) -> bool:
    """All that was committed is sealed, and whoever may hold what this keeper lost has spoken."""
    if any(s.state == COMMITTED for a in node.arenas.values() for s in a.slots):
        return False
    return not node.awaits_launcher(node.incarnation, [member.register for member in node.members.values()])


def take_plan(node: NodeState, order: RestoreOrder) -> None:
    """Bring in what the plan asks for; a plan with a higher number takes the place of one that failed."""
    if node.state != RESTORING:
        return
    if not node.whole() and any(piece.source != OWN for piece in order.pieces):
        return  # this keeper is a new one: wait for the ranks that the bytes are for
    if node.decision is None or order.number > node.decision.number:
        forget(node)
        node.decision = order
        node.log("info", "plan", number=order.number, version=str(order.version), pieces=len(order.pieces))
        for piece in order.pieces:
            _bring(node, piece)
        _check_ready(node)
    if node.state == RESTORING and order.begin and node.restored == order.number == node.decision.number:
        node.decision = order
        _begin(node)
    elif order.failure:
        answer_requests(node)


def _bring(node: NodeState, piece: RankSource) -> None:
    assert node.decision is not None
    if piece.source == OWN:
        key = (piece.arena_id, piece.slot)
        arena = node.arenas.get(piece.arena_id)
        slot = arena.slots[piece.slot] if arena is not None else None
        if slot is None or slot.version != piece.version or slot.state != SEALED:
            _fail_here(node, piece, "it is damaged or gone")  # since the coordinator heard of it
            return
        node.places[piece.rank] = SnapshotPlace(piece.arena_id, piece.slot, piece.size_bytes)
        if key not in node.verifying:
            node.verifying.add(key)
            node.do(VerifySlot(piece.arena_id, piece.slot, piece.version))
        return
    member = next((m for m in node.members.values() if m.register.rank == piece.rank), None)
    if member is None:
        _fail_here(node, piece, f"rank {piece.rank} is not here any more")
        return
    if _is_here(node, piece, member):
        return
    register = member.register
    known = node.arena_of(member.index)
    if known is not None and any(s.version == piece.version and s.state == SEALED for s in known.slots):
        known = None  # another rank's bytes of this version are kept there: both would leave no slot to write into
    empty = next((s for s in known.slots if s.state in (FREE, CORRUPT)), None) if known is not None else None
    generation = 1 + max((a.generation for a in node.arenas.values() if a.local_index == member.index), default=0)
    node.bringing.add(piece.rank)
    node.do(
        FetchSnapshot(
            node.decision.number, piece, member.index, register.local_world_size, register.slots, generation,
            known.arena_id if known is not None and empty is not None else "", empty.index if empty is not None else 0,
            node.decision.holders,
        )
    )  # fmt: skip


def _is_here(node: NodeState, piece: RankSource, member: RegisteredTrainer) -> bool:
    """A plan before this one, or a keeper before this one, has brought it already: it is only checked again."""
    for arena in node.arenas.values():
        for slot in arena.slots:
            info = slot.info
            if slot.state != SEALED or info is None or (info.version, info.rank) != (piece.version, piece.rank):
                continue
            if arena.local_index == member.index and not arena.evidence:
                node.places[piece.rank] = SnapshotPlace(arena.arena_id, slot.index, info.size_bytes)
                node.verifying.add((arena.arena_id, slot.index))
                node.do(VerifySlot(arena.arena_id, slot.index, piece.version))
                return True
    return False


def brought_in(node: NodeState, event: SnapshotFetched) -> None:
    """What was asked for is here and verified, or why it is not."""
    if node.decision is None or event.plan != node.decision.number or event.rank not in node.bringing:
        return
    node.bringing.discard(event.rank)
    for failure in event.failures:
        _fail(node, failure)
    info = event.info
    arena = node.arenas.get(event.arena_id)
    if info is not None and arena is not None:
        arena.slots[event.slot].fetched(info, node.now)
        node.places[event.rank] = SnapshotPlace(event.arena_id, event.slot, info.size_bytes)
        node.count("brought_in_bytes", info.size_bytes)
    _check_ready(node)


def _fail_here(node: NodeState, piece: RankSource, text: str) -> None:
    assert node.decision is not None
    _fail(node, Failure(node.decision.number, node.card.node_id, piece.rank, piece.version, False, text))


def _fail(node: NodeState, failure: Failure) -> None:
    node.failures.append(failure)
    node.log("warning", "a source failed", peer=failure.node_id, rank=failure.rank, reason=failure.text)


def verified(node: NodeState, event: SlotVerified) -> None:
    key = (event.arena_id, event.slot)
    arena = node.arenas.get(event.arena_id)
    if event.problem and arena is not None:
        slot = arena.slots[event.slot]
        rank = slot.info.rank if slot.info is not None else -1
        if slot.version == event.version and slot.state == SEALED:
            slot.mark_corrupt()
            text = f"rank {rank}, {event.version}: {event.problem}"
            node.damaged.append(text)
            node.count("corrupt_slots")
            node.problem(text)
            _failed_own(node, rank, event)
        elif key in node.verifying:
            _failed_own(node, rank, event)
    if key in node.verifying:
        node.verifying.discard(key)
        _check_ready(node)


def _failed_own(node: NodeState, rank: int, event: SlotVerified) -> None:
    if node.decision is not None and node.state == RESTORING:
        node.places.pop(rank, None)
        _fail(node, Failure(node.decision.number, node.card.node_id, rank, event.version, True, event.problem))


def _check_ready(node: NodeState) -> None:
    decision = node.decision
    if decision is None or decision.failure or node.verifying or node.bringing:
        return
    if node.failures:
        if decision.begin and node.state == RESTORING:  # too late for another plan: who asks for it hears so
            _begin(node)
        return
    if all(piece.rank in node.places for piece in decision.pieces):
        node.restored = decision.number
        if decision.begin and node.state == RESTORING:  # all others have begun, and this keeper is a new one
            _begin(node)


def _begin(node: NodeState) -> None:
    """All nodes are ready: this incarnation begins."""
    assert node.decision is not None
    node.state = SERVING
    node.log("info", "restore decided", plan=list(node.decision.reasons), failure=node.decision.failure)
    _refuse_other_versions(node)
    snapshots.advance(node)


def answer_requests(node: NodeState) -> None:
    decision = node.decision
    if node.state != SERVING and not (decision is not None and decision.failure):
        return
    requests, node.restore_requests = node.restore_requests, []
    for conn, request in requests:
        member = node.member_of(conn)
        if member is None:
            continue
        answer = _answer_for(node, member, request.ticket)
        if isinstance(answer, Error):
            node.refuse(conn, request.ticket, answer)
        else:
            node.do(Send(conn, answer, answer.arena_id))


def _answer_for(node: NodeState, member: RegisteredTrainer, ticket: int) -> RestoreFrom | Error:
    decision = node.decision
    if decision is None:  # this keeper took over a job that was training already
        return RecoveryError("the training has begun", hint="call restore() once, before the first take()")
    if decision.failure:
        kind = IntegrityError if decision.damage else RecoveryError
        return kind(decision.failure, hint="keepstep inspect shows what is held; keepstep release gives it up")
    if decision.version is None:
        return RestoreFrom(None, "", 0, 0, list(decision.reasons), ticket)
    register = member.register
    piece = next((p for p in decision.pieces if p.rank == register.rank), None)
    place = node.places.get(register.rank)
    if piece is not None and place is None:
        text = f"rank {register.rank} of {decision.version} was damaged after it was checked"
        return IntegrityError(text, hint="the launcher restarts the job")
    moved = piece is not None and piece.source == OWN and piece.local_index != member.index
    if piece is None or place is None or moved or decision.world_size != register.world_size:
        return RecoveryError(
            f"{decision.version} was saved by {decision.local_world_size} local ranks of {decision.world_size}, "
            f"this job has {register.local_world_size} of {register.world_size}",
            hint="start with the same number of ranks, or give the state up with keepstep release",
        )
    if decision.version not in node.retain:
        return RecoveryError(
            f"{decision.version} is gone: newer versions have taken its place",
            hint="call restore() once, before the first take()",
        )
    source = "parity" if piece.source == REBUILD else "memory"
    return RestoreFrom(
        decision.version, place.arena_id, place.slot, place.size_bytes, list(decision.reasons), ticket, source
    )


def loaded(node: NodeState, conn: Conn, message: Loaded) -> None:
    member = node.member_of(conn)
    if member is None:
        node.refuse(conn, message.ticket, KeeperError("register first"))
        return
    dead = [m.register.rank for m in node.members.values() if not m.alive]
    if dead:
        node.refuse(conn, message.ticket, ended_meanwhile(dead[0]))
        return
    arena = node.arena_of(member.index)
    if not member.arena_id and arena is not None:  # it had its memory from the keeper before this one
        member.arena_id = arena.arena_id
    member.loaded = True
    node.loaded_requests.append((conn, message))
    _refuse_other_versions(node)
    snapshots.advance(node)


def _refuse_other_versions(node: NodeState) -> None:
    """A rank may have loaded what a keeper before this one decided, and another rank what this one does."""
    if node.decision is None or node.state != SERVING:
        return
    version = node.decision.version
    for conn, request in list(node.loaded_requests):
        if request.step is None or (version is not None and request.step == version.step):
            continue
        node.loaded_requests.remove((conn, request))
        text = f"step {request.step} was restored here, and {version or 'nothing'} was decided for all since"
        node.refuse(conn, request.ticket, RecoveryError(text, hint="the launcher restarts the job"))
        member = node.member_of(conn)
        if member is not None:
            member.loaded = False


def fail_loading(node: NodeState, error: Error) -> None:
    for conn, request in node.loaded_requests:
        node.refuse(conn, request.ticket, error)
    node.loaded_requests = []


def ended_meanwhile(rank: int) -> Error:
    return RecoveryError(f"rank {rank} ended while the job was restoring", hint="the launcher restarts the job")
