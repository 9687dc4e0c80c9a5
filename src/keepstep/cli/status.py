"""`keepstep status`: a line per rank, and one sentence on what a crash would cost right now.

`--json` prints `keepstep.types.Status` (docs/cli.md names every field). Exit code 0: everything is protected;
3: something is not; 1: no keeper answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keepstep.cli.client import Run, add_choice, choose_run, fetch_status, find_runs, settings
from keepstep.cli.tables import count, format_bytes, format_seconds, format_step, make_table, open_console
from keepstep.config import Config
from keepstep.errors import Error, KeeperError
from keepstep.types import RankStatus, Status

WATCH_S = 1.0
UNPROTECTED = 3


class RunStatus(msgspec.Struct, frozen=True):
    """One element of `keepstep status --all --json`."""

    run_id: str
    node_id: str
    pid: int
    alive: bool
    error: str
    """why there is no status; empty when there is one"""
    status: Status | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--all", action="store_true", help="every run of this user on this node, a line each")
    parser.add_argument("--json", action="store_true", help="the documented JSON; with --watch one line per look")
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=WATCH_S, metavar="SECONDS",
        help=f"look again every SECONDS (default {WATCH_S:g}) until Ctrl-C",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    if args.watch is not None:
        return _watch(lambda: _read(config, args), every_s=args.watch, as_json=args.json)
    found = _read(config, args)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        open_console().print(render(found))
    return exit_code(found)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return seconds


def _read(config: Config, args: argparse.Namespace) -> Status | list[RunStatus]:
    return read_all(config) if args.all else fetch_status(choose_run(config))


def read_all(config: Config) -> list[RunStatus]:
    runs = find_runs(config)
    if not runs:
        raise KeeperError(
            "no keeper of this user runs on this node", hint="start a job, or say where to look: --runtime-dir PATH"
        )
    return [_read_one(run) for run in runs]


def _read_one(run: Run) -> RunStatus:
    identity, status, error = run.identity, None, "its keeper is dead"
    if run.alive:
        try:
            status, error = fetch_status(identity), ""
        except Error as failure:
            error = failure.message
    return RunStatus(identity.run_id, identity.node_id, run.card.pid, run.alive, error, status)


# What it means


def unprotected(status: Status) -> list[str]:
    """Why this run is not fully protected, as sentences; empty when it is."""
    said = any("no version is complete" in problem for problem in status.problems)
    found = ["no version is complete"] if status.step is None and not said else []
    dead = [str(rank.rank) for rank in status.ranks if not rank.alive]
    if dead:
        found.append(f"no trainer lives for rank {', '.join(dead)}")
    if status.exposed:
        found.append("fewer losses are covered than the settings ask for")
    return [*found, *status.problems]


def exit_code(found: Status | list[RunStatus]) -> int:
    if isinstance(found, Status):
        return UNPROTECTED if unprotected(found) else 0
    return UNPROTECTED if any(run.status is None or unprotected(run.status) for run in found) else 0


def headline(status: Status) -> str:
    """What a crash of the trainers would cost right now."""
    if not status.ranks:
        return "No trainer has come yet: nothing is held."
    if not any(rank.alive for rank in status.ranks):
        return _headline_of_dead(status)
    progress = max((rank.progress for rank in status.ranks if rank.progress is not None), default=-1)
    if corrupt := _corrupt(status):
        step, ranks = corrupt
        return f"A crash of the trainers now would go back beyond step {step}: it is corrupt on rank {ranks}."
    if status.step is None:
        lost = f"all steps up to {progress}" if progress >= 0 else "the start of the run"
        return f"A crash of the trainers now would cost {lost}: no version is complete yet."
    lost_steps = max(0, progress - status.step)
    if lost_steps == 0:
        return f"A crash of the trainers now would cost no finished step: step {status.step} is complete."
    steps = count(lost_steps, "step")
    return f"A crash of the trainers now would cost {steps}: {progress} is done, {status.step} is complete."


def _corrupt(status: Status) -> tuple[int, str] | None:
    """A step newer than what is held that has failed its check, and the ranks where it did."""
    damaged = [
        (slot.step, rank.rank)
        for rank in status.ranks
        for slot in rank.slots
        if slot.state == "corrupt" and slot.step is not None and (status.step is None or slot.step > status.step)
    ]
    if not damaged:
        return None
    newest = max(step for step, _ in damaged)
    return newest, ", ".join(str(rank) for step, rank in damaged if step == newest)


def _headline_of_dead(status: Status) -> str:
    held = "nothing is held" if status.step is None else f"step {status.step} is held"
    if corrupt := _corrupt(status):
        held += f" (step {corrupt[0]} is corrupt on rank {corrupt[1]})"
    if status.keeper.lease_left_s is not None:
        return f"No trainer and no launcher lives; {held} for another {status.keeper.lease_left_s:.0f} s."
    return f"No trainer lives; {held} until the launcher starts them again."


# How it looks


def render(found: Status | list[RunStatus]) -> RenderableType:
    return _render_one(found) if isinstance(found, Status) else _render_all(found)


def _render_one(status: Status) -> Group:
    lines = [Text(headline(status), style="bold yellow" if exit_code(status) else "bold green"), _about(status)]
    notes = [Text(f"problem: {problem}", style="red") for problem in unprotected(status)]
    if status.memory_bytes and not status.keeper.holders:
        notes.append(Text("note: only the keeper holds the memory; its death would lose it", style="yellow"))
    return Group(*lines, Text(), _ranks(status), *notes)


def _about(status: Status) -> Text:
    keeper = status.keeper
    held = f"{format_bytes(status.memory_bytes)} held by the keeper and {count(keeper.holders, 'other')}"
    parts = [
        f"run {status.run_id}", f"node {status.node_id}", f"incarnation {status.incarnation}",
        f"keeper {keeper.pid} {keeper.state}, up {format_seconds(keeper.uptime_s)}", held,
    ]  # fmt: skip
    return Text(" · ".join(parts), style="dim")


def _ranks(status: Status) -> Table:
    table = make_table(">rank", ">pid", "alive", ">step", ">age", ">progress", "survives", "slots", ">memory")
    for rank in status.ranks:
        table.add_row(
            str(rank.rank), str(rank.pid or "-"), "yes" if rank.alive else "no", format_step(rank.step),
            format_seconds(rank.age_s), format_step(rank.progress), rank.survives, _slots(rank),
            format_bytes(rank.arena_bytes), style="" if rank.alive else "yellow",
        )  # fmt: skip
    return table


def _slots(rank: RankStatus) -> str:
    return ", ".join(slot.state if slot.step is None else f"{slot.state} {slot.step}" for slot in rank.slots) or "-"


def _render_all(runs: list[RunStatus]) -> Table:
    table = make_table("run", "node", ">keeper", "state", ">step", ">age", "trainers", ">lease left", ">memory")
    for run in runs:
        status = run.status
        if status is None:
            table.add_row(run.run_id, run.node_id, str(run.pid), run.error, style="red")
            continue
        living = f"{sum(rank.alive for rank in status.ranks)} of {len(status.ranks)}"
        table.add_row(
            run.run_id, run.node_id, str(status.keeper.pid), status.keeper.state, format_step(status.step),
            format_seconds(status.age_s), living, format_seconds(status.keeper.lease_left_s),
            format_bytes(status.memory_bytes), style="yellow" if exit_code(status) else "",
        )  # fmt: skip
    return table


# Again and again


def _watch(read: Callable[[], Status | list[RunStatus]], *, every_s: float, as_json: bool) -> int:
    """Until Ctrl-C. A keeper that is gone for a while (its trainers start another one) is shown, not an end."""
    try:
        if as_json:
            _watch_json(read, every_s)
        _watch_table(read, every_s)
    except KeyboardInterrupt:
        pass
    return 0


def _watch_json(read: Callable[[], Status | list[RunStatus]], every_s: float) -> None:
    while True:
        try:
            print(msgspec.json.encode(read()).decode(), flush=True)
        except Error as error:
            print(f"error: {error.message}", file=sys.stderr, flush=True)
        time.sleep(every_s)


def _watch_table(read: Callable[[], Status | list[RunStatus]], every_s: float) -> None:
    console = open_console()
    if not console.is_terminal:  # a log: one table after the other
        while True:
            console.print(_look(read))
            time.sleep(every_s)
    with Live(_look(read), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_look(read), refresh=True)


def _look(read: Callable[[], Status | list[RunStatus]]) -> RenderableType:
    try:
        return render(read())
    except Error as error:
        return Text(f"error: {error.message}", style="red")
