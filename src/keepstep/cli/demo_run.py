"""What `keepstep demo` does: the same training twice, once undisturbed and once under fire, compared bit for bit.

Invariants: every process of a run carries that run's own fresh runtime directory in its environment, and only such
processes are ever signalled, each by its pid through a pidfd; every wait has a deadline, named below; when `run_demo`
returns or raises none of them is alive, and `summary.json` is written.

Reads what rank 0 of `examples/gpt.py` logs (a JSON line per event) and the digests that every rank leaves at its end.
Writes into `out`: both logs, the launchers' output, `loss.png` (or `loss.csv`), and `summary.json`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keepstep.errors import ConfigError, Error

VERDICT = "final state identical to the uninterrupted run"

RUN_S = 240.0
"""A whole run, restarts included; it takes 20 to 45 s on two cores."""
SILENCE_S = 90.0
"""Without a line in the log: covers starting torch on a busy machine and torchelastic's 30 s for a stuck trainer."""
EXIT_S = 10.0
"""From the launcher's end until the last process is gone; a normal end takes far less."""
KEEPER_S = 10.0
"""Until a keeper answers a question about itself."""
POLL_S = 0.02
NODE_ID = "demo"
MIN_STEPS = 12
"""Fewer leave no step between two failures."""


def run_demo(
    *, out: Path, steps: int = 60, nproc: int = 2, seed: int = 0, script: Path | None = None, console: Console
) -> int:
    """Run, compare, report; 0 when nothing differs, 1 when something does. Raises `Error` when a run cannot finish."""
    job = Job(script=find_script(script), out=out, steps=check_steps(steps), nproc=nproc, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    summary = Summary(steps=steps, nproc=nproc, seed=seed)
    try:
        console.print(f"[bold]1. undisturbed[/]: {nproc} trainers, {steps} steps", highlight=False)
        calm = summary.calm = train(job, "undisturbed", faults=(), step_s=0.0, console=console)
        console.print(f"[bold]2. the same again, and {len(FAULTS)} failures[/]", highlight=False)
        struck = summary.struck = train(job, "struck", faults=FAULTS, step_s=calm.median_step_s(), console=console)
        summary.differences = find_differences(calm, struck)
        summary.verdict = "something differs" if summary.differences else VERDICT
    except Error as error:
        summary.verdict = error.message
        raise
    finally:
        summary.write(out / "summary.json")
    report(calm, struck, summary.differences, out=out, console=console)
    return 1 if summary.differences else 0


def check_steps(steps: int) -> int:
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps is {steps}; the demo needs at least {MIN_STEPS}", hint="leave --steps out")
    return steps


def find_script(script: Path | None) -> Path:
    """The training script: the given one, or `examples/gpt.py` of the checkout that this file belongs to."""
    found = script or Path(__file__).resolve().parents[3] / "examples" / "gpt.py"
    if not found.is_file():
        raise ConfigError(
            f"there is no training script at {found}",
            hint="run the demo from a checkout of keepstep, or pass --script PATH to its examples/gpt.py",
        )
    return found.resolve()


# What the training says


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started"):
    incarnation: int
    pids: list[int]
    time: float


class Restored(msgspec.Struct, frozen=True, tag_field="event", tag="restored"):
    step: int
    source: str
    seconds: float
    time: float


class Step(msgspec.Struct, frozen=True, tag_field="event", tag="step"):
    step: int
    loss: float
    loss_hex: str
    incarnation: int
    time: float


Event = Started | Restored | Step


class Result(msgspec.Struct, frozen=True):
    """The final state of one rank, as digests."""

    sha256: str
    parts: dict[str, str]


# What is done to it, and what came of it


class Fault(msgspec.Struct, frozen=True):
    name: str
    after: float
    """the part of the run that is done when it strikes"""
    target: Literal["first", "last", "all", "keeper"]


FAULTS = (
    Fault("a trainer", after=1 / 4, target="last"),
    Fault("all trainers", after=1 / 2, target="all"),
    Fault("the keeper", after=3 / 4, target="keeper"),
    Fault("another trainer", after=9 / 10, target="first"),
)


class Outcome(msgspec.Struct):
    """One failure: written when it strikes, completed by the first step after it."""

    fault: Fault
    killed_at: float
    last_step: int
    restored: Restored | None = None
    resumed_at: float | None = None
    restarts: int = 0

    @property
    def expects_restart(self) -> bool:
        return self.fault.target != "keeper"

    @property
    def steps_lost(self) -> int:
        """Finished steps that had to be done again."""
        if not self.restarts:
            return 0
        return max(0, self.last_step - (self.restored.step if self.restored else -1))


@dataclass
class Run:
    """Everything known about one run: grows by `observe`, and decides nothing else."""

    steps: list[Step] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    duration_s: float = 0.0
    unprovoked: int = 0
    """restarts while all was well: no failure of ours explains them"""

    def observe(self, event: Event) -> None:
        match event:
            case Started():
                self._observe_start(event)
            case Restored() if not self.settled:
                self.outcomes[-1].restored = event
            case Step():
                self._observe_step(event)

    def _observe_start(self, event: Started) -> None:
        if self.pids and self.settled:
            self.unprovoked += 1
        elif self.pids:
            self.outcomes[-1].restarts += 1
        self.pids = event.pids

    def _observe_step(self, event: Step) -> None:
        self.steps.append(event)
        if self.settled:
            return
        outcome = self.outcomes[-1]
        if outcome.expects_restart and not outcome.restarts:
            outcome.last_step = event.step  # finished before the signal landed
        elif event.time > outcome.killed_at:
            outcome.resumed_at = event.time

    @property
    def settled(self) -> bool:
        """Training goes on after everything that was done to it so far."""
        return not self.outcomes or self.outcomes[-1].resumed_at is not None

    def median_step_s(self) -> float:
        pauses = [after.time - before.time for before, after in zip(self.steps, self.steps[1:], strict=False)]
        return statistics.median(pauses) if pauses else 0.0


def find_due(run: Run, event: Event, *, faults: Sequence[Fault], steps: int) -> Fault | None:
    """The fault that strikes after this event: the next in order, once its step is done and the one before is over."""
    num_done = len(run.outcomes)
    if num_done == len(faults) or not run.settled or not isinstance(event, Step):
        return None
    return faults[num_done] if event.step + 1 >= faults[num_done].after * steps else None


# One run


class Job(msgspec.Struct, frozen=True):
    """What both runs have in common."""

    script: Path
    out: Path
    steps: int
    nproc: int
    seed: int


def train(job: Job, name: str, *, faults: Sequence[Fault], step_s: float, console: Console) -> Run:
    """Train to the end, with `faults` on the way, each at a random moment of a step that takes `step_s`."""
    run = Run()
    chance = random.Random(job.seed)
    with Training(job, name) as training:
        for event in training.follow():
            run.observe(event)
            narrate(event, steps=job.steps, console=console)
            if fault := find_due(run, event, faults=faults, steps=job.steps):
                time.sleep(step_s * chance.uniform(0.2, 0.8))  # into the middle of the step that runs now
                run.outcomes.append(strike(fault, run, training, console=console))
        run.duration_s = time.time() - run.started
        run.results = training.read_results()
        run.leftovers = training.wait_for_quiet()
    return run


def strike(fault: Fault, run: Run, training: Training, *, console: Console) -> Outcome:
    pids = find_targets(fault, run, training)
    outcome = Outcome(fault=fault, killed_at=time.time(), last_step=run.steps[-1].step)
    for pid in pids:
        training.kill(pid)
    listed = ", ".join(map(str, pids))
    console.print(f"  [bold red]SIGKILL[/] {fault.name} (pid {listed})", highlight=False)
    return outcome


def find_targets(fault: Fault, run: Run, training: Training) -> list[int]:
    match fault.target:
        case "first":
            return run.pids[:1]
        case "last":
            return run.pids[-1:]
        case "all":
            return run.pids
        case "keeper":
            return [keeper_pid(run_id=training.run_id, runtime_dir=training.runtime_dir)]


def keeper_pid(*, run_id: str, runtime_dir: Path) -> int:
    """The pid of the node's keeper, as the keeper itself tells it over HTTP on its unix socket.

    A keeper that does not answer yet (it was just started) is asked again for `KEEPER_S`; then its error is raised.
    """
    from keepstep.cli.client import read_status

    deadline = time.monotonic() + KEEPER_S
    while True:
        try:
            return read_status(run_id=run_id, node_id=NODE_ID, runtime_dir=runtime_dir).keeper.pid
        except Error:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


class Training:
    """torchrun and everything below it: started on entry; on exit none of it is left, whatever happened."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name
        self.run_id = f"demo-{name}-{uuid.uuid4().hex[:8]}"
        self.log = job.out / f"{name}.jsonl"
        self.output = job.out / f"{name}.out"
        self.result = job.out / f"{name}.result"
        self._directory = tempfile.TemporaryDirectory(prefix="keepstep-demo-", ignore_cleanup_errors=True)
        self.runtime_dir = Path(self._directory.name)
        self._deadline = time.monotonic() + RUN_S

    def __enter__(self) -> Training:
        for rank in range(self.job.nproc):
            self._result_of(rank).unlink(missing_ok=True)
        self.log.write_bytes(b"")
        with self.output.open("wb") as output:
            # In its own session: Ctrl-C reaches this process only, which then ends the launcher in order.
            self.launcher = subprocess.Popen(
                self._command(), env=self._environment(), stdout=output, stderr=output, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_launcher()
            self._end_everything()
        finally:
            self._directory.cleanup()

    def _command(self) -> list[str]:
        job = self.job
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={job.nproc}"]
        rendezvous = ["--rdzv-backend=keepstep", f"--rdzv-id={self.run_id}", "--rdzv-endpoint=localhost:0"]
        training = [str(job.script), f"--steps={job.steps}", f"--seed={job.seed}"]
        return [
            *launch,
            *rendezvous,
            "--max-restarts=20",
            *training,
            f"--log-file={self.log}",
            f"--result={self.result}",
        ]

    def _environment(self) -> dict[str, str]:
        """The user's environment without settings meant for another job."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
        own = {"KEEPSTEP_RUNTIME_DIR": str(self.runtime_dir), "KEEPSTEP_NODE_ID": NODE_ID, "OMP_NUM_THREADS": "1"}
        return {**inherited, **own}

    def follow(self) -> Iterator[Event]:
        """Each event as it is logged, until the launcher has ended well; raises when it fails or stands still."""
        decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
        heard_at = time.monotonic()
        with self.log.open("rb") as log:
            ended, pending = False, b""
            while not ended:
                ended = self.launcher.poll() is not None  # asked before the read: nothing is logged after it
                *lines, pending = (pending + log.read()).split(b"\n")
                for line in lines:
                    heard_at = time.monotonic()
                    yield decoder.decode(line)
                self._check_progress(heard_at)
                time.sleep(POLL_S)
        if self.launcher.returncode != 0:
            raise self._failure(f"ended with exit code {self.launcher.returncode}")

    def _check_progress(self, heard_at: float) -> None:
        now = time.monotonic()
        if now - heard_at > SILENCE_S:
            raise self._failure(f"logged nothing for {SILENCE_S:.0f} s")
        if now > self._deadline:
            raise self._failure(f"took longer than {RUN_S:.0f} s")

    def _failure(self, what: str) -> Error:
        return Error(f"the {self.name} training {what}", hint=f"read {self.output}")

    def read_results(self) -> list[Result]:
        try:
            texts = [self._result_of(rank).read_bytes() for rank in range(self.job.nproc)]
        except FileNotFoundError as error:
            raise self._failure(f"left no result at {error.filename}") from error
        return [msgspec.json.decode(text, type=Result) for text in texts]

    def _result_of(self, rank: int) -> Path:
        return self.result.with_name(f"{self.result.name}.rank{rank}")

    def wait_for_quiet(self) -> list[str]:
        """The processes that are still there `EXIT_S` after a normal end: keepstep promises that there are none."""
        wait_until(lambda: not self._living(), timeout_s=EXIT_S)
        return [f"{pid} {read_command(pid)}" for pid in self._living()]

    def kill(self, pid: int) -> None:
        if not self._send(pid, signal.SIGKILL):
            raise Error(f"process {pid} was gone before it could be killed", hint=f"read {self.output}")

    def _end_launcher(self) -> None:
        """Ask first: the launcher ends its trainers in order."""
        if self.launcher.poll() is None:
            self.launcher.terminate()
        try:
            self.launcher.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait(EXIT_S)

    def _end_everything(self) -> None:
        """Killed, not asked: what is still here was left behind, and a keeper would stay for its whole lease."""

        def none_left() -> bool:
            living = self._living()
            for pid in living:
                self._send(pid, signal.SIGKILL)
            return not living

        if not wait_until(none_left, timeout_s=EXIT_S):
            raise Error(f"processes of the demo do not end: {self._living()}", hint="look at them with ps and end them")

    def _living(self) -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and self._owns(pid)]

    def _owns(self, pid: int) -> bool:
        """Zombies, strangers and processes of other users have no environment to read: never ours."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"KEEPSTEP_RUNTIME_DIR={self.runtime_dir}".encode() in environment.split(b"\0")

    def _send(self, pid: int, number: signal.Signals) -> bool:
        """Signal one of our processes; False when there is no such process (any more)."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            # The handle first, then the look: the process looked at is the one that is hit.
            if not self._owns(pid):
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


