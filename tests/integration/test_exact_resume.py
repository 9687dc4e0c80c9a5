"""Resume is bit-exact: a run with failures ends as the run without, in every bit and in every loss on the way.

Each trial trains three times with `train_exact.py`: without keepstep, with it and undisturbed, and with SIGKILLs
in mid backward, in mid optimizer step, right after a take and right after a restore. All three must end with the
same parameters, buffers, optimizer state, schedulers and random draws, and every executed step, repeated ones
too, must have had the same loss. A resumed life starts from other seeds, so nothing can be right by chance.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepstep.testing.run import LocalRun, wait_until

SCRIPT = Path(__file__).with_name("train_exact.py")
STEPS = 10
MAX_LIVES = 40
END_S = 20.0


@dataclass(frozen=True)
class Trial:
    """What is trained, and where it is killed: `[rank@]step:moment`."""

    case: str
    kills: str = ""
    ranks: int = 1
    steps: int = STEPS
    rush: bool = False
    """do not wait for snapshots: they are copied while the next step runs, throttled, and some are skipped"""
    skips: bool = False
    """some steps are not captured: they are not due, or the state outgrows its arena on the way"""
    every: int = 1

    @property
    def environ(self) -> dict[str, str]:
        # Without fingerprints: the fence alone must hold, and not by voiding what it failed to protect.
        throttled = {"KEEPSTEP_TAKE_RATE_BYTES_S": "4000000", "KEEPSTEP_TAKE_FINGERPRINT": "off"}
        return {"KEEPSTEP_EVERY": str(self.every), **(throttled if self.rush else {})}

    def arguments(self, out: Path, *options: str) -> list[str]:
        rush = ["--rush"] if self.rush else []
        return ["run", self.case, "--out", str(out), "--steps", str(self.steps), *rush, *options]

    def killing(self, out: Path) -> list[str]:
        return self.arguments(out, *[f"--kill={kill}" for kill in self.kills.split()])


class Place:
    """The files and the keeper of one run."""

    def __init__(self, trial: Trial) -> None:
        self.run = LocalRun("exact")
        self.out = Path(tempfile.mkdtemp(prefix="exact-", dir="/tmp"))
        self.environ = {**self.run.environ, **trial.environ, "OMP_NUM_THREADS": "1"}

    def read(self, name: str, rank: int = 0) -> list[str]:
        path = self.out / f"{name}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def final(self, rank: int) -> dict[str, Any]:
        return json.loads((self.out / f"final-{rank}.json").read_text())

    def log(self) -> str:
        found = [path.read_text(errors="replace")[-3000:] for path in sorted(self.out.glob("log*"))]
        return "\n".join(found)

    def check_no_trace(self) -> None:
        """After a normal end nothing is left: no keeper, no socket, no file."""
        run = self.run
        wait_until(
            lambda: not run.processes() and not run.files(), timeout_s=END_S,
            what=lambda: f"the end of {run.processes()} and {run.files()} after a normal end",
        )  # fmt: skip

    def clear(self) -> None:
        for pid in self.run.processes():
            os.kill(pid, signal.SIGKILL)
        for directory in (self.out, self.run.directory):
            shutil.rmtree(directory, ignore_errors=True)


class Server:
    """Forks lives on demand: importing torch for each would be most of the time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def live(self, arguments: list[str], place: Place, ranks: int) -> list[int]:
        """One life of all ranks; returns their exit codes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"argv": arguments, "env": place.environ, "ranks": ranks, "log": str(place.out)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def finish(self, arguments: list[str], place: Place, ranks: int) -> None:
        """Lives until one ends normally."""
        for _ in range(MAX_LIVES):
            codes = self.live(arguments, place, ranks)
            if not any(codes):
                return
            assert -signal.SIGKILL in codes, f"ended with {codes}: {place.log()}"
        raise AssertionError(f"not finished after {MAX_LIVES} lives: {place.read('lives')}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    this = Server()
    yield this
    this.close()


@pytest.fixture
def places() -> Iterator[list[Place]]:
    made: list[Place] = []
    yield made
    for place in made:
        place.clear()


# What must be equal


def compare(truth: Place, other: Place, trial: Trial, what: str) -> None:
    for rank in range(trial.ranks):
        losses = dict(line.split() for line in truth.read("losses", rank))
        assert len(losses) == trial.steps
        for line in other.read("losses", rank):
            step, loss = line.split()
            assert loss == losses[step], f"{what}: rank {rank} had another loss at step {step}"
        expected, found = truth.final(rank), other.final(rank)
        assert difference(expected, found) == "", f"{what}: rank {rank} ended elsewhere"


def difference(expected: Any, found: Any, path: str = "") -> str:
    """The first place where two reports differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs: Any = [(key, expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(index, *pair) for index, pair in enumerate(zip(expected, found, strict=True))]
    else:
        return "" if expected == found else f"{path}: {str(expected)[:200]} became {str(found)[:200]}"
    return next((found for key, *pair in pairs if (found := difference(*pair, f"{path}.{key}"))), "")


def check_lives(trial: Trial, place: Place) -> None:
    """Every kill was done, every life came back to the newest snapshot, and not by starting anew."""
    lives = [None if line == "None" else int(line) for line in place.read("lives")]
    kills = trial.kills.split()
    assert len(list(place.out.glob("killed-*"))) == len(kills), f"not killed as often as asked: {lives}"
    assert len(lives) == len(kills) + 1
    assert lives[0] is None
    for number, kill in enumerate(kills):
        step, moment = kill.rpartition("@")[2].split(":")
        newest, before = lives[number + 1], int(step) - 1
        allowed = {"take": {before, before + 1}, "restore": {lives[number]}}.get(moment, {before})
        if trial.rush or trial.skips:
            assert newest is None or newest <= before + 1, f"{lives} after {kills}"
        else:
            assert newest in {None if step < 0 else step for step in allowed if step is not None}, f"{lives}, {kills}"
    if not (trial.rush or trial.skips):
        skipped = [line for line in place.read("takes") if "its trainer ended" not in line]
        assert not skipped, f"not captured: {skipped}"
    if not trial.rush:
        assert any(life is not None for life in lives[1:]), f"nothing was ever restored: {lives}"


def run_trial(trial: Trial, server: Server, places: list[Place]) -> None:
    bare, kept, killed = (Place(trial) for _ in range(3))
    places += [bare, kept, killed]
    server.finish(trial.arguments(bare.out, "--bare"), bare, trial.ranks)
    server.finish(trial.arguments(kept.out), kept, trial.ranks)
    kept.check_no_trace()
    compare(bare, kept, trial, "keepstep alone changed the run")
    server.finish(trial.killing(killed.out), killed, trial.ranks)
    killed.check_no_trace()
    check_lives(trial, killed)
    compare(kept, killed, trial, "the run that was killed")


# One process


TRIALS = {
    "loop AdamW, cosine": Trial("simple:kind=loop,schedule=cosine", "0:step 3:backward 5:take 8:step"),
    "foreach AdamW, one cycle": Trial("simple:kind=foreach,schedule=onecycle", "1:backward 4:step 4:restore 7:take"),
    "fused AdamW, multi step": Trial("simple:kind=fused,schedule=multistep", "2:step 6:take 7:backward"),
    "SGD with momentum, lambda": Trial("simple:kind=sgd,schedule=lambda", "1:take 5:step 8:backward"),
    "closure, fused": Trial("simple:kind=fused,schedule=cosine,closure=1", "3:backward 5:step 8:take"),
    "closure, loop": Trial("simple:kind=loop,schedule=step,closure=1", "2:step 6:backward"),
    "LBFGS": Trial("simple:kind=lbfgs,schedule=step,closure=1", "3:step 6:backward 8:take", skips=True),
    "copied while training, fused": Trial(
        "simple:kind=fused,schedule=cosine,rush=1", "4:take 7:step 9:backward", rush=True
    ),
    "copied while training, closure": Trial(
        "simple:kind=sgd,schedule=onecycle,rush=1,closure=1", "3:take 6:step 8:backward", rush=True
    ),
    "every third step": Trial("simple:kind=loop,schedule=linear", "4:take 6:take 8:step", every=3, skips=True),
    "every optimizer and scheduler": Trial("zoo", "3:step 6:backward 8:take"),
    "two optimizers, one idle": Trial("adversaries", "3:step 5:take 6:backward"),
    "optimizers inside backward": Trial("in_backward", "3:backward 3:restore 7:step"),
    "bf16 with fp32 masters": Trial("masters", "3:step 5:take 7:backward"),
    "scaler with skipped steps": Trial("scaled:kind=loop", "3:take 4:take 5:backward 8:step"),
    "scaler with skipped steps, fused": Trial("scaled:kind=fused", "3:take 4:take 5:backward 8:step"),
    "by hand, without optimizer": Trial("handmade", "2:step 5:backward 7:take"),
    "optimizers in an optimizer, hooked modules": Trial("frameworks", "3:step 5:take 7:backward"),
    "between micro-batches": Trial("accumulating", "3:backward 4:take 8:step", skips=True),
    "loader in mid-epoch": Trial("loading:workers=0", "2:take 6:step 8:backward"),
    "loader in mid-epoch, own generator": Trial("loading:workers=0,own=1", "1:step 2:take 8:take"),
    "loader at its last batch": Trial("loading:workers=0", "4:take 5:step 9:take", steps=12),
    "loader between epochs": Trial("loading:workers=0,late=1", "4:take 5:backward 9:take 10:step", steps=12),
    "loader in order": Trial("loading:workers=0,shuffle=0,late=1", "2:take 5:backward 9:take", steps=12),
    "loader and a second for validation": Trial("loading:workers=0,validate=1", "1:step 4:take 6:take 8:step"),
    "workers in mid-epoch": Trial("loading:workers=2", "2:take 6:step 8:backward"),
    "workers at the last batch": Trial("loading:workers=2,own=1", "4:take 5:step", steps=12),
    "workers between epochs": Trial("loading:workers=2,late=1", "4:take 5:backward 10:step", steps=12),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIALS)
def test_run_that_was_killed_ends_as_the_run_that_was_not(name: str, server: Server, places: list[Place]) -> None:
    run_trial(TRIALS[name], server, places)


@pytest.mark.chaos
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("options", ["shuffle=0", "own=1", "own=0", "own=1,persistent=1", "own=0,persistent=1"])
def test_workers_and_their_loader_go_on_from_every_step(
    options: str, late: int, server: Server, places: list[Place]
) -> None:
    """Each step of two epochs is the last one of a life."""
    kills = " ".join(f"{step}:backward" for step in range(1, 12))
    run_trial(Trial(f"loading:workers=2,{options},late={late}", kills, steps=12), server, places)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(6))
