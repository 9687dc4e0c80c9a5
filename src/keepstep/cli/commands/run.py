"""`keepstep run`: torchrun's own arguments, unchanged, with what keepstep needs filled in where it was left open.

What is filled in, and nothing else, is in `keepstep/launcher/torchrun.py`.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="torchrun's arguments")


def run(args: argparse.Namespace) -> int:
    arguments: list[str] = args.arguments
    if not arguments:
        print("usage: keepstep run TORCHRUN-ARGUMENTS... SCRIPT [SCRIPT-ARGUMENTS...]", file=sys.stderr)
        return 2
    from torch.distributed.run import main as torchrun

    from keepstep.launcher.torchrun import torchrun_arguments

    torchrun(torchrun_arguments(arguments))
    return 0
