"""Trials with transformers' Trainer: a run without keepstep and one that is killed, compared bit by bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_exact import free_port

from keepstep.testing.run import LocalRun, wait_until

SCRIPT = Path(__file__).with_name("train_transformers.py")
MAX_LIVES = 20
END_S = 40.0
# What a kill at step k leaves behind: the snapshot of k, or that of the step before.
BEFORE_TAKE = ("evaluating", "epoch_end", "save")


@dataclass(frozen=True)
class Trial:
    """What is trained, and where it is killed: `[rank@]step:moment`, in the order in which it happens."""

    kills: str
    life: dict[str, Any] = field(default_factory=dict)  # fields of `train_transformers.Life`
    options: dict[str, Any] = field(default_factory=dict)  # of TrainingArguments
    ranks: int = 1

    def request(self, place: Place, *, kept: str, kills: tuple[str, ...] = ()) -> dict[str, Any]:
        life = {"out": str(place.out), "options": list(self.options.items()), **self.life, "kept": kept}
        return {**life, "kills": kills}

    def restored(self) -> list[int | None]:
        """The step that each life should begin with."""
        every, steps = self.life.get("every") or 1, [0]
        for kill in self.kills.split():
            step, moment = kill.rpartition("@")[2].split(":")
            steps.append((int(step) - (moment in BEFORE_TAKE)) // every * every)
        return [step or None for step in steps]


class Place:
    """The files and the keeper of one run."""

    def __init__(self) -> None:
        self.run = LocalRun("trainer")
        self.out = Path(tempfile.mkdtemp(prefix="trainer-", dir="/tmp"))
        self.environ = {**self.run.environ, "OMP_NUM_THREADS": "1"}

    def lines(self, name: str, rank: int = 0) -> list[str]:
        path = self.out / f"{name}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def final(self, rank: int) -> Any:
        return json.loads((self.out / f"final-{rank}.json").read_text())

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.out.glob("log*")))

    def check_no_trace(self) -> None:
        wait_until(
            lambda: not self.run.processes() and not self.run.files(), timeout_s=END_S,
            what=lambda: f"the end of {self.run.processes()} and {self.run.files()} after a normal end",
        )  # fmt: skip

    def clear(self) -> None:
        for pid in self.run.processes():
            os.kill(pid, signal.SIGKILL)
        for directory in (self.out, self.run.directory):
            shutil.rmtree(directory, ignore_errors=True)


class Server:
    """Forks lives on demand: to import transformers for each would be most of the time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def live(self, life: dict[str, Any], place: Place, ranks: int) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"life": life, "env": place.environ, "ranks": ranks, "log": str(place.out)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def finish(self, life: dict[str, Any], place: Place, ranks: int = 1) -> None:
        """Lives until one ends normally."""
        for _ in range(MAX_LIVES):
            codes = self.live(life, place, ranks)
            if not any(codes):
                return
            assert -signal.SIGKILL in codes, f"ended with {codes}: {place.log()}"
        raise AssertionError(f"not finished after {MAX_LIVES} lives: {place.lines('lives')}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def run_trial(trial: Trial, server: Server, places: list[Place], *, kept: str = "class") -> Place:
    """The run that is killed ends as the one without keepstep. Returns its place."""
    bare, killed = Place(), Place()
    places += [bare, killed]
    server.finish(trial.request(bare, kept=""), bare, trial.ranks)
    kills = tuple(trial.kills.split())
    server.finish(trial.request(killed, kept=kept, kills=kills), killed, trial.ranks)
    killed.check_no_trace()
    check_lives(trial, killed)
    compare(bare, killed, trial.ranks)
    return killed


def check_lives(trial: Trial, place: Place) -> None:
    """Every kill was done, and every life came back to the newest snapshot."""
    lives = [None if line == "None" else int(line) for line in place.lines("lives")]
    assert lives == trial.restored(), f"{lives} after {trial.kills}: {place.log()}"


def compare(bare: Place, other: Place, ranks: int) -> None:
    for rank in range(ranks):
        truth = losses(bare, rank)
        for step, found in losses(other, rank).items():
            assert truth[step] == found, f"rank {rank} had another loss at step {step}"
        expected = bare.final(rank)
        assert difference(expected, other.final(rank)) == "", f"rank {rank} ended elsewhere"


def losses(place: Place, rank: int) -> dict[str, set[str]]:
    """By step: those of all its batches, however often they were trained."""
    found: dict[str, set[str]] = {}
    for line in place.lines("losses", rank):
        step, loss = line.split()
        found.setdefault(step, set()).add(loss)
    return found


def difference(expected: Any, found: Any, path: str = "") -> str:
    """The first place where two reports differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs: Any = [(key, expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(index, *pair) for index, pair in enumerate(zip(expected, found, strict=True))]
    else:
        return "" if expected == found else f"{path}: {str(expected)[:200]} became {str(found)[:200]}"
    return next((found for key, *pair in pairs if (found := difference(*pair, f"{path}.{key}"))), "")


def run_torchrun(life: dict[str, Any], place: Place, ranks: int) -> None:
    """One whole job under torchrun, which starts killed trainers again by itself."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=keepstep", "--rdzv-id=trainer",
        f"--rdzv-endpoint=localhost:{free_port()}", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=30",
        str(SCRIPT), "run", json.dumps(life),
    ]  # fmt: skip
    environ = {key: value for key, value in {**os.environ, **place.environ}.items() if key != "KEEPSTEP_RUN_ID"}
    with (place.out / "log-torchrun").open("w") as log:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=500, check=False
        )
    assert done.returncode == 0, place.log()
