"""Confirmation, and signals to processes of a run.

Signals are sent by pidfd. A pidfd is opened before the keeper reports once more which process is which, so that a
signal never reaches another process that was given the same pid. And only processes of the keeper's own user are
signalled: a keeper that names others would have root kill them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from keepstep.cli.keepers import peer
from keepstep.config import Config
from keepstep.control.client import REQUEST_S, KeeperClient
from keepstep.control.messages import ProcessesAre, StatusIs, WantProcesses, WantStatus
from keepstep.control.status import decode_status
from keepstep.errors import KeeperError
from keepstep.types import Status

DIE_S = 10.0  # from SIGKILL to the end of a process: longer only while it is stuck in the kernel
MAX_ROUNDS = 100  # of stopping new children
NOT_CONFIRMED = 1


def confirmed(question: str, args: argparse.Namespace) -> bool:
    """Whether the user answers yes, or passed --yes."""
    if args.yes:
        return True
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        raise KeeperError("the drill needs a confirmation, and there is no terminal", hint="--yes") from None
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was done", file=sys.stderr)
    return False


def ask_status(link: KeeperClient, config: Config) -> Status:
    answer, _ = link.request(WantStatus(), StatusIs, timeout_s=REQUEST_S)
    return decode_status(answer.json)


def check_same_namespace(link: KeeperClient) -> None:
    """Refuse the drill unless pids mean the same processes here as in the keeper."""
    try:
        same = os.readlink(f"/proc/{peer(link)[0]}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        same = False
    if not same:
        raise KeeperError("the keeper runs in another PID namespace", hint="run the drill inside its container")


def open_pidfd(link: KeeperClient, pid: int, stack: contextlib.ExitStack) -> int:
    """Open a process that the keeper has named. Raises when it belongs to another user than the keeper."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise KeeperError(f"process {pid} is gone already", hint="keepstep status") from None
    stack.callback(os.close, pidfd)
    _, owner = peer(link)
    uids = _uids(pid)
    if select.select([pidfd], [], [], 0)[0]:  # what was read may be of a later process with this pid
        raise KeeperError(f"process {pid} is gone already", hint="keepstep status")
    if uids != {owner}:
        raise KeeperError(
            f"process {pid} does not belong to user {owner}, whose keeper named it", hint="nothing was done"
        )
    return pidfd


def send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def wait_until_dead(pid: int, pidfd: int) -> None:
    if not select.select([pidfd], [], [], DIE_S)[0]:
        raise KeeperError(f"process {pid} is still there {DIE_S:g} s after SIGKILL", hint="it is stuck in the kernel")


def hold_still(link: KeeperClient, config: Config, stack: contextlib.ExitStack) -> dict[int, int]:
    """Stop every process of the node, so that none reacts to the end of another; pidfds by pid. The stack closes them.

    The keeper reports itself, the launchers and the trainers; data-loader workers and the like are their children.
    Raises before anything is stopped when the drill itself is among them.
    """
    pidfds = {}
    for pid in _reported(link, config):
        with contextlib.suppress(KeeperError):
            pidfds[pid] = open_pidfd(link, pid, stack)
    again = _reported(link, config)  # the keeper follows them by pidfd: a pid reported again is the same process
    pidfds = {pid: pidfd for pid, pidfd in pidfds.items() if pid in again}
    if _ancestry(os.getpid()) & pidfds.keys():
        raise KeeperError("the drill runs inside the job that it would kill", hint="another shell")
    for pidfd in pidfds.values():
        send(pidfd, signal.SIGSTOP)
    for _ in range(MAX_ROUNDS):  # stopped processes start no more children: this ends
        new = _children(pidfds) - pidfds.keys()
        if not new:
            break
        for pid in new:
            with contextlib.suppress(KeeperError):
                pidfd = open_pidfd(link, pid, stack)
                if _parent(pid) in pidfds:
                    pidfds[pid] = pidfd
                    send(pidfd, signal.SIGSTOP)
    return pidfds


def _reported(link: KeeperClient, config: Config) -> list[int]:
    """Processes that the keeper reports. Launchers first: one that still runs would start trainers again."""
    processes, _ = link.request(WantProcesses(), ProcessesAre, timeout_s=REQUEST_S)
    return [*processes.launchers, *processes.trainers, peer(link)[0]]


def _children(pids: Iterable[int]) -> set[int]:
    children: set[int] = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children.update(map(int, path.read_text().split()))
    return children


def _uids(pid: int) -> set[int]:
    """Real, effective, saved and file-system user of a process; empty when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    line = next((line for line in status.splitlines() if line.startswith("Uid:")), "Uid:")
    return set(map(int, line.split()[1:]))


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _ancestry(pid: int) -> set[int]:
    ancestors: set[int] = set()
    while pid > 0 and pid not in ancestors:
        ancestors.add(pid)
        pid = _parent(pid)
    return ancestors