def test_many_kills_anywhere_leave_no_difference(seed: int, server: Server, places: list[Place]) -> None:
    dice = random.Random(seed)
    steps = sorted(dice.sample(range(1, 58), 15))
    kills = " ".join(f"{step}:{dice.choice(['backward', 'step', 'take'])}" for step in steps)
    kind = dice.choice(["loop", "foreach", "fused", "sgd"])
    rush = seed % 2 == 0
    options = ",rush=1" if rush else ""
    run_trial(Trial(f"simple:kind={kind},schedule=cosine{options}", kills, steps=60, rush=rush), server, places)


def test_embedding_that_is_written_in_forward_is_not_copied_behind_take(server: Server, places: list[Place]) -> None:
    """max_norm rescales rows of the weight in the forward pass: no optimizer's hook tells, and few bytes change."""
    run_trial(Trial("normed", "3:take 6:take 8:step", rush=True), server, places)


# Several processes, forked


def test_ddp_on_two_ranks(server: Server, places: list[Place]) -> None:
    run_trial(Trial("ddp", "0@3:backward 1@5:take 1@7:step", ranks=2), server, places)


@pytest.mark.timeout(240)
def test_fsdp2_on_two_ranks_in_all_its_settings(server: Server, places: list[Place]) -> None:
    run_trial(Trial("fsdp", "0@3:backward 1@5:step 0@7:take", ranks=2), server, places)


