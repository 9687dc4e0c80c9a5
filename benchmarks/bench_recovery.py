"""From a node's death to the next step, under torchrun, with the share of each phase.

    python benchmarks/bench_recovery.py --out benchmarks/results/recovery-cpu.json [--quick]

Four nodes on this machine, one rank each, AdamW state that only one rank has (as FSDP shards are); a node is killed
and a replacement started at once. Phases: detect (until the trainers on the other nodes are stopped), restart
(rendezvous, new processes, `import torch`, registration), plan, bring (fetch, rebuild, verify), load (into the live
tensors), step (until the first step has ended).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from report import REPOSITORY, provenance, write_result

from keepstep.testing.cluster import LocalCluster

SCRIPT = REPOSITORY / "tests" / "integration" / "cluster_trainer.py"
PHASES = ("detect", "restart", "plan", "bring", "load", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    body: dict[str, Any] = {"benchmark": "recovery", **provenance()}
    sizes = [64] if arguments.quick else [256, 1024, 2048]
    body["rows"] = [recovery(size, losses=1 if arguments.quick else 2) for size in sizes]
    for row in body["rows"]:
        shares = ", ".join(f"{phase} {row['phases'][phase]:.2f}" for phase in PHASES)
        print(f"{row['total_mb']:5d} MB: {row['seconds']:.1f} s from the kill to the next step: {shares}")
    if arguments.out:
        write_result(arguments.out, body)


def recovery(total_mb: int, *, losses: int) -> dict[str, Any]:
    """`losses`: nodes killed one after the other in one run."""
    found = []
    with LocalCluster(nodes=4, script=SCRIPT, arguments=["100000", "0.05", str(total_mb / 4)]) as cluster:
        for number in range(losses):
            if number == 0:
                cluster.train(until=3)
            _wait_protected(cluster, losses)
            found.append(_lose(cluster, 1 + number))
    return {
        "total_mb": total_mb, "rounds": losses,
        "seconds": statistics.median(sum(one.values()) for one in found),
        "phases": {phase: statistics.median(one[phase] for one in found) for phase in PHASES},
    }  # fmt: skip


def _wait_protected(cluster: LocalCluster, patience: int) -> None:
    deadline = time.monotonic() + 120 * patience
    last = max((fact["step"] for fact in cluster.facts if fact["event"] == "step"), default=-1)
    while time.monotonic() < deadline:
        status = cluster.status(0)
        if status.protected_step is not None and status.protected_step > last:
            return
        time.sleep(0.2)
    raise TimeoutError("nothing was protected")


def _lose(cluster: LocalCluster, number: int) -> dict[str, float]:
    old = cluster.status(0).incarnation
    killed = time.time()
    cluster.node(number).kill()
    cluster.replace(number)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        facts = [fact for fact in cluster.facts if fact["incarnation"] > old]
        stepped = [f["at"] for f in facts if f["event"] == "step"]
        if stepped and len({f["rank"] for f in facts if f["event"] == "restored"}) == 4:
            break
        time.sleep(0.1)
    else:
        raise TimeoutError("no step after the loss")
    restored = max(f["at"] for f in facts if f["event"] == "restored")
    events = _events(cluster)

    def last(event: str) -> float:
        return max((at for name, at in events if name == event and killed < at < min(stepped)), default=killed)

    marks = [killed, last("trainer ended"), last("incarnation opens"), last("plan"), last("restore decided"), restored,
             min(stepped)]  # fmt: skip
    ordered = [max(marks[: i + 1]) for i in range(len(marks))]
    return {phase: ordered[i + 1] - ordered[i] for i, phase in enumerate(PHASES)}


def _events(cluster: LocalCluster) -> list[tuple[str, float]]:
    found = []
    for node in cluster.nodes:
        path = node.identity.directory / "keeper.log"
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                found.append((entry["event"], entry["time"]))
    return found


if __name__ == "__main__":
    main()
