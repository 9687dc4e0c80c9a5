"""Output of the demo: lines while training runs, a table and the verdict at the end, and `summary.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keepstep.demo.comparison import Judgement
from keepstep.demo.run_record import Event, FailureOutcome, RestoreRecord, RunRecord, Started, StepRecord


def narrate(event: Event, *, steps: int, console: Console) -> None:
    match event:
        case Started():
            line = f"  [dim]incarnation {event.incarnation}: {', '.join(event.nodes)}[/]"
        case RestoreRecord():
            counts = [(event.sources.count(source), source) for source in dict.fromkeys(event.sources)]
            sources = ", ".join(f"{count} from {source}" for count, source in counts)
            line = f"  [bold green]restored[/] step {event.step} in {event.seconds:.2f} s, ranks: {sources}"
        case StepRecord():
            bar = "━" * round(event.loss * 10)
            line = f"  step {event.step:3d} of {steps - 1}  loss {event.loss:.4f}  [cyan]{bar}[/]"
    console.print(line, highlight=False)


def report(calm: RunRecord, struck: RunRecord, judgement: Judgement, *, out: Path, console: Console) -> None:
    console.print(make_table(struck))
    picture = draw_losses(calm, struck, out=out, console=console)
    took = f"undisturbed {calm.duration_s:.0f} s, struck {struck.duration_s:.0f} s"
    console.print(f"{took}; loss curves: {escape(str(picture))}", highlight=False, soft_wrap=True)
    leftovers = [f"left behind, and ended by the demo: {process}" for process in judgement.leftovers]
    for line in [*judgement.differences, *leftovers]:
        console.print(f"[bold red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    if judgement.exit_code == 0:
        console.print(f"[bold green]{judgement.verdict}[/]", soft_wrap=True)


def make_table(struck: RunRecord) -> Table:
    table = Table(title="SIGKILL of", title_justify="left")
    table.add_column("failure")
    for name in ("after step", "restored", "source", "steps lost", "seconds"):
        table.add_column(name, justify="right")
    for outcome in struck.outcomes:
        row = make_row(outcome)
        seconds = "never" if row.seconds_to_next_step is None else f"{row.seconds_to_next_step:.1f}"
        missing = "nothing" if outcome.restarts else "not needed"
        restored = missing if row.restored_step is None else str(row.restored_step)
        source = (row.source or "-").upper()
        table.add_row(row.failure, str(row.after_step), restored, source, str(row.steps_lost), seconds)
    table.caption = "seconds: from the kill to the end of the first step after it"
    return table


class OutcomeRow(msgspec.Struct, frozen=True):
    """One failure in `summary.json` and in the table."""

    failure: str
    after_step: int
    restored_step: int | None
    source: str | None
    restore_seconds: float | None
    seconds_to_next_step: float | None
    restarts: int
    steps_lost: int


def make_row(outcome: FailureOutcome) -> OutcomeRow:
    restored = outcome.restored
    return OutcomeRow(
        failure=outcome.fault.name,
        after_step=outcome.last_step,
        restored_step=restored.step if restored else None,
        source=restored.source if restored else None,
        restore_seconds=restored.seconds if restored else None,
        seconds_to_next_step=outcome.resumed_at - outcome.killed_at if outcome.resumed_at else None,
        restarts=outcome.restarts,
        steps_lost=outcome.steps_lost,
    )


@dataclass(kw_only=True)
class Summary:
    """`summary.json`: written also when a run did not finish."""

    steps: int
    nodes: int
    losses: int
    seed: int
    error: str = "interrupted"  # the reason, when there is no judgement
    judgement: Judgement | None = None
    calm: RunRecord | None = None
    struck: RunRecord | None = None

    def write(self, path: Path) -> None:
        runs = {"undisturbed": self.calm, "struck": self.struck}
        judged = self.judgement
        content = {
            "schema": 2,
            "verdict": judged.verdict if judged else self.error,
            "identical": judged is not None and not judged.differences,
            "differences": judged.differences if judged else [],
            "steps": self.steps,
            "nodes": self.nodes,
            "losses": self.losses,
            "seed": self.seed,
            "failures": [make_row(outcome) for outcome in self.struck.outcomes] if self.struck else [],
            "runs": {
                name: {"seconds": run.duration_s, "results": run.results, "leftovers": run.leftovers}
                for name, run in runs.items()
                if run is not None
            },
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


# Loss curves: a picture where matplotlib is installed, else a table


def draw_losses(calm: RunRecord, struck: RunRecord, *, out: Path, console: Console) -> Path:
    """Plot both curves against the step, where they must coincide, and against time, where failures are visible."""
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
    """Steps, seconds and losses; a restart leaves a gap, so that repeated steps are drawn over the first ones."""
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
