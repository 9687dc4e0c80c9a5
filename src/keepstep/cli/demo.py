"""`keepstep demo`: train twice, once undisturbed and once under fire, and compare bit for bit (see story/)."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("keepstep-demo"), metavar="PATH", help="where results go")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of each run (default 60)")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="trainers (default 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of training and failures (default 0)")
    parser.add_argument("--script", type=Path, metavar="PATH", help="examples/gpt.py of another checkout")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from keepstep.cli.story.play import run_demo

    return run_demo(
        out=args.out, steps=args.steps, nproc=args.nproc, seed=args.seed, script=args.script, console=Console()
    )
