"""What the samples of `bench_take.py` say, and whether that meets the targets. Pure, but for the printing below."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

HELD_SHARE = 0.02
"""of the time that dcp.async_save holds the loop"""
FIRST_RATIO = 1.2
COPY_MEMCPYS = 1.0
SEALED_MEMCPYS = 2.2
MEMORY_SHARE = 0.05
HUNDREDTH = 100

Summary = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    target: str
    limit: str
    measured: str
    outcome: str
    """pass, miss or not measured"""


def summarize(runs: dict[str, list[dict[str, Any]]]) -> Summary:
    """One entry per contender: pooled over its rounds, or the error of the round that failed."""
    summary: Summary = {}
    for name, rounds in runs.items():
        failed = [run["error"] for run in rounds if "error" in run]
        if failed or not rounds:
            summary[name] = {"error": failed[0] if failed else "not run"}
            continue
        summary[name] = {
            "held": _held([run["held"] for run in rounds if "held" in run]),
            "slowdown": _slowdown(rounds),
            "memory": rounds[-1].get("memory"),
            "left_behind": [line for run in rounds for line in run["left_behind"]],
        }
    return summary


def _held(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    pooled = [sample for held in rounds for sample in held["samples"]]
    if not pooled:
        return None
    alone_s = statistics.median(seconds for held in rounds for seconds in held["update_alone_s"])
    by_round = [[sample["held_s"] for sample in held["samples"]] for held in rounds if held["samples"]]
    hundredths = [held[HUNDREDTH - 1] for held in by_round if len(held) >= HUNDREDTH]
    return {
        "num_snapshots": len(pooled),
        "num_skipped": sum(len(held["skips"]) for held in rounds),
        "skip_reasons": sorted({reason for held in rounds for reason in held["skips"]}),
        # The worst of the rounds, not their mean: a slow first snapshot in one round is a slow first snapshot.
        "first_s": max(held[0] for held in by_round),
        "hundredth_s": max(hundredths) if hundredths else None,
        "median_s": statistics.median(sample["held_s"] for sample in pooled),
        "max_s": max(sample["held_s"] for sample in pooled),
        "call_median_s": statistics.median(sample["call_s"] for sample in pooled),
        "fence_median_s": statistics.median(sample["fence_s"] for sample in pooled),
        "update_alone_s": alone_s,
        "update_growth_s": statistics.median(sample["update_s"] for sample in pooled) - alone_s,
        "settle_median_s": statistics.median(sample["settle_s"] for sample in pooled),
    }


def _slowdown(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per number of threads: the median of paired differences, in seconds and in memcpys of the same round."""
    found: list[dict[str, Any]] = []
    for threads in sorted({part["threads"] for run in rounds for part in run.get("slowdown", ())}):
        parts = [(run["memcpy_s"], part) for run in rounds for part in run["slowdown"] if part["threads"] == threads]
        lost = [(pair["with_s"] - pair["without_s"], memcpy_s) for memcpy_s, part in parts for pair in part["pairs"]]
        num_skipped = sum(len(part["skips"]) for _, part in parts)
        if not lost:
            found.append({"threads": threads, "num_pairs": 0, "num_skipped": num_skipped})
            continue
        ratios = [seconds / memcpy_s for seconds, memcpy_s in lost]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        found.append(
            {
                "threads": threads,
                "num_pairs": len(lost),
                "num_skipped": num_skipped,
                "num_unfinished": sum(part["num_unfinished"] for _, part in parts),
                "memcpy_s": statistics.median(memcpy_s for memcpy_s, _ in parts),
                "lost_s": statistics.median(seconds for seconds, _ in lost),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [low, high],
            }
        )
    return found


