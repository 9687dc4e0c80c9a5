"""What a snapshot costs the training loop, against the other ways of saving the same state, on one CPU machine.

    python benchmarks/bench_take.py --out benchmarks/results/take-cpu.json       about twenty minutes, idle machine
    python benchmarks/bench_take.py --quick                                      a toy size, under half a minute

Each contender runs in a process of its own, in rounds, each round in another order. Every target is printed as
pass, miss or not measured; the exit status is 1 when something could not be measured, whatever the figures say.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import provenance, write_result
from rich.console import Console
from take_plan import CONTENDERS, Plan
from take_verdict import judge, print_tables, summarize

CHILD = Path(__file__).with_name("take_child.py")
LEASE_S = 5
"""a keeper whose trainer was killed with the benchmark goes after this"""
GRACE_S = 5.0
"""processes of a child that has ended may take this long to follow it"""
LOG_TAIL_CHARS = 2000


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=140 if not sys.stdout.isatty() else None, highlight=False)
    body: dict[str, Any] = {**provenance(), "options": vars(options)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contenders}
    for round_index in range(options.rounds):
        for name in rotated(options.contenders, round_index):
            start = time.perf_counter()
            run = run_contender(name, options)
            runs[name].append(run)
            outcome = run.get("error", f"done in {time.perf_counter() - start:.0f} s")
            console.print(f"round {round_index + 1}/{options.rounds}  {name}: {outcome}", markup=False)
    summary = summarize(runs)
    verdicts = judge(summary)
    if options.out:
        body.update(load_after=os.getloadavg(), verdicts=[asdict(verdict) for verdict in verdicts], summary=summary)
        write_result(Path(options.out), {**body, "runs": runs})
        console.print(f"written to {options.out}", markup=False)
    print_tables(console, summary, verdicts)
    if options.quick:
        console.print("A toy size: this says that the benchmark runs, not what a snapshot costs.")
    return 1 if any(verdict.outcome == "not measured" for verdict in verdicts) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=1.0, help="state in all: parameters and moments (10^9 bytes)")
    parser.add_argument("--tensors", type=int, default=1000, help="tensors in all, 0-dim step counts included")
    parser.add_argument("--snapshots", type=int, default=100, help="per round, keepstep; held time")
    parser.add_argument("--peer-snapshots", type=int, default=5, help="per round, each peer: one takes seconds")
    parser.add_argument("--steps-between", type=int, default=2, help="updates from one snapshot to the next")
    parser.add_argument("--matmuls", type=int, default=20, help="compute per step: products of 1024 x 1024 matrices")
    parser.add_argument("--pairs", type=int, default=6, help="per round, keepstep: blocks with and without a snapshot")
    parser.add_argument("--peer-pairs", type=int, default=2, help="the same for each peer")
    parser.add_argument("--rounds", type=int, default=2, help="passes over all contenders, each in another order")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="all, unless named")
    parser.add_argument("--wait-s", type=float, default=60.0, help="deadline for one snapshot's background work")
    parser.add_argument("--child-s", type=float, default=900.0, help="deadline for one contender in one round")
    parser.add_argument("--quick", action="store_true", help="0.05 GB, 5 snapshots, one round: does it run at all?")
    parser.add_argument("--out", default="", help="result file, by custom in benchmarks/results/")
    options = parser.parse_args()
    if options.quick:
        toy = {"size_gb": 0.05, "tensors": 100, "snapshots": 5, "peer_snapshots": 2, "matmuls": 1, "pairs": 2}
        vars(options).update(toy, peer_pairs=0, rounds=1, child_s=60.0)
    # No target names these, and loading torch once more for each would take a quick run over half a minute.
    left_out = {"dcp-async-staging", "torch-save"} if options.quick else set()
    options.contenders = options.contenders or [name for name in CONTENDERS if name not in left_out]
    return options


def rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def run_contender(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The child's measurements, or `error` with the reason why there are none."""
    needed = CONTENDERS[name]
    if needed and importlib.util.find_spec(needed) is None:
        return {"error": "not installed"}
    with scratch_directory(options.size_gb) as scratch:
        tag = f"bench-{uuid.uuid4().hex}"
        (scratch / "saves").mkdir()
        plan_file, result_file, log_file = scratch / "plan.json", scratch / "result.json", scratch / "log.txt"
        plan_file.write_text(json.dumps(asdict(make_plan(name, options, scratch / "saves"))))
        with open(log_file, "wb") as log:
            child = subprocess.Popen(
                [sys.executable, str(CHILD), str(plan_file), str(result_file)],
                env=child_environment(name, tag, scratch),
                cwd=scratch,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            status = child.wait(options.child_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            left_behind = end_all(child, tag)
        if status == 0:
            return {**json.loads(result_file.read_text()), "left_behind": left_behind}
        log_tail = log_file.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        if status is None:
            reason = f"no end after {options.child_s:.0f} s"
        elif status < 0:
            reason = f"killed by {signal.Signals(-status).name}"
        else:
            reason = log_tail.strip().rpartition("\n")[2] or f"exit status {status}"
        return {"error": f"failed: {reason}", "log": log_tail, "left_behind": left_behind}


def make_plan(name: str, options: argparse.Namespace, directory: Path) -> Plan:
    ours = name.startswith("keepstep")
    num_snapshots = options.snapshots if ours else options.peer_snapshots
    return Plan(
        contender=name,
        size_bytes=int(options.size_gb * 1e9),
        num_tensors=options.tensors,
        num_matmuls=options.matmuls,
        num_snapshots=0 if name == "keepstep-copy-alone" else num_snapshots,
        steps_between=options.steps_between,
        num_pairs=options.pairs if ours else options.peer_pairs,
        block_steps=4 if ours or options.quick else 8,
        wait_s=options.wait_s,
        directory=str(directory),
    )


def child_environment(name: str, tag: str, scratch: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KEEPSTEP_")}
    own = {"KEEPSTEP_RUN_ID": tag, "KEEPSTEP_RUNTIME_DIR": f"{scratch}/run", "KEEPSTEP_KEEPER_LEASE_S": str(LEASE_S)}
    if name == "dlrover":
        own["TORCHELASTIC_RUN_ID"] = tag  # names its sockets and its segment in /dev/shm
    return inherited | own


@contextmanager
def scratch_directory(size_gb: float) -> Iterator[Path]:
    """On tmpfs where it has room for three states, so that no contender is measured by a disk."""
    shared_memory = Path("/dev/shm")
    roomy = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > 3e9 * size_gb
    parent = str(shared_memory) if roomy else None
    with tempfile.TemporaryDirectory(prefix="kb-", dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def end_all(child: subprocess.Popen[bytes], tag: str) -> list[str]:
    """End the child and whatever it started. Names of those that had not ended by themselves in time."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    deadline = time.monotonic() + GRACE_S
    while (found := tagged_processes(tag)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return list(found.values())


def tagged_processes(tag: str) -> dict[int, str]:
    """Processes that carry this child's run id in their environment: its keeper, its workers."""
    needle = f"KEEPSTEP_RUN_ID={tag}\0".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if needle in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # ended meanwhile, or of another user
    return found


if __name__ == "__main__":
    sys.exit(main())
