"""From a keeper's death to the next protected version, in steps and seconds, with two and with three slots.

    python benchmarks/bench_keeper_death.py --out benchmarks/results/keeper-death-cpu.json [--kills 9]

Four nodes on this machine train the GPT of the demo and survive the loss of two nodes. The keepers of node ranks 1, 0
and 3 are killed in turn: one that only takes part, the coordinator, and the one that gives way to all others when
links are made. Protection is back when a version newer than the last step before the kill is protected and all links
are up, as the coordinator reports (for the coordinator itself: node rank 1).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from report import REPOSITORY, provenance, write_result

from keepstep.control.status import fetch_status
from keepstep.errors import Error
from keepstep.testing.cluster import LocalCluster
from keepstep.types import Status

SCRIPT = REPOSITORY / "examples" / "gpt.py"
NODES, LOSSES = 4, 2
VICTIMS = (1, 0, 3)
DEADLINE_S = 60.0
POLL_S = 0.02
WARM_UP_STEPS = 5
PAUSE_S = (2.5, 3.5)  # of undisturbed training before each kill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kills", type=int, default=9, help="for each number of slots")
    arguments = parser.parse_args()
    body: dict[str, Any] = {"benchmark": "keeper_death", **provenance()}
    body["rows"] = [deaths(slots, kills=arguments.kills) for slots in (2, 3)]
    for row in body["rows"]:
        print(
            f"{row['slots']} slots, {row['step_s']:.2f} s per step: protected again after {row['steps']:g} steps, "
            f"{row['seconds']:.2f} s (medians of {len(row['kills'])}; most: {row['most_steps']}, "
            f"{row['most_seconds']:.2f} s)"
        )
    if arguments.out:
        write_result(arguments.out, body)


def deaths(slots: int, *, kills: int) -> dict[str, Any]:
    chance = random.Random(slots)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "steps.jsonl"
        environ = {"KEEPSTEP_PARITY_LOSSES": str(LOSSES), "KEEPSTEP_ARENA_SLOTS": str(slots)}
        arguments = ["--steps=1000000", "--batch=4", f"--log-file={log}"]
        with LocalCluster(nodes=NODES, script=SCRIPT, arguments=arguments, environ=environ) as cluster:
            cluster.start()
            _poll(lambda: _last_step(log) >= WARM_UP_STEPS, "the first steps")
            results, paces = [], []
            for number in range(kills):
                step, started = _last_step(log), time.monotonic()
                time.sleep(chance.uniform(*PAUSE_S))
                paces.append((time.monotonic() - started) / max(1, _last_step(log) - step))
                results.append(_kill(cluster, log, VICTIMS[number % len(VICTIMS)]))
    return {
        "slots": slots, "step_s": statistics.median(paces),
        "steps": statistics.median(one["steps"] for one in results),
        "seconds": statistics.median(one["seconds"] for one in results),
        "most_steps": max(one["steps"] for one in results),
        "most_seconds": max(one["seconds"] for one in results), "kills": results,
    }  # fmt: skip


def _kill(cluster: LocalCluster, log: Path, victim: int) -> dict[str, Any]:
    observer = 0 if victim else 1
    _poll(lambda: _is_covered(cluster, observer, newer_than=-1), "protection before the kill")
    step, started = _last_step(log), time.monotonic()
    cluster.node(victim).kill_keeper()
    _poll(lambda: _is_covered(cluster, observer, newer_than=step), "protection after the kill")
    return {"node_rank": victim, "seconds": time.monotonic() - started, "steps": _last_step(log) - step}


def _is_covered(cluster: LocalCluster, observer: int, *, newer_than: int) -> bool:
    try:
        status: Status = fetch_status(cluster.node(observer).identity, timeout_s=1.0)
    except Error:
        return False
    protected = status.protected_step
    return protected is not None and protected > newer_than and all(peer.up for peer in status.group)


def _last_step(log: Path) -> int:
    return max((event["step"] for event in _events(log) if event["event"] == "step"), default=-1)


def _events(log: Path) -> Iterator[dict[str, Any]]:
    """The last events of rank 0; a line that is being written is left out."""
    try:
        lines = log.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    yield from (json.loads(line) for line in lines[-20:])


def _poll(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
