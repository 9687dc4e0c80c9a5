"""`keepstep plan --lost NODE`: what a restore would do if these nodes were lost now. Nothing is touched.

The keeper that coordinates the job answers, with the planner that a restore uses. Exit code 0: the state would come
back; 3: it would not; 1: nobody can say; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.console import Group
from rich.text import Text

from keepstep.cli.keepers import add_choice, choose_coordinator, connect, settings
from keepstep.cli.tables import count, make_table, open_console
from keepstep.control.client import REQUEST_S
from keepstep.control.messages import PlanIs, PlannedPiece, WantPlan
from keepstep.recovery.plan import ranks_text

WRONG_USAGE = 2
LOST = 3


class Forecast(msgspec.Struct, frozen=True):
    """`keepstep plan --json`."""

    run_id: str
    lost: list[str]
    recoverable: bool
    step: int | None
    newest_step: int
    steps_lost: int | None
    pieces: list[PlannedPiece]
    reasons: list[str]
    failure: str
    schema: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--lost", action="append", metavar="NODE", help="a node that is lost; may be given again")
    parser.add_argument("--json", action="store_true", help="the documented JSON")


def run(args: argparse.Namespace) -> int:
    if not args.lost:
        print(
            "keepstep plan answers for a job that runs: which nodes are lost? (try: keepstep plan --lost node3)\n"
            "the statistical planner, which chooses intervals and group sizes for a cluster, is not in this release",
            file=sys.stderr,
        )
        return WRONG_USAGE
    config = settings(args)
    identity = choose_coordinator(config)
    lost = list(dict.fromkeys(args.lost))
    with connect(identity, config) as link:
        answer, _ = link.request(WantPlan(lost), PlanIs, timeout_s=REQUEST_S)
    found = forecast_of(identity.run_id, lost, answer)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        open_console().print(render(found))
    return 0 if found.recoverable else LOST


def forecast_of(run_id: str, lost: list[str], answer: PlanIs) -> Forecast:
    steps_lost = None if answer.step is None else max(0, answer.newest_step - answer.step)
    return Forecast(
        run_id, lost, answer.step is not None, answer.step, answer.newest_step, steps_lost,
        answer.pieces, answer.reasons, answer.failure,
    )  # fmt: skip


def headline(found: Forecast) -> str:
    names = ", ".join(found.lost)
    if found.step is None:
        return f"With {names} lost now, the state in memory would be lost: {found.failure}."
    assert found.steps_lost is not None
    steps = "no finished step" if found.steps_lost == 0 else count(found.steps_lost, "step")
    done = f"step {found.step} comes back, {max(found.newest_step, found.step)} is done"
    return f"With {names} lost now, a restart would cost {steps}: {done}."


def render(found: Forecast) -> Group:
    lines = [Text(headline(found), style="bold green" if found.recoverable else "bold red")]
    if not found.pieces:
        return Group(*lines)
    table = make_table("ranks", "node", "source", "why")
    for piece in found.pieces:
        gone = piece.node_id in found.lost
        node = f"{piece.node_id} (lost)" if gone else piece.node_id
        table.add_row(ranks_text(piece.ranks), node, piece.source, piece.reason, style="yellow" if gone else "")
    return Group(*lines, Text(), table, Text(), *(Text(reason, style="dim") for reason in found.reasons))
