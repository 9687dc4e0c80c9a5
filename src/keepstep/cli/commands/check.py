"""`keepstep check [--kills N] [--steps K] -- COMMAND`: train undisturbed and with kills, compare bit for bit.

Exit code 0: exact; 1: not exact; 2: it could not be checked. The command and its script stay as they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepstep.cli.signals import ended_in_order

STEPS, KILLS, TIMEOUT_S = 20, 6, 600.0
EXACT, NOT_EXACT, NOT_CHECKED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, metavar="K", help=f"steps of each run (default {STEPS})")
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help=f"kills (default {KILLS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the instants of the kills (default 0)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS",
        help=f"a run without a step and output for so long is stalled (default {TIMEOUT_S:g})",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="PATH", help="write PATH as JSON, and its text beside it")
    parser.add_argument("training", nargs="*", metavar="COMMAND", help="after --: the command that trains")


def run(args: argparse.Namespace) -> int:
    from keepstep.check.report import CheckProgress, print_result, write_report
    from keepstep.check.run_order import CheckSettings, check

    if not args.training or args.steps < 2 or args.kills < 1:
        print("usage: keepstep check [--kills N] [--steps K] -- COMMAND", file=sys.stderr)
        return NOT_CHECKED
    settings = CheckSettings(args.training, args.steps, args.kills, args.seed, args.timeout)
    with ended_in_order(), CheckProgress(args.steps) as progress:
        result = check(settings, progress.show)
    print_result(result)
    if args.report:
        write_report(result, settings, args.report)
    return NOT_CHECKED if result.exact is None else EXACT if result.exact else NOT_EXACT