@pytest.mark.parametrize("original", ["1", pytest.param("0", marks=pytest.mark.chaos)])
@pytest.mark.timeout(240)
def test_fsdp1_on_two_ranks(original: str, server: Server, places: list[Place]) -> None:
    run_trial(Trial(f"fsdp1:original={original}", "0@3:backward 1@5:step 0@7:take", ranks=2), server, places)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trial", [
    Trial("ddp:rehearse=1,bucket_mb=0.05", "0@2:backward 3@4:step 2@4:restore 1@5:take 0@8:step", ranks=4),
    Trial("ddp:rehearse=1", "1@1:step 2@6:backward", ranks=3),
    Trial("fsdp", "2@2:step 0@4:backward 1@7:take", ranks=3),
], ids=lambda trial: f"{trial.case} on {trial.ranks}")  # fmt: skip
def test_more_ranks_and_more_kills(trial: Trial, server: Server, places: list[Place]) -> None:
    run_trial(trial, server, places)


@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_ddp_on_three_ranks_without_a_rehearsal_says_that_it_is_not_exact(server: Server, places: list[Place]) -> None:
    trial = Trial("ddp", "0@3:backward", ranks=3)
    place = Place(trial)
    places.append(place)
    server.finish(trial.killing(place.out), place, trial.ranks)
    place.check_no_trace()
    check_lives(trial, place)
    assert "restore(rehearsal=" in place.log()


