"""`drill kill-trainer`, `kill-keeper` and `kill-node`: SIGKILL, and a line on what should happen next."""

from __future__ import annotations

import argparse
import contextlib
import signal

from keepstep.cli.drills.processes import (
    NOT_CONFIRMED,
    ask_status,
    check_same_namespace,
    confirmed,
    hold_still,
    open_pidfd,
    send,
    wait_until_dead,
)
from keepstep.cli.keepers import connect, peer
from keepstep.cli.risk import losses_left, newest_done, of_dead_node
from keepstep.cli.tables import count
from keepstep.config import Config
from keepstep.control.client import KeeperClient
from keepstep.control.status import fetch_status
from keepstep.errors import KeeperError
from keepstep.identity import Identity
from keepstep.types import RankStatus, Status


def kill_trainer(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    targets = choose_trainers(fetch_status(identity), rank=args.rank, every=args.all)
    named = ", ".join(f"rank {target.rank} (pid {target.pid})" for target in targets)
    if not confirmed(f"SIGKILL {named} of run {identity.run_id!r}?", args):
        return NOT_CONFIRMED
    with connect(identity, config) as link:
        check_same_namespace(link)
        status = kill(link, {target.pid: target.rank for target in targets}, config)
    print(f"killed {named}")
    print(_after_trainers(status))
    return 0


def choose_trainers(status: Status, *, rank: int | None, every: bool) -> list[RankStatus]:
    living = [trainer for trainer in status.ranks if trainer.alive and trainer.pid > 0]
    chosen = living if every else [trainer for trainer in living if rank in (None, trainer.rank)][:1]
    if not chosen:
        what = "no trainer" if rank is None else f"no trainer of rank {rank}"
        raise KeeperError(f"{what} lives on this node", hint="keepstep status lists the trainers")
    return chosen


def kill(link: KeeperClient, ranks: dict[int, int], config: Config) -> Status:
    """SIGKILL trainers by pid, all or none. Returns the status from just before."""
    with contextlib.ExitStack() as stack:
        pidfds = {pid: open_pidfd(link, pid, stack) for pid in ranks}
        status = ask_status(link, config)
        living = {trainer.pid: trainer.rank for trainer in status.ranks if trainer.alive}
        for pid, rank in ranks.items():
            # The keeper follows its trainers by pidfd: one that is alive now is the process of our pidfd.
            if living.get(pid) != rank:
                raise KeeperError(f"process {pid} is not the trainer of rank {rank} any more", hint="keepstep status")
        for pidfd in pidfds.values():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid, pidfd in pidfds.items():
            wait_until_dead(pid, pidfd)
    return status


def _after_trainers(status: Status) -> str:
    back = "the run begins again: no version was complete"
    if status.step is not None:
        back = f"restore() restores step {status.step} or a later one"
    if status.keeper.launcher_alive:
        return f"now: the launcher starts the trainers again, and {back}"
    return f"now: start the job again with the run id {status.run_id!r}, and {back}"


def kill_keeper(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    with connect(identity, config) as link, contextlib.ExitStack() as stack:
        pid = peer(link)[0]
        if not pid:
            raise KeeperError("the keeper runs in another PID namespace", hint="run the drill inside its container")
        pidfd = open_pidfd(link, pid, stack)
        status = ask_status(link, config)  # it answers on this connection: the pidfd is its own
        risk = "" if status.keeper.holders else " NO OTHER PROCESS HOLDS THE MEMORY: the state will be lost."
        if not confirmed(f"SIGKILL the keeper (pid {pid}) of run {identity.run_id!r}?{risk}", args):
            return NOT_CONFIRMED
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_until_dead(pid, pidfd)
    print(f"killed the keeper (pid {pid})")
    if status.keeper.holders:
        print("now: a process that holds the memory starts a new keeper, which adopts it; training does not stop")
    else:
        print("now: the state is lost; the next trainer starts a new keeper")
    return 0


def kill_node(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    """Kill all processes of this run on this node at once, as a power failure does."""
    with connect(identity, config) as link, contextlib.ExitStack() as stack:
        check_same_namespace(link)
        check_covered(ask_status(link, config), force=args.force)
        what = f"every process of run {identity.run_id!r} on node {identity.node_id!r}"
        if not confirmed(f"SIGKILL {what}?", args):
            return NOT_CONFIRMED
        status = ask_status(link, config)
        check_covered(status, force=args.force)  # training has continued meanwhile
        pidfds = hold_still(link, config, stack)
        for pidfd in pidfds.values():
            send(pidfd, signal.SIGKILL)
        for pid, pidfd in pidfds.items():
            wait_until_dead(pid, pidfd)
    print(f"killed all {len(pidfds)} processes of node {identity.node_id}")
    print(_after_node(status))
    return 0


def check_covered(status: Status, *, force: bool) -> None:
    """Refuse a drill that would lose the state of the run, unless forced."""
    if not force and losses_left(status) == 0:
        raise KeeperError(
            f"the run would lose its state. {of_dead_node(status)}", hint="wait for a protected version; or --force"
        )


def _after_node(status: Status) -> str:
    if status.protected_step is None:
        return "now: the state of this node is lost"
    lag = max(0, newest_done(status) - status.protected_step)
    return (
        "now: the launchers of the other nodes notice within seconds and wait for a node in its place (a spare, or a "
        f"launcher that you start); then restore() restores step {status.protected_step} or a later one "
        f"({count(lag, 'step')} of {newest_done(status)} done again at most)"
    )
