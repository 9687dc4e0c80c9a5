"""`keepstep release`: free the state of a run and end its keeper.

Returns when the keeper's process has ended and its files are removed, within `REQUEST_S`. Files of a
killed keeper are removed too, under the lock that a new keeper would take.
"""

from __future__ import annotations

import argparse
import os
import select
from dataclasses import dataclass

from keepstep.cli.keepers import KnownRun, add_choice, choose_run, connect, find_meant, find_runs, peer, settings
from keepstep.config import Config
from keepstep.control.client import REQUEST_S
from keepstep.control.messages import Done, Release
from keepstep.control.status import fetch_status
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.layout import format_bytes

LEASED = "leased"


@dataclass(frozen=True)
class Released:
    """The memory of a released run."""

    memory_bytes: int
    holders: int  # processes besides the keeper that hold the memory; it is freed when they close it

    def __str__(self) -> str:
        size = format_bytes(self.memory_bytes)
        if self.holders:
            holders = "1 other process closes" if self.holders == 1 else f"{self.holders} other processes close"
            return f"its keeper has ended, {size} of memory are free when {holders} it"
        return f"its keeper has ended, {size} of memory are free"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--force", action="store_true", help="even while trainers of the run live")
    parser.add_argument("--all", action="store_true", help="every run that neither a launcher nor a trainer uses")


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    if args.all:
        return _release_unused(config)
    if _swept(config):
        return 0
    identity = choose_run(config, suggest=False)
    try:
        released = release(identity, config, force=args.force)
    except KeeperError:
        if _swept(config):  # It was dying: a process that is killed closes its sockets last.
            return 0
        raise
    print(f"run {identity.run_id!r} (node {identity.node_id!r}): {released}")
    return 0


def _swept(config: Config) -> bool:
    """Remove what a dead keeper of the chosen run has left. False if its keeper lives."""
    dead = _find_dead(config)
    if dead is None:
        return False
    _sweep(dead.identity)
    print(f"run {dead}: its keeper was dead already, its files are removed")
    return True


def release(identity: Identity, config: Config, *, force: bool = False) -> Released:
    """End one keeper. Refused while trainers live, unless forced."""
    before = fetch_status(identity)
    with connect(identity, config) as link:
        pid = peer(link)[0]
        pidfd = os.pidfd_open(pid) if pid else -1
        try:
            link.request(Release(force), Done, timeout_s=REQUEST_S)
            _wait_until_gone(identity, pidfd, timeout_s=REQUEST_S)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
    trainers = sum(rank.alive for rank in before.ranks)
    return Released(before.memory_bytes, max(before.keeper.holders, trainers))


def _wait_until_gone(identity: Identity, pidfd: int, *, timeout_s: float) -> None:
    if pidfd < 0:  # another PID namespace: its end cannot be observed here, and it has accepted the request
        return
    ended, _, _ = select.select([pidfd], [], [], timeout_s)
    if not ended:
        raise KeeperError(
            f"the keeper of run {identity.run_id!r} has not ended within {timeout_s:g} s",
            hint=f"see {identity.directory}/keeper.log",
        )


def _find_dead(config: Config) -> KnownRun | None:
    """The chosen run, if its keeper is dead."""
    runs = find_meant(config)
    return runs[0] if len(runs) == 1 and not runs[0].alive else None


def _sweep(identity: Identity) -> None:
    from keepstep.keeper.singleton import KeeperDirectory

    KeeperDirectory(identity).close()


def _release_unused(config: Config) -> int:
    """Release every unused run; a failure does not stop the others."""
    failed = False
    runs = find_runs(config)
    for run in runs:
        try:
            print(f"run {run}: {_release_one(run, config)}")
        except Error as error:
            failed = True
            print(f"run {run}: {error}")
    if not runs:
        print("no keeper of this user runs on this node")
    return 1 if failed else 0


def _release_one(run: KnownRun, config: Config) -> str:
    if not run.alive:
        _sweep(run.identity)
        return "its keeper was dead already, its files are removed"
    if fetch_status(run.identity).keeper.state != LEASED:
        return "in use, not released"
    return str(release(run.identity, config))