# Launched as users do


def launch(command: list[str], place: Place, *, timeout_s: float = 240) -> None:
    environ = {**os.environ, **place.environ}
    with (place.out / "log-launcher").open("w") as log:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout_s, check=False
        )
    assert done.returncode == 0, place.log()


def torchrun(ranks: int, backend: list[str], arguments: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    return [*launcher, "--max-restarts=5", *backend, str(SCRIPT), *arguments]


def check_launched(trial: Trial, server: Server, places: list[Place], backend: list[str] | None) -> None:
    """Against a reference that was forked: neither the launcher nor the way of starting may matter."""
    truth, place = Place(trial), Place(trial)
    places += [truth, place]
    server.finish(trial.arguments(truth.out, "--bare"), truth, trial.ranks)
    arguments = trial.killing(place.out)
    if backend is None:
        command = [sys.executable, str(SCRIPT), *arguments]
        for _ in trial.kills.split():
            with (place.out / "log-0").open("a") as log:
                life = subprocess.run(command, env={**os.environ, **place.environ}, stdout=log, stderr=log, check=False)
            assert life.returncode == -signal.SIGKILL, place.log()
        launch(command, place)
    else:
        if any("rdzv-id" in option for option in backend):
            del place.environ["KEEPSTEP_RUN_ID"]
        launch(torchrun(trial.ranks, backend, arguments), place)
    place.check_no_trace()
    check_lives(trial, place)
    compare(truth, place, trial, "the launched run")


@pytest.mark.timeout(240)
def test_single_process_without_any_launcher(server: Server, places: list[Place]) -> None:
    check_launched(Trial("simple:kind=fused,schedule=onecycle", "4:step"), server, places, None)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_ddp_on_two_ranks_under_torchrun_with_the_keepstep_backend(server: Server, places: list[Place]) -> None:
    backend = ["--rdzv-backend=keepstep", "--rdzv-id=exact-2"]
    check_launched(Trial("ddp", "1@4:step", ranks=2), server, places, backend)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_ddp_on_two_ranks_under_plain_torchrun(server: Server, places: list[Place]) -> None:
    backend = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=exact-plain"]
    trial = Trial("ddp", "0@4:backward", ranks=2)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        check_launched(trial, server, places, backend)
    finally:
        del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_ddp_on_four_ranks_with_a_rehearsal_under_torchrun(server: Server, places: list[Place]) -> None:
    backend = ["--rdzv-backend=keepstep", "--rdzv-id=exact-4"]
    check_launched(Trial("ddp:rehearse=1,bucket_mb=0.05", "2@4:backward", ranks=4), server, places, backend)


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("trial", [
    Trial("fsdp", "0@3:backward 1@6:step", ranks=2),
    Trial("ddp", "0@2:step 1@5:take 0@7:backward", ranks=2),
], ids=lambda trial: trial.case)  # fmt: skip
def test_more_kills_under_torchrun(trial: Trial, server: Server, places: list[Place]) -> None:
    check_launched(trial, server, places, ["--rdzv-backend=keepstep", "--rdzv-id=exact-more"])
