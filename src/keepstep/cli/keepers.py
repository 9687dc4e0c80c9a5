"""Find the run that a command is about, and connect to its keeper. Nothing here prints.

Every keeper writes a card into the runtime directory, which names its run. The directory must be private, as
for the keeper: cards of another user could name processes that drills kill. Every request has a deadline:
`ANSWER_S` for the status, `REQUEST_S` on the control socket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from keepstep.arena.slots import Arena
from keepstep.config import Config, resolve
from keepstep.control.client import OPERATOR, REQUEST_S, KeeperClient
from keepstep.control.messages import Hold, WantArenas
from keepstep.control.private_socket import peer_of
from keepstep.control.status import fetch_status
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity, check_private, identify, runtime_dir
from keepstep.types import Status

PROBE_S = 1.0  # to connect to the socket of a card
MAX_CARD_BYTES = 4096


class Card(msgspec.Struct, frozen=True):
    """`keeper.json`: the run, node and process of a keeper's directory."""

    run_id: str
    node_id: str
    pid: int
    instance: str
    version: str


@dataclass(frozen=True)
class KnownRun:
    """A run of this user on this node."""

    identity: Identity
    card: Card
    alive: bool  # False: its keeper was killed, and no other one was started

    def __str__(self) -> str:
        return f"{self.identity.run_id!r} (node {self.identity.node_id!r})"


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a run."""
    parser.add_argument("--run-id", metavar="NAME", help="the run (default: KEEPSTEP_RUN_ID, else the only run)")
    parser.add_argument("--node-id", metavar="NAME", help="the node (default: KEEPSTEP_NODE_ID, else the host name)")
    parser.add_argument(
        "--runtime-dir", metavar="PATH", help="directory of the keepers' sockets (default: KEEPSTEP_RUNTIME_DIR)"
    )


def settings(args: argparse.Namespace) -> Config:
    """The settings in force; the options of the command line override the others."""
    return _settings(args.run_id, args.node_id, args.runtime_dir)


def _settings(run_id: str | None, node_id: str | None, directory: str | Path | None) -> Config:
    named = {"run_id": run_id, "node_id": node_id, "runtime_dir": str(directory) if directory else None}
    given = Config(**{name: value for name, value in named.items() if value is not None})  # type: ignore[arg-type]
    return resolve(given, local_file=False)


# Find a run


def find_runs(config: Config) -> list[KnownRun]:
    """Every run of this user on this node that has a card, also of dead keepers."""
    directory = runtime_dir(config)
    if not check_private(directory, _owner(directory, config)):
        return []
    runs = [_read_run(card, directory) for card in sorted(directory.glob("*/keeper.json"))]
    return sorted((run for run in runs if run is not None), key=lambda run: (run.identity.run_id, run.identity.node_id))


def find_meant(config: Config) -> list[KnownRun]:
    """The runs that match the settings."""
    return [
        run
        for run in find_runs(config)
        if config.run_id in ("", run.identity.run_id) and config.node_id in ("", run.identity.node_id)
    ]


def choose(args: argparse.Namespace) -> Identity:
    """The run that the arguments or the environment name, else the only run."""
    return choose_run(settings(args))


def choose_run(config: Config, *, suggest: bool = True) -> Identity:
    """The chosen run. `suggest`: an error may name another run to choose; not before something is destroyed."""
    meant = find_meant(config)
    living = [run for run in meant if run.alive]
    own = identify(config)
    exact = [run for run in living if run.identity.key == own.key and own.outlives_launch]
    if exact or len(living) == 1:
        return (exact or living)[0].identity
    if living:
        raise KeeperError(
            f"{len(living)} runs are on this node: {', '.join(map(str, living))}",
            hint=f"--run-id {living[0].identity.run_id} (and --node-id {living[0].identity.node_id})"
            if suggest
            else "--run-id NAME (and --node-id NAME)",
        )
    raise _no_run(config, dead=meant, suggest=suggest)


def choose_coordinator(config: Config) -> Identity:
    """The node whose keeper coordinates the run, if it is on this machine; else any node of the run.

    A keeper that does not coordinate refuses the request and names the node that does.
    """
    living = [run for run in find_meant(config) if run.alive]
    of_one_run = len({run.identity.run_id for run in living}) == 1
    chosen = living[0].identity if of_one_run else choose_run(config)
    coordinator = fetch_status(chosen).coordinator
    nodes = [run.identity for run in find_runs(config) if run.alive and run.identity.run_id == chosen.run_id]
    return next((identity for identity in nodes if identity.node_id == coordinator), chosen)


def _no_run(config: Config, *, dead: list[KnownRun], suggest: bool) -> KeeperError:
    if dead:
        return KeeperError(
            f"the keeper of run {dead[0]} is dead",
            hint="its trainers start it again when they live; keepstep release removes its files",
        )
    where, others = runtime_dir(config), find_runs(config)
    what = f"run {config.run_id!r}" if config.run_id else "any run of this user"
    if others:
        named = f"{what} on node {config.node_id!r}" if config.node_id else what
        if not suggest:
            return KeeperError(f"no keeper serves {named} here", hint="keepstep status --all lists the runs")
        return KeeperError(
            f"no keeper serves {named} here; there is {', '.join(map(str, others))}",
            hint=f"--run-id {others[0].identity.run_id}",
        )
    return KeeperError(
        f"no keeper serves {what} on this node (looked in {where})",
        hint="start the job first; if it runs, --runtime-dir or KEEPSTEP_RUNTIME_DIR names the directory of its keeper",
    )


def _owner(directory: Path, config: Config) -> int:
    """Root may name the directory of any user; the default directory is always this user's own."""
    if config.runtime_dir and os.geteuid() == 0:
        with contextlib.suppress(OSError):
            return directory.lstat().st_uid
    return os.geteuid()


