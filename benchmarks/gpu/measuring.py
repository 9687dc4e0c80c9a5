"""Time, without disturbing it: blocks of steps with the device synchronised only at their ends.

`torch.cuda.synchronize()` waits for every stream, so a block with snapshots pays for copies that outlast its last step.
Step times come from events between the steps, read after the block.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from workloads import Workload

from keepstep.trainer.snapshotter import Snapshotter

Mark = torch.cuda.Event | float


class Device:
    """A GPU, or the CPU in its place, behind what measuring needs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def mark(self) -> Mark:
        """A point in the work that was issued so far."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Between each two neighbours; all of them must have been passed."""
        pairs = itertools.pairwise(marks)
        if not self.is_cuda:
            return [float(end) - float(start) for start, end in pairs]  # type: ignore[arg-type]
        return [start.elapsed_time(end) / 1000 for start, end in pairs]  # type: ignore[union-attr]

    def reset_peaks(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Peaks since `reset_peaks`, and what the driver has given to all processes; empty on the CPU."""
        if not self.is_cuda:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "used_bytes": total - free,
        }

    def describe(self) -> dict[str, Any]:
        if not self.is_cuda:
            return {"device": "cpu", "torch": torch.__version__}
        found = torch.cuda.get_device_properties(0)
        return {
            "device": found.name,
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }


@dataclass
class Block:
    """Steps that were timed together. `hook_s` and the like are by step, `save_s` by snapshot."""

    num_steps: int = 0
    wall_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    hook_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    mark_s: list[float] = field(default_factory=list)
    """host time of recording one event: what a full launch queue alone would cost a call in this place"""
    save_s: list[float] = field(default_factory=list)
    saved_at: list[int] = field(default_factory=list)
    """indexes of the steps that began with a snapshot; skipped ones count neither here nor in `save_s`"""

    @property
    def per_step_s(self) -> float:
        return self.wall_s / self.num_steps

    def held_s(self) -> list[float]:
        """Per snapshot: the call, and the hook before the update that follows it."""
        return [save_s + self.hook_s[at] for save_s, at in zip(self.save_s, self.saved_at, strict=True)]


@dataclass(frozen=True)
class Saving:
    """What a block does besides training: `save` before due steps, `fence` before each update."""

    save: Callable[[], bool]
    """whether it began: a saver may skip"""
    is_due: Callable[[int], bool]
    fence: Callable[[], None] | None = None


Going = Callable[[int], bool]
"""given the number of steps so far: whether to go on"""


def run_block(workload: Workload, device: Device, going: Going | int, saving: Saving | None = None) -> Block:
    """The snapshot is at the start of a step: what it costs falls into steps of the same block."""
    goes_on: Going = going if callable(going) else lambda done: done < going
    block = Block()
    gc.collect()
    device.synchronize()
    marks = [device.mark()]
    start = time.perf_counter()
    while goes_on(block.num_steps):
        if saving is not None and saving.is_due(block.num_steps):
            before = time.perf_counter()
            if saving.save():
                block.save_s.append(time.perf_counter() - before)
                block.saved_at.append(block.num_steps)
        workload.step(saving.fence if saving is not None else None)
        before = time.perf_counter()
        marks.append(device.mark())
        block.mark_s.append(time.perf_counter() - before)
        block.hook_s.append(workload.hooks.seconds)
        block.update_s.append(workload.update_s)
        block.num_steps += 1
    device.synchronize()
    block.wall_s = time.perf_counter() - start
    block.step_s = device.seconds(marks)
    return block


def lost_in(block: Block, before: Block, after: Block) -> float:
    """Seconds that `block` took beyond the same number of steps in the blocks around it."""
    alone = (before.wall_s + after.wall_s) / (before.num_steps + after.num_steps)
    return block.wall_s - block.num_steps * alone


def spread(values: Sequence[float]) -> dict[str, float]:
    """The distribution in a few numbers; p99 of fewer than a hundred values is the largest."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median_s": statistics.median(ordered),
        "p99_s": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max_s": ordered[-1],
        "mean_s": statistics.fmean(ordered),
    }


def without_numbers(reason: str) -> str:
    """To count reasons by."""
    return "".join("#" if character.isdigit() else character for character in reason)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def wait_for_grant(snapshots: Snapshotter, timeout_s: float = 300.0) -> bool:
    """Wait until the first `take` will be granted: `restore()` leaves the memory to the background."""
    deadline = time.monotonic() + timeout_s
    memory = snapshots._memory
    while time.monotonic() < deadline:
        view = memory.view
        grant = view.arena.grant() if view is not None and not memory.busy else None
        if grant is not None and grant.incarnation == snapshots._link.incarnation:
            return True
        time.sleep(0.01)
    return False
