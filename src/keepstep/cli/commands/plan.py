"""`keepstep plan --lost NODE`: what a restore would do if these nodes were lost now. Changes nothing.

The keeper that coordinates the job answers, with the planner that a restore uses. Exit code 0: the state would be
restored; 3: it would be lost; 1: no keeper can answer; 2: wrong usage.
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
            "keepstep plan needs the nodes that are lost (try: keepstep plan --lost node3)\n"
            "the statistical planner, which chooses intervals and group sizes for a cluster, is not in this release",
            file=sys.stderr,
        )
        return WRONG_USAGE
    config = settings(args)
    identity = choose_coordinator(config)
    lost = list(dict.fromkeys(args.lost))
    with connect(identity, config) as link:
        answer, _ = link.request(WantPlan(lost), PlanIs, timeout_s=REQUEST_S)
    forecast = forecast_of(identity.run_id, lost, answer)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(forecast), indent=2).decode())
    else:
        open_console().print(render(forecast))
    return 0 if forecast.recoverable else LOST


def forecast_of(run_id: str, lost: list[str], answer: PlanIs) -> Forecast:
    steps_lost = None if answer.step is None else max(0, answer.newest_step - answer.step)
    return Forecast(
        run_id, lost, answer.step is not None, answer.step, answer.newest_step, steps_lost,
        answer.pieces, answer.reasons, answer.failure,
    )  # fmt: skip


def headline(forecast: Forecast) -> str:
    names = ", ".join(forecast.lost)
    if forecast.step is None:
        return f"With {names} lost now, the state in memory would be lost: {forecast.failure}."
    assert forecast.steps_lost is not None
    steps = "no finished step" if forecast.steps_lost == 0 else count(forecast.steps_lost, "step")
    done = f"step {forecast.step} is restored, {max(forecast.newest_step, forecast.step)} is done"
    return f"With {names} lost now, a restart would cost {steps}: {done}."


def render(forecast: Forecast) -> Group:
    lines = [Text(headline(forecast), style="bold green" if forecast.recoverable else "bold red")]
    if not forecast.pieces:
        return Group(*lines)
    table = make_table("ranks", "node", "source", "why")
    for piece in forecast.pieces:
        gone = piece.node_id in forecast.lost
        node = f"{piece.node_id} (lost)" if gone else piece.node_id
        table.add_row(ranks_text(piece.ranks), node, piece.source, piece.reason, style="yellow" if gone else "")
    return Group(*lines, Text(), table, Text(), *(Text(reason, style="dim") for reason in forecast.reasons))