def _read_run(path: Path, directory: Path) -> KnownRun | None:
    """None for a card that is half written, removed meanwhile, or in the wrong directory."""
    try:
        with path.open("rb") as file:
            card = msgspec.json.decode(file.read(MAX_CARD_BYTES), type=Card)
    except (OSError, msgspec.DecodeError):
        return None
    if not (card.run_id.isprintable() and card.node_id.isprintable()):  # no keeper of keepstep has such names
        return None
    identity = Identity(card.run_id, card.node_id, directory, outlives_launch=True)
    return KnownRun(identity, card, _listens(identity.control_socket)) if identity.card == path else None


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(PROBE_S)
        try:
            sock.connect(str(path))
        except TimeoutError:
            return True  # a process listens and is too busy to accept
        except OSError:
            return False
    return True


# Status over HTTP


def read_status(run_id: str | None = None, node_id: str | None = None, runtime_dir: str | Path | None = None) -> Status:
    """The status of a run, chosen as every command chooses it."""
    return fetch_status(choose_run(_settings(run_id, node_id, runtime_dir)))


# The control socket


@contextlib.contextmanager
def connect(identity: Identity, config: Config) -> Iterator[KeeperClient]:
    """A control connection for the length of a `with` block."""
    link = KeeperClient(identity, OPERATOR, timeout_s=REQUEST_S)
    try:
        yield link
    finally:
        link.close()


def peer(link: KeeperClient) -> tuple[int, int]:
    """The keeper's pid and uid as the kernel reports them; pid 0 when it is in another PID namespace."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        return peer_of(sock)


@dataclass
class BorrowedArenas:
    """The arenas of a node, by duplicates of the keeper's descriptors."""

    arenas: list[Arena] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # arenas with a damaged header, and the problem


@contextlib.contextmanager
def borrow_arenas(link: KeeperClient, config: Config) -> Iterator[BorrowedArenas]:
    """Open the arenas of the node; the descriptors are closed at the end of the block."""
    hold, fds = link.request(WantArenas(), Hold, timeout_s=REQUEST_S)
    borrowed = BorrowedArenas()
    try:
        for arena_id, fd in zip(hold.arena_ids, fds, strict=True):
            try:
                arena = Arena.adopt(fd, run_id=link.identity.run_id, node_id=link.identity.node_id)
                borrowed.arenas.append(arena)
            except Error as error:
                borrowed.refused[arena_id] = error.message
        yield borrowed
    finally:
        for fd in fds:
            os.close(fd)
