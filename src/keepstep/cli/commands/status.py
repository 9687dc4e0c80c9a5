"""`keepstep status`: one sentence on the cost of a failure now (see risk.py), the group, a line per rank.

`--json` prints `keepstep.types.Status` (docs/cli.md names every field). Exit code 0: the run is protected;
3: it is not; 1: no keeper answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keepstep.cli.keepers import KnownRun, add_choice, choose_run, find_runs, settings
from keepstep.cli.risk import away_from, headline, newest_done, of_crash, unprotected
from keepstep.cli.tables import count, format_seconds, format_step, make_table, open_console
from keepstep.config import Config
from keepstep.control.status import fetch_status
from keepstep.errors import Error, KeeperError
from keepstep.layout import format_bytes
from keepstep.types import NO_GRANT, RankStatus, Status

WATCH_S = 1.0
UNPROTECTED = 3

SKIP_TEXTS = {NO_GRANT: "memory not ready or other ranks behind"}  # where the kind of a skip explains nothing


class RunStatus(msgspec.Struct, frozen=True):
    """One element of `keepstep status --all --json`."""

    run_id: str
    node_id: str
    pid: int
    alive: bool
    error: str  # why there is no status; empty when there is one
    status: Status | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--all", action="store_true", help="every run of this user on this node, a line each")
    parser.add_argument("--json", action="store_true", help="the documented JSON; with --watch one line each time")
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=WATCH_S, metavar="SECONDS",
        help=f"repeat every SECONDS (default {WATCH_S:g}) until Ctrl-C",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    if args.watch is not None:
        return _watch(lambda: _read(config, args), every_s=args.watch, as_json=args.json)
    status = _read(config, args)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
    else:
        open_console().print(render(status))
    return exit_code(status)


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
            "no keeper of this user runs on this node", hint="start a job, or name its directory: --runtime-dir PATH"
        )
    return [_read_one(run) for run in runs]


def _read_one(run: KnownRun) -> RunStatus:
    identity, status, error = run.identity, None, "its keeper is dead"
    if run.alive:
        try:
            status, error = fetch_status(identity), ""
        except Error as failure:
            error = failure.message
    return RunStatus(identity.run_id, identity.node_id, run.card.pid, run.alive, error, status)


def exit_code(status: Status | list[RunStatus]) -> int:
    if isinstance(status, Status):
        return UNPROTECTED if unprotected(status) else 0
    return UNPROTECTED if any(run.status is None or unprotected(run.status) for run in status) else 0


# Output


def render(status: Status | list[RunStatus]) -> RenderableType:
    return _render_one(status) if isinstance(status, Status) else _render_all(status)


def _render_one(status: Status) -> Group:
    lines = [Text(headline(status), style="bold yellow" if exit_code(status) else "bold green")]
    if status.num_nodes > 1 and any(rank.alive for rank in status.ranks):
        lines.append(Text(of_crash(status)))
    lines.append(_about(status))
    if status.counters.get("takes_asked"):
        lines.append(_takes(status.counters))
    if status.num_nodes > 1:
        lines += [_watermarks(status), _peers(status)]
    notes = [Text(f"problem: {problem}", style="red") for problem in unprotected(status)]
    if status.memory_bytes and not status.keeper.holders:
        notes.append(Text("note: only the keeper holds the memory; its death would lose it", style="yellow"))
    return Group(*lines, Text(), _ranks(status), *notes)


def _watermarks(status: Status) -> Text:
    """The newest step of each stage, in the order of the stages, and the rates."""
    parts = [f"done {format_step(newest_done(status))}", f"complete {format_step(status.step)}"]
    if status.target_step is not None:
        parts.append(f"being protected {status.target_step}")
    lag = "" if status.lag_steps is None else f" (lag {count(status.lag_steps, 'step')})"
    parts.append(f"protected {format_step(status.protected_step)}{lag}")
    parts.append(f"losses covered {status.losses_covered}{', EXPOSED' if status.exposed else ''}")
    parts.append(f"exchange {format_bytes(round(status.exchange_bytes_s))}/s in")
    parts.append(f"parity {format_bytes(status.parity_bytes)}")
    return Text(" · ".join(parts))


def _peers(status: Status) -> Text:
    names = [peer.node_id + ("" if peer.up else " (away)") for peer in status.group]
    group = f"group {', '.join(names)}" if names else "no group"
    parts = [f"{count(status.num_nodes, 'node')}, coordinated by {status.coordinator}", group]
    if status.security:
        parts.append(status.security)
    return Text(" · ".join(parts), style="yellow" if away_from(status) else "dim")


def _about(status: Status) -> Text:
    keeper = status.keeper
    held = f"{format_bytes(status.memory_bytes)} held by the keeper and {count(keeper.holders, 'other')}"
    parts = [
        f"run {status.run_id}", f"node {status.node_id}", f"incarnation {status.incarnation}",
        f"keeper {keeper.pid} {keeper.state}, up {format_seconds(keeper.uptime_s)}", held,
    ]  # fmt: skip
    if status.slots:
        parts.append(f"{status.slots} slots ({status.slots_reason})")
    return Text(" · ".join(parts), style="dim")


def _takes(counters: Mapping[str, float]) -> Text:
    """How the takes of this node's trainers ended."""
    prefix = "takes_skipped_"
    skipped = {name.removeprefix(prefix): int(n) for name, n in counters.items() if name.startswith(prefix) and n}
    by_count = sorted(skipped.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{SKIP_TEXTS.get(kind, kind.replace('_', ' '))} {n}" for kind, n in by_count)
    parts = [count(int(counters["takes_asked"]), "take")]
    parts.append(f"{sum(skipped.values())} skipped" + (f" ({reasons})" if reasons else ""))
    if waited := int(counters.get("takes_waited", 0)):
        parts.append(f"{waited} waited for the device, {format_seconds(counters['take_wait_seconds'])} in all")
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


# --watch


def _watch(read: Callable[[], Status | list[RunStatus]], *, every_s: float, as_json: bool) -> int:
    """Print until Ctrl-C. A missing keeper is an error line, not the end: its trainers start another one."""
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
            console.print(_render_now(read))
            time.sleep(every_s)
    with Live(_render_now(read), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_render_now(read), refresh=True)


def _render_now(read: Callable[[], Status | list[RunStatus]]) -> RenderableType:
    try:
        return render(read())
    except Error as error:
        return Text(f"error: {error.message}", style="red")
