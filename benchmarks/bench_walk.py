"""What `take` costs the training thread for each tensor of the state, when not a byte is copied inside it.

    python benchmarks/bench_walk.py --out benchmarks/results/walk-cpu.json      about a minute
    python benchmarks/bench_walk.py --quick                                     does it run at all?

A model of many linear layers with AdamW on the CPU; every tensor is copied behind `take`. Beside it in the same loop
`state_dict()` of model and optimizer, and `take` of a state that is known to move, which is checked in full each
time. Caches are cold: a large tensor is written before each. Figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from granted import wait_for_grant
from report import provenance, write_result
from rich.console import Console
from rich.table import Table

import keepstep
from keepstep.config import TakeConfig
from keepstep.testing.run import LocalRun
from keepstep.trainer.plan import state_planner
from keepstep.trainer.plan.plan_cache import SETTLED_AFTER

TARGET_S = 0.5e-6
"""for each tensor"""
SETTLE_S = 20.0


class Training:
    def __init__(self, parameters: int) -> None:
        layers = [torch.nn.Linear(64, 64) for _ in range(parameters // 2)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.state = {"model": self.model, "optimizer": self.optimizer}

    @property
    def num_tensors(self) -> int:
        return 4 * sum(1 for _ in self.model.parameters())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


def measure(parameters: int, snapshots: int, *, unstable: bool) -> dict[str, Any]:
    training, junk = Training(parameters), torch.zeros(30_000_000)
    took: list[float] = []
    asked: list[float] = []
    state_planner.SMALL_BYTES = 0  # every tensor is copied behind `take`
    with LocalRun() as run:
        config = run.config(take=TakeConfig(fingerprint="off"))
        with keepstep.Snapshotter(training.state, config) as keeper:
            keeper._planner.plans.unstable = unstable
            keeper.restore()
            wait_for_grant(keeper)
            for step in range(SETTLED_AFTER + 2 + snapshots):
                training.optimizer.step()
                junk.add_(1)
                asked_s, _ = timed(lambda: [part.state_dict() for part in training.state.values()])
                junk.add_(1)
                take_s, taken = timed(lambda step=step: keeper.take(step))  # type: ignore[misc]
                if taken.skipped:
                    raise SystemExit(f"step {step} was skipped: {taken.reason}")
                taken.wait(timeout_s=SETTLE_S)
                if step >= SETTLED_AFTER + 2:
                    took.append(take_s)
                    asked.append(asked_s)
    tensors = training.num_tensors
    return {
        "tensors": tensors,
        "take_s": statistics.median(took),
        "take_quartiles_s": statistics.quantiles(took, n=4),
        "per_tensor_s": statistics.median(took) / tensors,
        "state_dict_s": statistics.median(asked),
        "of_state_dict": statistics.median(took) / statistics.median(asked),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    origin = provenance()
    sizes = (40,) if arguments.quick else (292, 2_500, 10_000)
    snapshots = 3 if arguments.quick else 25
    found = {
        name: [measure(size, snapshots, unstable=unstable) for size in sizes]
        for name, unstable in (("spot check", False), ("full check", True))
    }
    table = Table("check", "tensors", "take, ms", "per tensor, us", "of state_dict()", "asked, us")
    for name, rows in found.items():
        for row in rows:
            table.add_row(
                name, f"{row['tensors']:,}", f"{1e3 * row['take_s']:.2f}", f"{1e6 * row['per_tensor_s']:.2f}",
                f"{row['of_state_dict']:.2f}", f"{1e6 * TARGET_S:.1f}" if name == "spot check" else "",
            )  # fmt: skip
    Console().print(table)
    if arguments.out:
        write_result(arguments.out, {**origin, "target_per_tensor_s": TARGET_S, "take": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
