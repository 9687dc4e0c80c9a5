"""The losses of both runs, as a picture where matplotlib is installed, else as a table."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console

from keepstep.demo.run_record import RunRecord


def draw_losses(calm: RunRecord, struck: RunRecord, *, out: Path, console: Console) -> Path:
    """Both curves against the step, where they must be one, and against time, where the failures show."""
    try:
        import matplotlib
    except ImportError:
        console.print('[yellow]matplotlib is not installed: loss.csv instead (pip install "keepstep\\[plot]")[/]')
        return write_losses(calm, struck, path=out / "loss.csv")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for run, label, style in (
        (calm, "undisturbed", {"color": "#f2b134", "linewidth": 5, "alpha": 0.8}),
        (struck, "with failures", {"color": "#1f3a5f", "linewidth": 1, "marker": ".", "markersize": 4}),
    ):
        steps, times, losses = with_gaps(run)
        by_step.plot(steps, losses, label=label, **style)
        by_time.plot(times, losses, label=label, **style)
    red = {"color": "#c0392b", "linewidth": 0.8, "linestyle": ":"}
    for outcome in struck.outcomes:
        moment, name = outcome.killed_at - struck.steps[0].time, f" {outcome.fault.name}"
        by_step.axvline(outcome.last_step + 0.5, **red)
        by_time.axvline(moment, **red)
        by_time.annotate(name, (moment, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8)
    by_step.set(xlabel="step", ylabel="loss")
    by_time.set(xlabel="seconds since the first step")
    by_step.legend()
    figure.savefig(out / "loss.png", dpi=130)
    pyplot.close(figure)
    return out / "loss.png"


def with_gaps(run: RunRecord) -> tuple[list[float], list[float], list[float]]:
    """Steps, seconds and losses; a restart leaves a gap, so that steps done again lie upon the first ones."""
    rows: list[tuple[float, float, float]] = []
    first = before = run.steps[0]
    for step in run.steps:
        if step.incarnation != before.incarnation:
            rows.append((math.nan, math.nan, math.nan))
        rows.append((step.step, step.time - first.time, step.loss))
        before = step
    steps, times, losses = map(list, zip(*rows, strict=True))
    return steps, times, losses


def write_losses(calm: RunRecord, struck: RunRecord, *, path: Path) -> Path:
    rows = [("undisturbed", step) for step in calm.steps] + [("struck", step) for step in struck.steps]
    lines = [f"{name},{step.step},{step.loss!r},{step.loss_hex},{step.time!r}" for name, step in rows]
    path.write_text("\n".join(["run,step,loss,loss_hex,time", *lines]) + "\n", encoding="utf-8")
    return path
