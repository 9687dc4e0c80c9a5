"""`keepstep drill`: cause a failure on purpose, to test that the job survives it.

Names its target and asks for confirmation, unless --yes. The drills are in `drills/`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from keepstep.cli.drills.bit_flips import REGIONS, flip_bits
from keepstep.cli.drills.kills import kill_keeper, kill_node, kill_trainer
from keepstep.cli.drills.outages import cut_link, freeze_peer
from keepstep.cli.keepers import add_choice, choose_run, settings
from keepstep.config import Config
from keepstep.identity import Identity

OUTAGE_S = 10.0
MAX_OUTAGE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    drills = parser.add_subparsers(dest="drill", metavar="DRILL", required=True)
    trainer = _add_drill(drills, "kill-trainer", "SIGKILL one trainer, or all trainers of this node")
    which = trainer.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="of this rank (default: the lowest that lives)")
    which.add_argument("--all", action="store_true", help="all trainers of this node")
    _add_drill(drills, "kill-keeper", "SIGKILL the keeper of this node")
    node = _add_drill(drills, "kill-node", "SIGKILL every process of the run on this node at once")
    node.add_argument("--force", action="store_true", help="even if the run loses its state")
    for name, text in (
        ("freeze-peer", "SIGSTOP the keeper of this node for a while"),
        ("cut-link", "cut the keeper of this node off from its peers for a while"),
    ):
        outage = _add_drill(drills, name, text)
        outage.add_argument(
            "--seconds", type=_seconds, default=OUTAGE_S, metavar="N", help=f"for how long (default: {OUTAGE_S:g})"
        )
    flip = _add_drill(drills, "flip-bits", "flip bits in the newest sealed snapshot of a rank")
    flip.add_argument("--rank", type=int, metavar="N", help="of this rank (default: the lowest)")
    flip.add_argument("--region", choices=REGIONS, default="payload", help="where (default: payload)")
    flip.add_argument("--count", type=_positive, default=1, metavar="N", help="how many bits (default: 1)")
    flip.add_argument("--seed", type=int, metavar="N", help="choose the same bits again")


def _add_drill(
    drills: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = drills.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_choice(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_OUTAGE_S):
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_OUTAGE_S:g}")
    return seconds


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    return _DRILLS[args.drill](args, choose_run(config), config)


_DRILLS: dict[str, Callable[[argparse.Namespace, Identity, Config], int]] = {
    "kill-trainer": kill_trainer,
    "kill-keeper": kill_keeper,
    "kill-node": kill_node,
    "freeze-peer": freeze_peer,
    "cut-link": cut_link,
    "flip-bits": flip_bits,
}
