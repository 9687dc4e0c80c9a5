"""`drill freeze-peer` and `cut-link`: make a keeper unreachable for a while, and report how the group heals.

Neither may disturb training: a lost keeper connection stops protection, never the job. A frozen keeper is
thawed however the drill ends, SIGKILL excepted.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable

from keepstep.cli.drills.processes import NOT_CONFIRMED, ask_status, check_same_namespace, confirmed, open_pidfd, send
from keepstep.cli.keepers import connect, peer
from keepstep.cli.risk import away_from, newest_done
from keepstep.cli.signals import ended_in_order
from keepstep.config import Config
from keepstep.control.client import REQUEST_S
from keepstep.control.messages import CutLinks, Done
from keepstep.control.status import fetch_status
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.types import Status

HEAL_S = 60.0  # from the end of the outage until a newer version is protected; links are up within seconds
POLL_S = 0.2
NOT_HEALED = 3


def freeze_peer(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    with ended_in_order(), connect(identity, config) as link, contextlib.ExitStack() as stack:
        check_same_namespace(link)
        pid = peer(link)[0]
        pidfd = open_pidfd(link, pid, stack)
        before = check_group(ask_status(link, config))
        question = f"SIGSTOP the keeper (pid {pid}) of node {identity.node_id!r} for {args.seconds:g} s?"
        if not confirmed(question, args):
            return NOT_CONFIRMED
        try:
            send(pidfd, signal.SIGSTOP)
            print(f"froze the keeper (pid {pid}) for {args.seconds:g} s", flush=True)
            time.sleep(args.seconds)
        finally:
            send(pidfd, signal.SIGCONT)
    print("thawed", flush=True)
    return report_healing(identity, before)


def cut_link(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    with connect(identity, config) as link:
        before = check_group(ask_status(link, config))
        question = f"cut node {identity.node_id!r} off from its peers for {args.seconds:g} s?"
        if not confirmed(question, args):
            return NOT_CONFIRMED
        link.request(CutLinks(args.seconds), Done, timeout_s=REQUEST_S)
    print(f"cut the keeper of {identity.node_id} off from its peers for {args.seconds:g} s", flush=True)
    mended = time.monotonic() + args.seconds
    noticed = wait_for(identity, lambda status: len(away_from(status)) == len(before.group) - 1, timeout_s=args.seconds)
    if noticed is None:
        print(f"its links did not end within {args.seconds:g} s")
    time.sleep(max(0.0, mended - time.monotonic()))
    print("the links may be made again", flush=True)
    return report_healing(identity, before)


def check_group(status: Status) -> Status:
    if len(status.group) < 2:
        raise KeeperError("this node has no peers to cut off", hint="a job of several nodes, with parity.losses > 0")
    return status


def report_healing(identity: Identity, before: Status) -> int:
    """Report the lag before and after the outage, and when a newer version is protected."""
    ended = time.monotonic()
    after = wait_for(identity, lambda status: True, timeout_s=HEAL_S)
    if after is None:
        print(f"NOT HEALED: the keeper does not answer {HEAL_S:g} s later")
        return NOT_HEALED
    newest = newest_done(after)
    marks = f"done {newest}, protected {after.protected_step}"
    print(f"lag before the outage {_lag(before)}, after it {_lag(after)} ({marks})", flush=True)
    healed = wait_for(identity, lambda status: _is_healed(status, newest), timeout_s=HEAL_S)
    if healed is None:
        print(f"NOT HEALED within {HEAL_S:g} s: keepstep status says why")
        return NOT_HEALED
    seconds = time.monotonic() - ended
    marks = f"step {healed.protected_step} is protected, lag {_lag(healed)}"
    print(f"healed {seconds:.1f} s later: all peers are up, {marks}")
    if healed.incarnation != before.incarnation:
        print(f"but the job was restarted: incarnation {before.incarnation} is now {healed.incarnation}")
        return NOT_HEALED
    return 0


def _is_healed(status: Status, newest: int) -> bool:
    """Whether a step at least as new as the end of the outage is protected on a complete group."""
    return not away_from(status) and status.protected_step is not None and status.protected_step >= newest


def _lag(status: Status) -> str:
    return "unknown" if status.lag_steps is None else str(status.lag_steps)


def wait_for(identity: Identity, holds: Callable[[Status], bool], *, timeout_s: float) -> Status | None:
    """The first status for which `holds` is true; None at the timeout. A busy keeper is asked again."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(Error):
            status = fetch_status(identity, timeout_s=max(POLL_S, deadline - time.monotonic()))
            if holds(status):
                return status
        time.sleep(POLL_S)
    return None