# The comparison


def find_differences(calm: Run, struck: Run) -> list[str]:
    """Every way in which the struck run is not the undisturbed one, as sentences; empty when it is."""
    return [*compare_losses(calm, struck), *compare_results(calm, struck), *check_outcomes(struck)]


def compare_losses(calm: Run, struck: Run) -> list[str]:
    expected = {step.step: step for step in calm.steps}
    wrong = [step for step in struck.steps if step.loss_hex != expected[step.step].loss_hex]
    missing = sorted(expected.keys() - {step.step for step in struck.steps})
    found = []
    if wrong:
        first, before = wrong[0], expected[wrong[0].step]
        values = f"{before.loss_hex} undisturbed, {first.loss_hex} struck"
        found.append(f"{len(wrong)} losses differ, first at step {first.step}: {values}")
    if missing:
        found.append(f"{len(missing)} steps were never done, first step {missing[0]}")
    return found


def compare_results(calm: Run, struck: Run) -> list[str]:
    found = []
    for rank, (before, after) in enumerate(zip(calm.results, struck.results, strict=True)):
        parts = sorted(name for name, digest in before.parts.items() if after.parts.get(name) != digest)
        if before != after:
            found.append(f"rank {rank} ends with another state: {', '.join(parts) or 'parts'}")
    return found


