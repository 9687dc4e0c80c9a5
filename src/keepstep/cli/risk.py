"""What a failure would cost now, and what is not protected, as sentences. Pure, from the status of one keeper.

For a job of several nodes the loss of a node comes first: it costs more than the loss of trainers, and people are
paged for it. `unprotected` decides the exit code of `keepstep status`.
"""

from __future__ import annotations

from keepstep.cli.tables import count
from keepstep.types import Status


def headline(status: Status) -> str:
    """The cost of the worst likely failure, in one sentence."""
    if not status.ranks:
        return "No trainer has registered yet: nothing is held."
    if not any(rank.alive for rank in status.ranks):
        return _of_dead_trainers(status)
    return of_dead_node(status) if status.num_nodes > 1 else of_crash(status)


def of_crash(status: Status) -> str:
    """Cost of the loss of all trainers, while all nodes and keepers live."""
    progress = newest_done(status)
    if corrupt := _corrupt(status):
        step, ranks = corrupt
        return f"A crash of the trainers now would go back beyond step {step}: it is corrupt on rank {ranks}."
    if status.step is None:
        lost = f"all steps up to {progress}" if progress >= 0 else "the start of the run"
        return f"A crash of the trainers now would cost {lost}: no version is complete yet."
    lost_steps = max(0, progress - status.step)
    if lost_steps == 0:
        return f"A crash of the trainers now would cost no finished step: step {status.step} is complete."
    steps = count(lost_steps, "step")
    return f"A crash of the trainers now would cost {steps}: {progress} is done, {status.step} is complete."


def of_dead_node(status: Status) -> str:
    """Cost of the loss of a node with its keeper and everything on it."""
    newest = newest_done(status)
    if status.protected_step is None:
        lost = f"all steps up to {newest}" if newest >= 0 else "the start of the run"
        return f"A dead node now costs {lost}: no version is protected yet."
    marks = f"protected step {status.protected_step}, newest {max(newest, status.protected_step)}"
    away, covered = len(away_from(status)), losses_left(status)
    if covered == 0:
        why = f"{count(away, 'node')} of its group cannot be reached already" if away else "no other node protects it"
        return f"A dead node now costs the run ({marks}): {why}."
    lag = max(0, newest - status.protected_step)
    steps = "no finished step" if lag == 0 else count(lag, "step")
    more = " more" if away else ""
    return f"A dead node now costs {steps} ({marks}); up to {count(covered, 'node')}{more} of this group may die."


def unprotected(status: Status) -> list[str]:
    """Why this run is not fully protected, as sentences; empty when it is."""
    reported = any("no version is complete" in problem for problem in status.problems)
    reasons = ["no version is complete"] if status.step is None and not reported else []
    dead = [str(rank.rank) for rank in status.ranks if not rank.alive]
    if dead:
        reasons.append(f"no trainer lives for rank {', '.join(dead)}")
    if status.exposed:
        reasons.append("fewer losses are covered than the settings ask for")
    return [*reasons, *_of_the_group(status), *status.problems]


def _of_the_group(status: Status) -> list[str]:
    if status.num_nodes <= 1:
        return []
    if not status.group:
        return ["this node has no group: no other node protects it"] if status.ranks else []
    reasons = ["no version is protected: a dead node would cost the run"] if status.protected_step is None else []
    away = [node_id for node_id in away_from(status) if not any(node_id in problem for problem in status.problems)]
    if away:
        reasons.append(f"the keepers of {', '.join(away)} cannot be reached")
    return reasons


def losses_left(status: Status) -> int:
    """Nodes of this group that may still die: those that cannot be reached may be dead already."""
    return 0 if status.protected_step is None else max(0, status.losses_covered - len(away_from(status)))


def away_from(status: Status) -> list[str]:
    return [peer.node_id for peer in status.group if not peer.up]


def newest_done(status: Status) -> int:
    return max((rank.progress for rank in status.ranks if rank.progress is not None), default=-1)


def _corrupt(status: Status) -> tuple[int, str] | None:
    """A corrupt step newer than the newest complete one, and the ranks on which it is corrupt."""
    damaged = [
        (slot.step, rank.rank)
        for rank in status.ranks
        for slot in rank.slots
        if slot.state == "corrupt" and slot.step is not None and (status.step is None or slot.step > status.step)
    ]
    if not damaged:
        return None
    newest = max(step for step, _ in damaged)
    return newest, ", ".join(str(rank) for step, rank in damaged if step == newest)


def _of_dead_trainers(status: Status) -> str:
    held = "nothing is held" if status.step is None else f"step {status.step} is held"
    if corrupt := _corrupt(status):
        held += f" (step {corrupt[0]} is corrupt on rank {corrupt[1]})"
    if status.keeper.lease_left_s is not None:
        return f"No trainer and no launcher lives; {held} for another {status.keeper.lease_left_s:.0f} s."
    return f"No trainer lives; {held} until the launcher starts them again."
