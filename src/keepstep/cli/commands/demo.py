"""`keepstep demo`: train twice on four nodes, once undisturbed and once with failures; compare bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.cli.signals import ended_in_order

STEPS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("keepstep-demo"), metavar="PATH", help="directory of the results"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of each run (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of training and failures (default 0)")
    parser.add_argument("--script", type=Path, metavar="PATH", help="examples/gpt.py of another checkout")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from keepstep.demo.script import run_demo

    with ended_in_order():
        return run_demo(out=args.out, steps=args.steps, seed=args.seed, script=args.script, console=Console())
