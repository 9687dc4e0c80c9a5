"""The script of the demo: two runs, the failures in the second, the comparison, the report.

Invariants: only processes of the demo are signalled (see `testing.cluster`); when `run_demo` returns or raises none
of them is alive, and `summary.json` is written. Writes into `out`: both logs, the nodes' output, `loss.png` (or
`loss.csv`), and `summary.json`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from keepstep.demo.comparison import judge
from keepstep.demo.report import Summary, narrate, report
from keepstep.demo.run_record import FAULTS, FailureOutcome, PlannedFailure, RunRecord, find_due, last_disturbance
from keepstep.demo.training import LOSSES, NODES, DemoRun, Training
from keepstep.errors import ConfigError, Error

MIN_STEPS = 24  # fewer leave no time to protect a version between two failures


def run_demo(*, out: Path, steps: int, seed: int = 0, script: Path | None = None, console: Console) -> int:
    """Run, compare, report. Returns 1 on a difference or a leftover. Raises `Error` when a run cannot finish."""
    job = DemoRun(script=find_script(script), out=out, steps=check_steps(steps), seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    summary = Summary(steps=steps, nodes=NODES, losses=LOSSES, seed=seed)
    try:
        console.print(f"[bold]1. undisturbed[/]: {NODES} nodes with a trainer each, {steps} steps", highlight=False)
        calm = summary.calm = train(job, "undisturbed", faults=(), step_s=0.0, console=console)
        console.print(f"[bold]2. the same again, and {len(FAULTS)} failures[/]", highlight=False)
        struck = summary.struck = train(job, "struck", faults=FAULTS, step_s=calm.median_step_s(), console=console)
        judgement = summary.judgement = judge(calm, struck)
    except Error as error:
        summary.error = error.message
        raise
    finally:
        summary.write(out / "summary.json")
    report(calm, struck, judgement, out=out, console=console)
    return judgement.exit_code


def check_steps(steps: int) -> int:
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps is {steps}; the demo needs at least {MIN_STEPS}", hint="omit --steps")
    return steps


def find_script(script: Path | None) -> Path:
    """The training script: the given one, or `examples/gpt.py` of the checkout that this file belongs to."""
    path = script or Path(__file__).resolve().parents[3] / "examples" / "gpt.py"
    if not path.is_file():
        raise ConfigError(
            f"there is no training script at {path}",
            hint="run the demo from a checkout of keepstep, or pass --script PATH to its examples/gpt.py",
        )
    return path.resolve()


def train(job: DemoRun, name: str, *, faults: Sequence[PlannedFailure], step_s: float, console: Console) -> RunRecord:
    """Train to the end, with each of `faults` at a random moment of a step that takes `step_s`."""
    run = RunRecord()
    chance = random.Random(job.seed)
    with Training(job, name) as training:
        for event in training.follow():
            run.observe(event)
            narrate(event, steps=job.steps, console=console)
            fault = find_due(run, event, faults=faults, steps=job.steps)
            if fault is not None and is_survivable(fault, run, training):
                time.sleep(step_s * chance.uniform(0.2, 0.8))  # into the middle of the step that runs now
                run.outcomes.append(strike(fault, run, training, console=console))
        run.duration_s = time.time() - run.started
        run.results = training.read_results()
        run.leftovers = training.wait_for_quiet()
    return run


def is_survivable(fault: PlannedFailure, run: RunRecord, training: Training) -> bool:
    """Whether the group has healed from the last failure, so that it covers the loss of these nodes."""
    return fault.target != "nodes" or training.covers(len(fault.positions), newer_than=last_disturbance(run))


def strike(fault: PlannedFailure, run: RunRecord, training: Training, *, console: Console) -> FailureOutcome:
    outcome = FailureOutcome(fault=fault, killed_at=time.time(), last_step=run.steps[-1].step)
    match fault.target:
        case "trainer":
            hit = training.kill_trainer(fault.positions[0])
        case "keeper":
            hit = training.kill_keeper(fault.positions[0])
        case "nodes":
            hit = training.kill_nodes(fault.positions)
    console.print(f"  [bold red]SIGKILL[/] {fault.name} ({hit})", highlight=False)
    return outcome