def judge(summary: Summary) -> list[Verdict]:
    ours = _part(summary, "keepstep", "held")
    verdicts: list[Verdict] = []
    for mode in ("thread", "process"):
        peer = _part(summary, f"dcp-{mode}", "held")
        share = ours["median_s"] / peer["median_s"] if ours and peer else None
        verdicts.append(_verdict(f"held, median, of dcp.async_save ({mode})", share, HELD_SHARE, "{:.1%}"))
    first = ours["first_s"] / ours["median_s"] if ours else None
    verdicts.append(_verdict("held, first, of the median", first, FIRST_RATIO, "{:.2f} x"))
    for name, what, limit in (
        ("keepstep-copy-alone", "copy alone", COPY_MEMCPYS),
        ("keepstep", "with checksums", SEALED_MEMCPYS),
    ):
        rows = {row["threads"]: row for row in _part(summary, name, "slowdown") or ()}
        for threads in (1, 2):
            row = rows.get(threads, {})
            verdict = _verdict(f"slow-down, {what}, {threads} thread(s)", row.get("ratio"), limit, "{:.2f} memcpy")
            if "ratio_quartiles" in row:
                spread = "{:.2f} to {:.2f}".format(*row["ratio_quartiles"])
                verdict = replace(verdict, measured=f"{verdict.measured} ({spread})")
            verdicts.append(verdict)
    memory = _part(summary, "keepstep", "memory")
    off = abs(memory["ratio"] - 1) if memory else None
    verdicts.append(_verdict("memory, off the formula", off, MEMORY_SHARE, "{:.1%}"))
    return verdicts


def _part(summary: Summary, name: str, part: str) -> Any:
    return summary.get(name, {}).get(part)


def _verdict(target: str, value: float | None, limit: float, form: str) -> Verdict:
    bound = "at most " + form.format(limit)
    if value is None:
        return Verdict(target, bound, "-", "not measured")
    return Verdict(target, bound, form.format(value), "pass" if value <= limit else "miss")


def print_tables(console: Console, summary: Summary, verdicts: Iterable[Verdict]) -> None:
    _print_held(console, summary)
    _print_slowdown(console, summary)
    _print_notes(console, summary)
    _print_table(
        console,
        "Targets",
        ["target", "limit", "measured", ""],
        [[v.target, v.limit, v.measured, v.outcome] for v in verdicts],
    )


def _print_held(console: Console, summary: Summary) -> None:
    rows: list[list[str]] = []
    for name, entry in summary.items():
        held = entry.get("held")
        if "error" in entry:
            rows.append([name, entry["error"].partition(":")[0]])
        elif held:
            cells = [str(held["num_snapshots"]), str(held["num_skipped"])]
            times = ("first_s", "median_s", "max_s", "hundredth_s", "update_growth_s", "settle_median_s")
            rows.append([name, *cells, *(_ms(held[key]) for key in times)])
    columns = ["contender", "snapshots", "skipped", "first", "median", "max", "100th", "update grew", "still busy"]
    _print_table(
        console, "The loop is held, ms per snapshot (the call, the fence, hooks before the update)", columns, rows
    )


def _print_slowdown(console: Console, summary: Summary) -> None:
    rows: list[list[str]] = []
    for name, entry in summary.items():
        for row in entry.get("slowdown") or ():
            head = [name, str(row["threads"]), str(row["num_pairs"]), str(row["num_skipped"])]
            if not row["num_pairs"]:
                rows.append(head)
                continue
            low, high = row["ratio_quartiles"]
            cells = [_ms(row["lost_s"]), _ms(row["memcpy_s"]), f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
            rows.append([*head, *cells, str(row["num_unfinished"])])
    columns = ["contender", "threads", "pairs", "skipped", "lost ms", "memcpy ms", "memcpys", "quartiles", "unfinished"]
    _print_table(console, "The loop is slowed, per snapshot, everything included", columns, rows)


def _print_notes(console: Console, summary: Summary) -> None:
    for name, entry in summary.items():
        if "error" in entry:
            console.print(f"{name}: {entry['error']}", markup=False)
        if memory := entry.get("memory"):
            counted, expected, keeper, trainer = (
                memory[key] / 1e6 for key in ("memfd_bytes", "formula_bytes", "keeper_pss_bytes", "trainer_pss_bytes")
            )
            console.print(
                f"{name}: memfds {counted:.1f} MB, formula {expected:.1f} MB for {memory['num_slots']} slots "
                f"(ratio {memory['ratio']:.3f}); PSS keeper {keeper:.1f} MB, trainer {trainer:.1f} MB"
            )
        for reason in (entry.get("held") or {}).get("skip_reasons", ()):
            console.print(f"{name}: skipped: {reason}", markup=False)
        for line in entry.get("left_behind", ()):
            console.print(f"{name}: had to be ended: {line}", markup=False)


def _print_table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"
