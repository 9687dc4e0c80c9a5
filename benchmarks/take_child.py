"""One contender of `bench_take.py`, measured in a process of its own: `python take_child.py PLAN.json RESULT.json`.

Measured here: the time that the loop is held per snapshot, the loop's slow-down per snapshot in units of one
memcpy of the state, and the memory that holds the snapshots. Nothing is judged here; samples go out raw.
"""

from __future__ import annotations

import ctypes
import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from take_contenders import OPENERS, Saver
from take_memory import measure_memory
from take_plan import Plan
from take_workload import Workload

WARM_STEPS = 3
"""the first update creates the optimizer's state, the next ones settle allocator and caches"""
ALONE_STEPS = 10
MEMCPY_REPEATS = 7
UNFINISHED_S = 0.005
"""background work that ends later than this after its block was not wholly seen by the block"""


def measure(plan: Plan) -> dict[str, Any]:
    torch.set_num_threads(1)
    workload = Workload(size_bytes=plan.size_bytes, num_tensors=plan.num_tensors, num_matmuls=plan.num_matmuls)
    opened = time.perf_counter()
    with OPENERS[plan.contender](workload, Path(plan.directory), plan.wait_s) as saver:
        result: dict[str, Any] = {"plan": asdict(plan), "open_s": time.perf_counter() - opened}
        for _ in range(WARM_STEPS):
            workload.compute()
            workload.update()
        result["state_bytes"] = sum(tensor.nbytes for tensor in workload.tensors())
        result["state_tensors"] = len(workload.tensors())
        bench = _Bench(workload, saver, plan)
        if plan.num_snapshots:
            result["held"] = bench.held()
        if plan.num_pairs:
            result["memcpy_s"] = measure_memcpy(workload.tensors())
            result["slowdown"] = [bench.slowdown(threads) for threads in (1, 2)]
        keeper = saver.keeper()
        if keeper is not None:
            result["memory"] = measure_memory(keeper, workload.tensors())
    return result


class _Bench:
    """Steps only grow, over all measures of one process: a saver never sees the same step twice."""

    def __init__(self, workload: Workload, saver: Saver, plan: Plan) -> None:
        self._workload, self._saver, self._plan = workload, saver, plan
        self._step = 0

    def held(self) -> dict[str, Any]:
        """How long the loop stands still for a snapshot: `save`, the fence, and hooks before the next update."""
        alone = [self._plain_step() for _ in range(ALONE_STEPS)]
        samples: list[dict[str, float]] = []
        skips: list[str] = []
        for _ in range(self._plan.num_snapshots):
            start = time.perf_counter()
            skipped = self._save()
            call_s = time.perf_counter() - start
            self._workload.compute()
            fence_s = _seconds(self._saver.fence)
            update = self._workload.update()
            for _ in range(self._plan.steps_between - 1):
                self._plain_step()
            settle_s = self._settle()
            if skipped is not None:
                skips.append(skipped)
                continue
            samples.append(
                {
                    "held_s": call_s + fence_s + update.wait_s,
                    "call_s": call_s,
                    "fence_s": fence_s + update.wait_s,
                    "update_s": update.total_s,
                    "settle_s": settle_s,
                }
            )
        return {"samples": samples, "skips": skips, "update_alone_s": alone}

    def slowdown(self, threads: int) -> dict[str, Any]:
        """Blocks of the same steps with one snapshot and with none, in pairs, each order as often as the other."""
        torch.set_num_threads(threads)
        self._plain_step()
        pairs: list[dict[str, float]] = []
        skips: list[str] = []
        for index in range(self._plan.num_pairs):
            gc.collect()
            seconds: dict[bool, float] = {}
            settle_s = 0.0
            for with_snapshot in (False, True) if index % 2 == 0 else (True, False):
                start = time.perf_counter()
                skipped = self._save() if with_snapshot else None
                for _ in range(self._plan.block_steps):
                    self._workload.compute()
                    self._saver.fence()
                    self._workload.update()
                seconds[with_snapshot] = time.perf_counter() - start
                settle_s = max(settle_s, self._settle())
                if skipped is not None:
                    skips.append(skipped)
                    seconds.clear()
                    break
            if seconds:
                pairs.append({"with_s": seconds[True], "without_s": seconds[False], "settle_s": settle_s})
        torch.set_num_threads(1)
        num_unfinished = sum(pair["settle_s"] > UNFINISHED_S for pair in pairs)
        return {"threads": threads, "pairs": pairs, "skips": skips, "num_unfinished": num_unfinished}

    def _save(self) -> str | None:
        self._step += 1
        return self._saver.save(self._step)

    def _settle(self) -> float:
        settle_s = _seconds(self._saver.settle)
        self._saver.discard()
        return settle_s

    def _plain_step(self) -> float:
        self._workload.compute()
        return self._workload.update().total_s


def measure_memcpy(tensors: list[torch.Tensor]) -> float:
    """Seconds for one thread to copy the whole state into pages that are already there; median of several."""
    sources = [tensor.numpy() for tensor in tensors]
    targets = [np.ones_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    return statistics.median(_seconds(copy) for _ in range(MEMCPY_REPEATS))


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _die_with_parent() -> None:
    """A benchmark that was killed must not leave its child training on."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    plan_file, result_file = (Path(argument) for argument in sys.argv[1:3])
    plan = Plan(**json.loads(plan_file.read_text()))
    result_file.write_text(json.dumps(measure(plan)))


if __name__ == "__main__":
    main()
