"""One run of the user's command: started, restarted after each kill as a launcher would, ended, and nothing left of it.

All processes of a run are descendants of this one: it adopts orphans (PR_SET_CHILD_SUBREAPER), so that a keeper, which
detaches itself, and loader workers are found and ended too. Every wait ends: a run without a new event or output for
`timeout_s` is stalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from keepstep.control.check_events import (
    CHECK,
    KEPT,
    KILLED,
    OPENED,
    REACHED,
    TAKE,
    WITHIN,
    CheckOrders,
    KillOrder,
    TrainerEvent,
    killed_path,
    write_orders,
)

POLL_S = 0.02
END_S = 20.0  # until every process of a run must have ended
MAX_STARTS = 4  # of a trainer without a new step: a crash loop
ENDED, STOPPED, FAILED, STALLED, LOOPING = "ended", "stopped", "failed", "stalled", "looping"
LAST_LINES = 12
MAX_OUTPUT_BYTES = 1_000_000
REFUSAL = re.compile(r"keepstep\.errors\.\w+: (.+)$", re.MULTILINE)  # also behind torchrun's "[rank0]: "
_SET_SUBREAPER = 36


@dataclass
class RunOutcome:
    """How a run ended, and every event of its trainers in order."""

    ending: str  # one of the words above
    events: list[TrainerEvent]
    last_lines: str  # of what the last start printed
    duration_s: float
    exit_code: int | None = None
    refusal: str = ""  # the last error of keepstep's that the last start printed
    kills: frozenset[int] = frozenset()  # numbers of the orders that were carried out


@dataclass
class CommandRun:
    """Runs the command in a directory of its own: records, outputs, sockets of its keeper."""

    command: Sequence[str]
    directory: Path
    orders: CheckOrders
    timeout_s: float
    pauses_s: dict[int, float] = field(default_factory=dict)  # by number of a kill WITHIN: seconds behind its take
    _events: list[TrainerEvent] = field(default_factory=list)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _starts: int = 0

    def execute(
        self, progress: Callable[[int], None], is_enough: Callable[[list[TrainerEvent]], bool] = lambda events: False
    ) -> RunOutcome:
        """Run until the command has ended, or every rank has reached the last step, or nothing more is to be learnt."""
        self.directory.mkdir(parents=True)
        (self.directory / "r").mkdir(mode=0o700)
        write_orders(self.directory, self.orders)
        started = time.monotonic()
        process = self._start()
        active, size = started, 0
        try:
            while True:
                code = process.poll()
                fresh = self._read()
                progress(len({event.step for event in self._events if event.kind == TAKE}))
                self._kill_within()
                now, new_size = time.monotonic(), self._output_bytes()
                if fresh or new_size != size:
                    active, size = now, new_size
                ending = self._ending(code, stalled=now - active > self.timeout_s)
                if not ending and fresh and is_enough(self._events):
                    ending = STOPPED
                if ending:
                    output, duration_s = self._output_text(), now - started
                    lines = "\n".join(output.splitlines()[-LAST_LINES:])
                    refusal = (REFUSAL.findall(output) or [""])[-1]
                    return RunOutcome(ending, self._events, lines, duration_s, code, refusal, self._kills_done())
                if code is not None:
                    process = self._start()
                reap(process.pid)
                time.sleep(POLL_S)
        finally:
            end_descendants(process)

    def _ending(self, code: int | None, *, stalled: bool) -> str:
        """Why the run is over; empty while it is not."""
        last = {event.rank: event for event in self._events}
        reached = [event for event in last.values() if event.kind == REACHED]
        if reached and len(reached) == reached[0].world_size:
            return STOPPED
        opened = 0
        for event in self._events:
            if event.rank == 0:
                opened = 0 if event.kind in (TAKE, KILLED) else opened + (event.kind == OPENED)
        if opened > MAX_STARTS:
            return LOOPING
        if code is None:
            return STALLED if stalled else ""
        if code == 0:
            return ENDED
        return "" if any(event.kind == KILLED for event in last.values()) else FAILED

    def _kills_done(self) -> frozenset[int]:
        return frozenset(o.number for o in self.orders.kills if killed_path(self.directory, o).exists())

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        environ = {
            **os.environ, CHECK: str(self.directory), "KEEPSTEP_RUN_ID": f"check-{self.directory.name}",
            "KEEPSTEP_RUNTIME_DIR": str(self.directory / "r"), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        with self._output("out").open("ab") as out, self._output("err").open("ab") as err:
            return subprocess.Popen(
                list(self.command), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ,
                start_new_session=True,
            )  # fmt: skip

    def _output(self, kind: str) -> Path:
        return self.directory / f"start-{self._starts}.{kind}"

    def _output_bytes(self) -> int:
        return sum(self._output(kind).stat().st_size for kind in ("out", "err")) + 1000 * self._starts

    def _output_text(self) -> str:
        """The end of what the last start printed."""
        text = ""
        for kind in ("out", "err"):
            with self._output(kind).open("rb") as file:
                file.seek(max(0, self._output(kind).stat().st_size - MAX_OUTPUT_BYTES))
                text += file.read().decode("utf-8", "replace")
        return text

    def _read(self) -> list[TrainerEvent]:
        """Read the lines that were written since the last call."""
        fresh: list[TrainerEvent] = []
        for path in sorted(self.directory.glob("rank-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(lines) + len(newline)
            fresh += [msgspec.json.decode(line, type=TrainerEvent) for line in lines.splitlines()]
        self._events += sorted(fresh, key=lambda event: event.at)
        return fresh

    def _kill_within(self) -> None:
        """Carry out the kills at a moment between two takes: trainers carry out the others."""
        for order in self.orders.kills:
            if order.moment != WITHIN or killed_path(self.directory, order).exists():
                continue
            event = next((e for e in self._events if is_due(e, order)), None)
            if event is not None and time.time() >= event.at + self.pauses_s.get(order.number, 0.0):
                killed_path(self.directory, order).touch()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event.pid, signal.SIGKILL)
                self._events.append(
                    msgspec.structs.replace(event, kind=KILLED, at=time.time(), text=WITHIN, state={}, around={})
                )


def is_due(event: TrainerEvent, order: KillOrder) -> bool:
    return event.kind == KEPT and event.rank == order.rank and event.step == order.step


# Processes


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Inside the block, processes whose parent has ended become children of this one."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def descendants() -> list[int]:
    """Every process below this one, ended ones that nobody has waited for included."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    below: list[int] = []
    queue = [os.getpid()]
    while queue:
        queue += (found := children.get(queue.pop(), []))
        below += found
    return below


def reap(own: int) -> None:
    """Wait for adopted processes that have ended; `own` was started by subprocess, which waits itself."""
    for pid in descendants():
        if pid != own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill every process of the run: the command first, which would start others again."""
    if process.poll() is None:
        process.kill()
        process.wait(timeout=END_S)
    deadline = time.monotonic() + END_S
    while (left := descendants()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S)
