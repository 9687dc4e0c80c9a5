"""Lives of a job: trainers forked from a warm zygote, killed, started again, and what their logs say. Not a test."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steps import Life, read_log

from keepstep.testing.run import LocalRun, alive, wait_until

SCRIPT = Path(__file__).with_name("steps.py")
START_S = 60.0


@dataclass(frozen=True)
class Child:
    """A trainer that was forked. Its pid may be somebody else's once it has ended: they come round within minutes."""

    pid: int
    number: int


class Zygote:
    """A process that has imported torch and forks trainers. Ends with its standard input, and its children with it."""

    def __init__(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
        )
        self._told: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        self._codes: dict[Child, int] = {}
        self._newest: dict[int, Child] = {}
        """by pid"""
        self._forks = itertools.count()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._next("ready", START_S)

    def fork(self, life: Life) -> Child:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(life)).encode() + b"\n")
        self._process.stdin.flush()
        child = Child(self._next("started", START_S), next(self._forks))
        self._newest[child.pid] = child
        return child

    def code(self, child: Child) -> int | None:
        """The exit code of a trainer that has ended: minus the signal when it was killed."""
        while not self._told.empty():
            self._take(self._told.get())
        return self._codes.get(child)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._thread.join(timeout=20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.put(json.loads(line))

    def _next(self, kind: str, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            told = self._told.get(timeout=max(0.01, deadline - time.monotonic()))
            if kind in told:
                return told[kind]
            self._take(told)

    def _take(self, told: dict[str, int]) -> None:
        self._codes[self._newest[told["ended"]]] = told["code"]


@dataclass
class Trainers:
    """The trainers of one life, by rank, and the log they share."""

    zygote: Zygote
    children: list[Child]
    log: Path

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    def living(self) -> list[int]:
        """The pids of those that have not ended."""
        return [child.pid for child in self.children if self.zygote.code(child) is None and alive(child.pid)]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in read_log(self.log) if line["event"] in kinds]

    def steps(self, kind: str) -> list[int]:
        return [line["step"] for line in self.events(kind)]

    def captured(self) -> set[int]:
        """Steps whose take was not skipped."""
        return {line["step"] for line in self.events("taken") if not line["skipped"]}

    def newest_complete(self) -> int:
        """The newest step that any rank was told is complete; -1: none."""
        return max(self.steps("complete"), default=-1)

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = START_S) -> None:
        """Until every rank has said `kind`, or `count` times together where that is more."""
        count = max(count, len(self.children))
        wait_until(
            lambda: len(self.events(kind)) >= count or any(code is not None for code in self.codes()),
            timeout_s=timeout_s,
            what=lambda: f"{count} times {kind!r} in\n{self.text()}",
        )
        assert len(self.events(kind)) >= count, f"a trainer ended before {kind!r}:\n{self.text()}"

    def kill(self, *, ranks: list[int] | None = None) -> None:
        """SIGKILL at once, then wait for the end of each."""
        chosen = [self.children[rank] for rank in ranks] if ranks is not None else self.children
        for child in chosen:
            if self.zygote.code(child) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        for child in chosen:
            wait_until(lambda child=child: self.zygote.code(child) is not None, what=f"the end of {child}")

    def codes(self) -> list[int | None]:
        return [self.zygote.code(child) for child in self.children]

    def text(self) -> str:
        """Logs and errors of this life, for a message."""
        errors = self.log.with_name(self.log.name + ".stderr")
        lines = read_log(self.log)[-40:]
        return "\n".join([*map(str, lines), errors.read_text()[-6000:] if errors.exists() else ""])


@dataclass
class Job:
    """One run with `world` ranks and all its lives."""

    zygote: Zygote
    run: LocalRun
    world: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    lives: list[Trainers] = field(default_factory=list)

    def start(self, environ: dict[str, str] | None = None, **life: Any) -> Trainers:
        number = len(self.lives)
        log = self.run.directory / f"life-{number}.jsonl"
        meet = ""
        if self.world > 1:
            meet = str(self.run.directory / f"meet-{number}")
            Path(meet).write_bytes(bytes(8 * self.world))
        children = []
        for rank in range(self.world):
            env = {
                **self.run.environ, **self.settings, **(environ or {}),
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
            }  # fmt: skip
            children.append(self.zygote.fork(Life(log=str(log), meet=meet, env=env, **life)))
        self.lives.append(Trainers(self.zygote, children, log))
        return self.lives[-1]

    def check(self, trainers: Trainers, expect: Expectation, *, killed: Collection[int] = ()) -> int | None:
        """What this life restored, if it came that far: right, and the same on all ranks.

        `killed`: ranks that were killed. Others that were restoring with them must say so, and nothing else.
        """
        alone = tuple(f"rank {rank} ended while the job was restoring" for rank in killed)
        for line in trainers.events("raised"):
            if alone and line["rank"] not in killed and line["text"].startswith(alone):
                continue
            raise AssertionError(f"restore raised {line}\n{trainers.text()}\n{self.keeper_log()}")
        found = trainers.events("restored")
        for line in found:
            assert not line["problems"], f"mixed or wrong state: {line}"
        steps = {line["step"] for line in found}
        assert len(steps) <= 1, f"ranks restored different steps: {found}"
        if not steps:
            return None
        (step,) = steps
        assert expect.allows(step), f"restored {step}, allowed {expect}\n{trainers.text()}\n{self.keeper_log()}"
        return step

    def keeper_log(self) -> str:
        path = self.run.identity.directory / "keeper.log"
        return path.read_text()[-6000:] if path.exists() else "no keeper log"

    def end(self) -> None:
        for trainers in self.lives:
            trainers.kill()
        self.run.end()


@dataclass(frozen=True)
class Expectation:
    """What a restore may give back: the newest complete version, or one that was captured after it."""

    complete: int = -1
    in_flight: frozenset[int] = frozenset()

    def allows(self, step: int) -> bool:
        return step == self.complete or (step in self.in_flight and step > self.complete)

    def after(self, trainers: Trainers, restored: int | None) -> Expectation:
        """The expectation for the next life, from what this one said before it died."""
        if restored is None:
            return self
        complete = max(trainers.newest_complete(), restored)
        return Expectation(complete, frozenset(s for s in trainers.captured() if s > complete))


@contextlib.contextmanager
def job(zygote: Zygote, *, world: int = 1, settings: dict[str, str] | None = None) -> Iterator[Job]:
    """A job whose every process and file is gone at the end."""
    made = Job(zygote, LocalRun(), world, settings or {})
    try:
        yield made
    finally:
        try:
            made.end()
        finally:
            for trainers in made.lives:
                assert not trainers.living()


def within(deadline_s: float) -> Callable[[], bool]:
    """True until the time is over."""
    end = time.monotonic() + deadline_s
    return lambda: time.monotonic() < end
