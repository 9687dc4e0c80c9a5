"""What snapshots cost on one GPU, in four parts of a few minutes, into one results file.

    PYTHONPATH=src:.carry python3 benchmarks/gpu/run.py --part 1 --device cuda --out gpu.json     one H200
    python benchmarks/gpu/run.py --part 1 --device cpu --out /tmp/toy.json           does it run at all?

1  GPT of 1.42 B parameters, 17.0 GB of state: lost time, step times, held time, memory, link; other ways beside it
2  a model of 42 GB, and one of 10,000 small tensors
3  SIGKILL in mid-capture, twenty times, restored bit for bit; the restore of 17 GB
4  parity on the device; shares of a replica on eight nodes; poisoned tensors that never mix steps

Every measurement runs in a process of its own with a time box and is written down when it ends. Targets are printed
last, as met or missed. The exit status is 1 when something of keepstep's could not be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import kills
from children import Bench, private_run, scratch_directory
from poison import run_poison
from results import Results, say
from sizes import Task
from table import judge, print_part

PARITY = Path(__file__).with_name("parity.py")
KEEPSTEP_S = 330.0
CONTENDERS = {
    "copy-and-wait": ("", 70.0),
    "dcp-pinned": ("", 90.0),
    "dcp-thread": ("", 90.0),
    "torch_checkpointing": ("torch_checkpointing", 90.0),
    "lm-resiliency": ("lm_resiliency", 90.0),
    "dlrover": ("dlrover", 60.0),
    "torchsnapshot": ("torchsnapshot", 90.0),
}
"""in this order: the package it needs besides torch, and its time box in seconds"""
TOY_CONTENDERS = ("copy-and-wait", "dcp-thread")
"""in one process: loading torch takes longer than they do"""
CONTENDER_ROOM_BYTES = 40_000_000_000
SHARED = {
    "KEEPSTEP_REPLICATED": "model,optimizer",
    "KEEPSTEP_PARITY_REPLICATED": "share",
    "KEEPSTEP_PARITY_LOSSES": "1",
}


def run_cost(bench: Bench) -> None:
    if bench.wants("keepstep"):
        _with_keeper(bench, "keepstep", KEEPSTEP_S, {"KEEPSTEP_ARENA_SLOTS": "3"})
    if bench.wants("every-step"):
        _with_keeper(bench, "every-step", 120.0, {"KEEPSTEP_ARENA_SLOTS": "4"})
    if bench.task.toy:
        _contend(bench, " ".join(TOY_CONTENDERS), 60.0)
        return
    for name, (package, box_s) in CONTENDERS.items():
        if not (bench.wants(name) or bench.wants("contenders")):
            continue
        if package and importlib.util.find_spec(package) is None:
            bench.results.measure("contenders", name, "error", value="not installed")
            continue
        if bench.left_s() < box_s / 3:
            bench.results.measure("contenders", name, "error", value=f"not begun: {bench.left_s():.0f} s were left")
            continue
        _contend(bench, name, box_s)


def _contend(bench: Bench, name: str, box_s: float) -> None:
    with scratch_directory(0 if bench.task.toy else CONTENDER_ROOM_BYTES) as scratch:
        task = bench.give("contender", name, box_s=box_s, scratch=scratch)
        bench.run(task, {}, "contenders", name)


def run_models(bench: Bench) -> None:
    if bench.wants("large"):
        _with_keeper(bench, "large", 280.0, {"KEEPSTEP_ARENA_SLOTS": "2"})
    if bench.wants("small"):
        _with_keeper(bench, "small", 150.0, {"KEEPSTEP_ARENA_SLOTS": "3"})


def run_parity_and_races(bench: Bench) -> None:
    if bench.wants("share"):
        _with_keeper(bench, "share", 180.0, {"KEEPSTEP_ARENA_SLOTS": "3", **SHARED})
        beside = bench.results.of_part(1).get("keepstep", {}).get("cadences", {}).get("1")
        bench.results.measure("share", "unprotected_every_step", value=beside)
    if bench.wants("poison"):
        run_poison(bench)
    if bench.wants("parity"):
        _run_parity(bench)


def _run_parity(bench: Bench) -> None:
    """Its own script with its own results and targets: `parity.py --device D --out FILE`, 0 if all are met."""
    if not PARITY.exists():
        bench.results.measure("parity", "missing", value=f"{PARITY.name} is not there")
        return
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "parity.json"
        command = [sys.executable, str(PARITY), "--device", bench.task.device, "--out", str(out)]
        try:
            status = subprocess.run(command, timeout=max(10.0, bench.left_s()), check=False).returncode
        except subprocess.TimeoutExpired:
            status = -1
        bench.results.measure("parity", "exit_status", value=status)
        if out.exists():
            bench.results.measure("parity", "results", value=json.loads(out.read_text(encoding="utf-8")))


def _with_keeper(bench: Bench, name: str, box_s: float, environ: dict[str, str]) -> None:
    """What is set in the environment of this script holds: tuning needs no edit."""
    own = {key: value for key, value in environ.items() if key not in os.environ}
    with private_run(bench.results, name) as run:
        bench.run(bench.give(name, box_s=box_s), {**run.environ, **own}, name)


PARTS: dict[int, Callable[[Bench], None]] = {1: run_cost, 2: run_models, 3: kills.run_part, 4: run_parity_and_races}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=PARTS, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="small sizes, a few seconds; implied on the cpu")
    parser.add_argument("--out", default="", help="results file; parts that it holds already are kept")
    parser.add_argument(
        "--only", nargs="+", default=[], help="measurements of the part: keepstep, contenders, large ..."
    )
    parser.add_argument(
        "--every", nargs="+", type=int, default=[], help="part 1: only these cadences, and nothing beside them"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing runs longer than this after the start")
    parser.add_argument("--commit", default="", help="where there is no git to ask: the commit of the working tree")
    options = parser.parse_args()
    options.toy = options.toy or options.device == "cpu"
    return options


def main() -> int:
    options = parse_arguments()
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory:
        path = Path(options.out or f"{directory}/results.json").resolve()
        results = Results(path, options.part)
        settings = {key: value for key, value in os.environ.items() if key.startswith("KEEPSTEP_")}
        results.begin(commit=options.commit, settings=settings)
        task = Task(
            name="", part=options.part, device=options.device, toy=options.toy, out=str(path), deadline=deadline,
            every=tuple(options.every),
        )  # fmt: skip
        PARTS[options.part](Bench(results, task, frozenset(options.only)))
        verdicts = judge(options.part, results)
        results.put("targets", value=[verdict.__dict__ for verdict in verdicts])
        results.put("load_after", value=os.getloadavg())
        failed = print_part(options.part, results, verdicts)
        if options.out:
            say(f"written to {path}")
        if options.toy:
            say("A toy size: this says that the benchmark runs, not what a snapshot costs.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