def check_outcomes(struck: Run) -> list[str]:
    """The same end is worth nothing when the failures did not happen, or training began anew after them."""
    names = {fault.name for fault in FAULTS} - {outcome.fault.name for outcome in struck.outcomes}
    found = [f"{name} was never killed" for name in sorted(names)]
    if struck.unprovoked:
        found.append(f"training restarted {struck.unprovoked} times without the death of a trainer")
    for outcome in struck.outcomes:
        name = outcome.fault.name
        if outcome.resumed_at is None:
            found.append(f"no step followed the death of {name}")
        if outcome.expects_restart and outcome.restored is None:
            found.append(f"nothing was restored after the death of {name}")
        if not outcome.expects_restart and outcome.restarts:
            found.append(f"training restarted after the death of {name}")
    return found


# The report


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


def make_row(outcome: Outcome) -> OutcomeRow:
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
    """`summary.json`: written whether or not the runs came to their end."""

    steps: int
    nproc: int
    seed: int
    verdict: str = "interrupted"
    differences: list[str] = field(default_factory=list)
    calm: Run | None = None
    struck: Run | None = None

    def write(self, path: Path) -> None:
        runs = {"undisturbed": self.calm, "struck": self.struck}
        content = {
            "schema": 1,
            "verdict": self.verdict,
            "identical": self.verdict == VERDICT,
            "differences": self.differences,
            "steps": self.steps,
            "nproc": self.nproc,
            "seed": self.seed,
            "failures": [make_row(outcome) for outcome in self.struck.outcomes] if self.struck else [],
            "runs": {
                name: {"seconds": run.duration_s, "results": run.results, "leftovers": run.leftovers}
                for name, run in runs.items()
                if run is not None
            },
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def narrate(event: Event, *, steps: int, console: Console) -> None:
    match event:
        case Started():
            line = f"  [dim]trainers {', '.join(map(str, event.pids))}, incarnation {event.incarnation}[/]"
        case Restored():
            line = f"  [bold green]restored[/] step {event.step} from {event.source} in {event.seconds:.2f} s"
        case Step():
            bar = "━" * round(event.loss * 10)
            line = f"  step {event.step:3d} of {steps - 1}  loss {event.loss:.4f}  [cyan]{bar}[/]"
    console.print(line, highlight=False)


def report(calm: Run, struck: Run, differences: list[str], *, out: Path, console: Console) -> None:
    console.print(make_table(struck))
    picture = draw_losses(calm, struck, out=out, console=console)
    took = f"undisturbed {calm.duration_s:.0f} s, struck {struck.duration_s:.0f} s"
    console.print(f"{took}; loss curves: {escape(str(picture))}", highlight=False, soft_wrap=True)
    for process in [*calm.leftovers, *struck.leftovers]:
        console.print(f"[yellow]left behind, and ended by the demo: {escape(process)}[/]", soft_wrap=True)
    for difference in differences:
        console.print(f"[bold red]{escape(difference)}[/]", highlight=False, soft_wrap=True)
    if not differences:
        console.print(f"[bold green]{VERDICT}[/]", soft_wrap=True)


def make_table(struck: Run) -> Table:
    table = Table(title="SIGKILL of", title_justify="left")
    table.add_column("failure")
    for name in ("after step", "restored step", "source", "seconds", "steps lost"):
        table.add_column(name, justify="right")
    for outcome in struck.outcomes:
        row = make_row(outcome)
        seconds = "never" if row.seconds_to_next_step is None else f"{row.seconds_to_next_step:.1f}"
        missing = "nothing" if outcome.restarts else "not needed"
        restored = missing if row.restored_step is None else str(row.restored_step)
        table.add_row(row.failure, str(row.after_step), restored, row.source or "-", seconds, str(row.steps_lost))
    table.caption = "seconds: from the kill to the end of the first step after it"
    return table


def draw_losses(calm: Run, struck: Run, *, out: Path, console: Console) -> Path:
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
        losses, first = [step.loss for step in run.steps], run.steps[0].time
        by_step.plot([step.step for step in run.steps], losses, label=label, **style)
        by_time.plot([step.time - first for step in run.steps], losses, label=label, **style)
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


def write_losses(calm: Run, struck: Run, *, path: Path) -> Path:
    rows = [("undisturbed", step) for step in calm.steps] + [("struck", step) for step in struck.steps]
    lines = [f"{name},{step.step},{step.loss!r},{step.loss_hex},{step.time!r}" for name, step in rows]
    path.write_text("\n".join(["run,step,loss,loss_hex,time", *lines]) + "\n", encoding="utf-8")
    return path
