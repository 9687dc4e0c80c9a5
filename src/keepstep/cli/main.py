"""`keepstep COMMAND ...`: find the command, load its file and no other, print errors in two lines.

Lazy loading keeps `keepstep --help` and `keepstep status` fast and free of torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import MappingProxyType
from typing import Protocol, cast

from keepstep._version import VERSION
from keepstep.cli.signals import TerminatedError
from keepstep.errors import Error

COMMANDS = MappingProxyType(
    {
        "run": "start a job: torchrun with a keeper on the node; takes torchrun's own arguments",
        "keeper": "run this node's keeper in the foreground (systemd, sidecar, DaemonSet)",
        "store": "serve the rendezvous store of a job of several nodes, on a machine that does not fail with it",
        "status": "what a failure would cost now; the group, and a line per rank: its newest snapshot and its age",
        "plan": "what a restore would do if these nodes were lost now: --lost NODE",
        "inspect": "show the shared memory: arenas, slots, versions, tensors",
        "verify": "check every sealed snapshot against its checksums",
        "release": "free the state of a run and end its keeper",
        "doctor": "check this machine before a run: memory, limits, versions, settings",
        "check": "prove that your own command resumes exactly: run it undisturbed and with kills, compare every bit",
        "drill": "cause a failure on purpose: kill-trainer, kill-keeper, kill-node, freeze-peer, cut-link, flip-bits",
        "demo": "four nodes on this machine: train, kill, restore, compare",
    }
)
PASSED_THROUGH = frozenset({"run"})  # commands whose arguments belong to another program, options included
# The exit codes that a shell reports for programs that end by SIGINT, SIGPIPE and SIGTERM.
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143


class Command(Protocol):
    """The interface of every command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; wrong usage exits through argparse with 2."""
    try:
        code = _dispatch(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except Error as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"try: {error.hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # `keepstep status | head -1`: the interpreter flushes once more at its end, to /dev/null then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except TerminatedError:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _dispatch(arguments: list[str]) -> int:
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    command = _load(chosen) if chosen else None
    if command is not None and chosen in PASSED_THROUGH:
        return command.run(argparse.Namespace(arguments=arguments[1:]))
    args = _parser(chosen, command).parse_args(arguments)
    assert command is not None, "argparse refuses unknown commands"
    return command.run(args)


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"keepstep.cli.commands.{name}"))


def _parser(chosen: str, command: Command | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keepstep", description="keepstep keeps every step of a PyTorch training run.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"keepstep {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        own = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == chosen and command is not None:
            command.add_arguments(own)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
