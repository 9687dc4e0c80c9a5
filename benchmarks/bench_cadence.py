"""How many steps four nodes capture, and how far protection is behind, at default settings and a step of 0.5 s.

    python benchmarks/bench_cadence.py --out benchmarks/results/cadence-cpu.json [--steps 120] [--width 640]

Four nodes are processes on this machine: agents, keepers, one trainer each, DDP and FSDP2, with three slots and with
two. Steps that were captured are those for which `take` was not skipped on any rank and which became complete. The lag
is the newest step that was taken, less the newest that survives a node, asked ten times a second. What bounds it is the
time of one exchange (`min_node_period_s` of the status) and the control messages beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from report import provenance, write_result

from keepstep.errors import KeeperError
from keepstep.testing.cluster import LocalCluster

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "integration" / "train_parallel.py"
POLL_S = 0.1
FIRST_STEPS = 3  # optimizer state appears, and the arena grows


def measure(kind: str, slots: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = [kind, str(options.steps), str(options.pace), "--width", str(options.width)]
    environ = {"KEEPSTEP_ARENA_SLOTS": slots, "OMP_NUM_THREADS": "1"}
    with LocalCluster(nodes=4, script=SCRIPT, arguments=arguments, environ=environ) as cluster:
        cluster.start()
        cluster.wait_step(FIRST_STEPS)
        lags, exchanges, last = [], [], 0
        while last < options.steps - 1:
            with contextlib.suppress(KeeperError, OSError):
                status = cluster.status(0)
                if status.protected_step is not None:
                    lags.append(last - status.protected_step)
                if status.min_node_period_s is not None:
                    exchanges.append(status.min_node_period_s)
            steps = [fact["step"] for fact in cluster.facts if fact["event"] == "step"]
            last = max(steps, default=0)
            time.sleep(POLL_S)
        cluster.result()
        return summary(kind, slots, list(cluster.facts), lags, exchanges)


def summary(
    kind: str, slots: str, facts: list[dict[str, Any]], lags: list[int], exchanges: list[float]
) -> dict[str, Any]:
    skipped: dict[int, str] = {}
    times: dict[int, float] = {}
    for fact in facts:
        if fact["event"] != "step" or fact["step"] < FIRST_STEPS:
            continue
        times.setdefault(fact["step"], fact["at"])
        if fact["skipped"]:
            skipped[fact["step"]] = "".join("#" if c.isdigit() else c for c in fact["skipped"])
    ordered = [times[step] for step in sorted(times)]
    return {
        "kind": kind,
        "slots": slots,
        "steps": len(times),
        "captured": len(times) - len(skipped),
        "captured_share": (len(times) - len(skipped)) / len(times),
        "skipped": dict(Counter(skipped.values()).most_common(4)),
        "step_s": statistics.median(b - a for a, b in itertools.pairwise(ordered)),
        "lag_steps_median": statistics.median(lags),
        "lag_steps_p90": sorted(lags)[int(0.9 * len(lags))],
        "exchange_s_median": statistics.median(exchanges) if exchanges else None,
    }


def describe(found: dict[str, Any]) -> str:
    return (
        f"{found['kind']}, {found['slots']} slots: {found['captured']} of {found['steps']} captured, "
        f"lag {found['lag_steps_median']:g} (p90 {found['lag_steps_p90']:g}) steps, "
        f"exchange {found['exchange_s_median'] or 0:.3f} s, step {found['step_s']:.2f} s, skipped {found['skipped']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pace", type=float, default=0.45, help="seconds of sleep in each step")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--kinds", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--slots", nargs="+", default=["3", "2"])
    options = parser.parse_args()
    body: dict[str, Any] = {"benchmark": "cadence", **provenance(), "results": []}
    for kind in options.kinds:
        for slots in options.slots:
            found = measure(kind, slots, options)
            body["results"].append(found)
            print(describe(found), flush=True)
    if options.out:
        write_result(options.out, body)


if __name__ == "__main__":
    main()
