"""The way back: seal what was committed, plan, verify, plan again without what fails; then one answer. Pure."""

from __future__ import annotations

from keepstep.errors import Error, IntegrityError, KeeperError, RecoveryError
from keepstep.keeper import events as e
from keepstep.keeper import snapshots
from keepstep.keeper.node import COMMITTED, CORRUPT, RESTORING, SEALED, SERVING, Member, Node
from keepstep.protocol import RestoreFrom
from keepstep.recovery.plan import plan


def restore_wanted(node: Node, event: e.RestoreWanted) -> None:
    if node.member_of(event.conn) is None:
        node.refuse(event.conn, event.ticket, KeeperError("register first"))
        return
    node.restore_requests.append(event)
    decide(node)


def decide(node: Node) -> None:
    """Seal, then plan, then verify what the plan needs; again without what fails; then answer."""
    if node.state != RESTORING:
        _answer(node)
        return
    if node.verifying or any(s.state == COMMITTED for a in node.arenas.values() for s in a.slots):
        return
    if _launcher_missing(node):
        return
    if node.decision is None:
        node.decision = plan(node.inventory())
        for piece in node.decision.pieces:
            node.verifying.add((piece.arena_id, piece.slot))
            node.do(e.VerifySlot(piece.arena_id, piece.slot, piece.version))
        if node.verifying:
            return
    node.state = SERVING
    version = node.decision.version
    node.coordinator.base = node.coordinator.complete = version
    if version is not None:
        node.remembered = max(node.remembered or version, version)
    node.write_ledger()
    node.log("info", "restore decided", plan=list(node.decision.reasons), failure=node.decision.failure)
    _answer(node)
    _refuse_other_versions(node)
    snapshots.advance(node)


def _launcher_missing(node: Node) -> bool:
    """An empty keeper in a later incarnation: its launcher may hold what it lost, so wait for its word."""
    agreed = any(m.register.incarnation is not None for m in node.members.values())
    return agreed and not node.arenas and node.incarnation.number > 1 and not node.launcher_reported


def verified(node: Node, event: e.SlotVerified) -> None:
    key = (event.arena_id, event.slot)
    arena = node.arenas.get(event.arena_id)
    if event.problem and arena is not None:
        slot = arena.slots[event.slot]
        if slot.version == event.version and slot.state == SEALED:
            slot.state = CORRUPT
            text = f"local rank {arena.local_index}, {event.version}: {event.problem}"
            node.damaged.append(text)
            node.count("corrupt_slots")
            node.problem(text)
            if node.coordinator.complete == event.version:
                node.coordinator.complete = plan(node.inventory()).version
    if key in node.verifying:
        node.verifying.discard(key)
        if event.problem:
            node.decision = None  # plan again without it, once the others have answered
        decide(node)


def _answer(node: Node) -> None:
    if node.state != SERVING:
        return
    requests, node.restore_requests = node.restore_requests, []
    for request in requests:
        member = node.member_of(request.conn)
        if member is None:
            continue
        answer = _answer_for(node, member, request.ticket)
        if isinstance(answer, Error):
            node.refuse(request.conn, request.ticket, answer)
        else:
            node.do(e.Send(request.conn, answer, answer.arena_id))


def _answer_for(node: Node, member: Member, ticket: int) -> RestoreFrom | Error:
    decision = node.decision
    if decision is None:  # this keeper took over a job that was training already
        return RecoveryError("the training has begun", hint="call restore() once, before the first take()")
    if decision.failure:
        kind = IntegrityError if node.damaged else RecoveryError
        return kind(decision.failure, hint="keepstep inspect shows what is held; keepstep release gives it up")
    if decision.version is None:
        return RestoreFrom(None, "", 0, 0, list(decision.reasons), ticket)
    register = member.register
    piece = next((p for p in decision.pieces if p.local_index == member.index), None)
    first = decision.pieces[0]
    if (
        piece is None
        or (piece.rank, piece.world_size) != (register.rank, register.world_size)
        or first.local_world_size != register.local_world_size
    ):
        return RecoveryError(
            f"{decision.version} was saved by {first.local_world_size} local ranks of {first.world_size}, "
            f"this job has {register.local_world_size} of {register.world_size}",
            hint="start with the same number of ranks, or give the state up with keepstep release",
        )
    if decision.version not in node.coordinator.retain:
        return RecoveryError(
            f"{decision.version} is gone: newer versions have taken its place",
            hint="call restore() once, before the first take()",
        )
    return RestoreFrom(decision.version, piece.arena_id, piece.slot, piece.size_bytes, list(decision.reasons), ticket)


def loaded(node: Node, event: e.RankLoaded) -> None:
    member = node.member_of(event.conn)
    if member is None:
        node.refuse(event.conn, event.ticket, KeeperError("register first"))
        return
    dead = [m.register.rank for m in node.members.values() if not m.alive]
    if dead:
        node.refuse(event.conn, event.ticket, ended_meanwhile(dead[0]))
        return
    arena = node.arena_of(member.index)
    if not member.arena_id and arena is not None:  # it had its memory from the keeper before this one
        member.arena_id = arena.arena_id
    member.loaded = True
    node.loaded_requests.append(event)
    _refuse_other_versions(node)
    snapshots.advance(node)


def _refuse_other_versions(node: Node) -> None:
    """A rank may have loaded what a keeper before this one decided, and another rank what this one does."""
    if node.decision is None or node.state != SERVING:
        return
    version = node.decision.version
    for request in list(node.loaded_requests):
        if request.step is None or (version is not None and request.step == version.step):
            continue
        node.loaded_requests.remove(request)
        text = f"step {request.step} was restored here, and {version or 'nothing'} was decided for all since"
        node.refuse(request.conn, request.ticket, RecoveryError(text, hint="the launcher restarts the job"))
        member = node.member_of(request.conn)
        if member is not None:
            member.loaded = False


def fail_loading(node: Node, error: Error) -> None:
    for request in node.loaded_requests:
        node.refuse(request.conn, request.ticket, error)
    node.loaded_requests = []


def ended_meanwhile(rank: int) -> Error:
    return RecoveryError(f"rank {rank} ended while the job was restoring", hint="the launcher restarts the job")
