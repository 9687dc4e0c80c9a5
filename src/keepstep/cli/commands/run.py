"""`keepstep run`: torchrun with its own arguments, and keepstep's defaults for those that are not given.

The defaults are in `keepstep/launcher/torchrun.py`.
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
