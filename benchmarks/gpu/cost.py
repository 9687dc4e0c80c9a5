"""What keepstep's snapshots cost a training loop: the same few measurements for every workload.

Lost time is of blocks with snapshots against the blocks without around them, in one process. Snapshots that were
skipped are counted with their reasons, and complete ones by the keeper's word: a cadence that was not kept shows.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from crowd import Crowd
from limit import Ring, open_ring
from measuring import Block, Device, Saving, lost_in, median, run_block, spread, wait_for_grant, without_numbers
from results import Results, say
from sizes import Cadence, Sizes
from stages import Stages
from timeline import Timeline
from workloads import Workload

import keepstep
from keepstep import Survives

SETTLE_S = 60.0
FIRST_STEPS = 10
FLOOR = Cadence(every=2, steps=10, alone_steps=10, pairs=2)


class Saver:
    """keepstep behind a counter of steps. Every `take` is remembered until it is settled."""

    def __init__(self, snapshots: keepstep.Snapshotter) -> None:
        self.snapshots = snapshots
        self.step = 0
        self._pending: list[keepstep.PendingSnapshot] = []
        self._num_begun = 0
        self.timeline = Timeline(snapshots)
        self.stages = Stages(snapshots)

    def save(self) -> bool:
        self.step += 1
        pending = self.snapshots.take(self.step)
        self._pending.append(pending)
        self._num_begun += not pending.skipped
        return not pending.skipped

    def reason_of_first(self) -> str:
        """Why the first `take` since the last `settle` was skipped; empty when it was not."""
        return self._pending[0].reason if self._pending else "nothing was taken"

    def settle(self) -> dict[str, Any]:
        """Wait for the background work; what became of every `take` since the last time."""
        start = time.perf_counter()
        for pending in self._pending:
            pending.wait(timeout_s=max(0.0, SETTLE_S - (time.perf_counter() - start)))
        lost = [pending for pending in self._pending if pending.survives < Survives.PROCESS]
        reasons = Counter(without_numbers(pending.reason or "not complete in time") for pending in lost)
        found = {
            "requested": len(self._pending),
            "taken": self._num_begun,
            "complete": len(self._pending) - len(lost),
            "not_complete": dict(reasons.most_common(8)),
            "settle_s": time.perf_counter() - start,
        }
        self._pending, self._num_begun = [], 0
        return found

    def counters(self) -> dict[str, float]:
        """What keepstep itself counts; names that are not there in this version are left out."""
        fence, spent = getattr(self.snapshots, "_fence", None), getattr(self.snapshots, "_capture", None)
        spent = getattr(spent, "spent", None)
        found = {"waited_s": getattr(fence, "waited_s", None)}
        found |= vars(spent) if spent is not None else {}
        return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}

    def split(self) -> dict[str, Any]:
        """What is staged at this moment of each snapshot, by device; empty where nothing is split."""
        lanes = getattr(getattr(getattr(self.snapshots, "_capture", None), "lanes", None), "_lanes", {})
        return {str(device): vars(getattr(lane, "policy", None) or lane.split) for device, lane in lanes.items()}


@dataclass
class Cost:
    """One workload with a Snapshotter; each method is one measurement, written down at once."""

    workload: Workload
    device: Device
    saver: Saver
    results: Results
    key: str
    base: dict[str, int]
    """the device's memory peaks in steps before there was a Snapshotter"""
    alone_s: float
    """the median of those steps"""

    def put(self, *keys: str, value: Any) -> None:
        self.results.measure(self.key, *keys, value=value)

    def first(self) -> None:
        """The first snapshots of the run, as they come, nothing warmed up."""
        block = run_block(self.workload, self.device, FIRST_STEPS, self.saving(2))
        skipped = self.saver.reason_of_first()
        ends = self.saver.settle()
        held_s, take_s = (block.held_s()[0], block.save_s[0]) if block.save_s else (None, None)
        at = block.saved_at[0] if block.saved_at else 0
        first = {
            "skipped": skipped,
            "held_s": held_s,
            "take_s": take_s,
            "step_s": block.step_s[at],
            "growth_s": block.step_s[at] - self.alone_s,
            "all_held_s": block.held_s(),
            "all_step_s": block.step_s,
            **ends,
        }
        self.put("first", value=first)
        say(f"{self.key}: first snapshot's step {1e3 * block.step_s[at]:.1f} ms {skipped and f'(skipped: {skipped})'}")

    def cadence(self, cadence: Cadence) -> None:
        before = self.saver.counters()
        self.saver.timeline.clear()
        self.saver.stages.clear()
        blocks, alone, ends = self._interleave(cadence, self.saving(cadence.every), settle=True)
        after = self.saver.counters()
        counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
        found = {
            "every": cadence.every,
            **summarize(blocks, alone, ends),
            "counters": counters,
            "rate_bytes_s": _rate(counters),
            "timeline": self.saver.timeline.summary(),
            "stages": self.saver.stages.summary(),
            "split": self.saver.split(),
            "device_memory": self.device.memory(),
        }
        self.put("cadences", str(cadence.every), value=found)
        say(f"{self.key}: {sentence_of(found)}")

    def quiet(self, num_snapshots: int) -> None:
        """Host time of `take` and the hook with an empty launch queue: keepstep's own, nobody else's work in it."""
        take_s: list[float] = []
        hook_s: list[float] = []
        ends: list[dict[str, Any]] = []
        self.saver.stages.clear()
        for _ in range(num_snapshots):
            self.device.synchronize()
            start = time.perf_counter()
            began = self.saver.save()
            seconds = time.perf_counter() - start
            self.workload.compute()
            self.device.synchronize()
            self.workload.update()
            if began:
                take_s.append(seconds)
                hook_s.append(self.workload.hooks.seconds)
            self.workload.step()
            ends.append(self.saver.settle())
        held_s = [a + b for a, b in zip(take_s, hook_s, strict=True)]
        complete = sum(end["complete"] for end in ends)
        value = {"take": spread(take_s), "hook": spread(hook_s), "held": spread(held_s), "complete": complete}
        value["stages"] = self.saver.stages.summary()
        self.put("quiet", value=value)
        say(f"{self.key}: quiet, take and hook {1e3 * value['held'].get('median_s', 0):.3f} ms, {complete} complete")

    def limit(self, ring: Ring, size_bytes: int) -> None:
        found = ring.rate(self._largest(), size_bytes)
        self.put("limit", value=found)
        say(f"{self.key}: limit of a plain copy {found['best_bytes_s'] / 1e9:.2f} GB/s")

    def floor(self, ring: Ring, *, toy: bool) -> None:
        """A copy of as many bytes beside training, at every 2nd step, that nothing waits for."""
        size, largest = sum(tensor.nbytes for tensor in self.workload.tensors()), self._largest()
        sources = [largest] * max(1, round(size / largest.nbytes))
        cadence = Cadence(every=2, steps=4, alone_steps=2, pairs=1) if toy else FLOOR
        saving = Saving(lambda: ring.copy(sources) > 0, lambda index: index % cadence.every == 0)
        blocks, alone, _ = self._interleave(cadence, saving, settle=False)
        lost_s = [lost_in(block, alone[i], alone[i + 1]) / len(block.save_s) for i, block in enumerate(blocks)]
        value = {"bytes": len(sources) * largest.nbytes, "lost_s": statistics.fmean(lost_s), "lost_by_block_s": lost_s}
        self.put("floor", value=value)
        say(f"{self.key}: floor, a copy with no dependency loses {1e3 * value['lost_s']:.2f} ms")

    def memory(self) -> None:
        """Growth of the device's peaks since there is a Snapshotter, and the keeper's memory."""
        status = self.saver.snapshots.status()
        rank = status.ranks[0]
        now = self.device.memory()
        value = {
            "arena_bytes": rank.arena_bytes,
            "keeper_bytes": status.memory_bytes,
            "slots": len(rank.slots),
            "slot_bytes": max(slot.size_bytes for slot in rank.slots),
            "device_base": self.base,
            "device_now": now,
            "device_growth": {name: now[name] - self.base[name] for name in self.base},
            "problems": status.problems,
            "counters": status.counters,
        }
        self.put("memory", value=value)
        grown = {name: f"{size / 1e9:.2f} GB" for name, size in value["device_growth"].items()}
        say(f"{self.key}: arena {rank.arena_bytes / 1e9:.2f} GB, device grew {grown or 'not: there is none'}")

    def crowd(self, cadence: Cadence) -> None:
        """What sealing takes from other work on every core of the host, and what that work takes from training."""
        with Crowd() as crowd:
            rates: list[float] = []

            def block(saving: Saving | None) -> Block:
                before = crowd.rounds()
                found = run_block(self.workload, self.device, cadence.steps, saving)
                rates.append((crowd.rounds() - before) / found.wall_s)
                return found

            alone = [block(None)]
            blocks = [block(self.saving(cadence.every))]
            ends = [self.saver.settle()]
            alone.append(block(None))
        share = 1 - rates[1] / statistics.fmean([rates[0], rates[2]])
        value = {"workers": crowd.size, "every": cadence.every, "rounds_s": rates, "work_lost_share": share}
        self.put("crowd", value={**value, **summarize(blocks, alone, ends)})
        say(f"{self.key}: {crowd.size} busy processes beside it lose {share:.1%} of their work, every {cadence.every}")

    def _largest(self) -> torch.Tensor:
        return max(self.workload.tensors(), key=lambda tensor: tensor.nbytes)

    def saving(self, every: int) -> Saving:
        return Saving(self.saver.save, lambda index: index % every == 0)

    def _interleave(
        self, cadence: Cadence, saving: Saving, *, settle: bool
    ) -> tuple[list[Block], list[Block], list[dict[str, Any]]]:
        """A B A B ... A. Background work is over before a block without snapshots begins."""
        blocks: list[Block] = []
        ends: list[dict[str, Any]] = []
        alone = [run_block(self.workload, self.device, cadence.alone_steps)]
        for _ in range(cadence.pairs):
            blocks.append(run_block(self.workload, self.device, cadence.steps, saving))
            if settle:
                ends.append(self.saver.settle())
            alone.append(run_block(self.workload, self.device, cadence.alone_steps))
        return blocks, alone, ends


def summarize(blocks: list[Block], alone: list[Block], ends: list[dict[str, Any]]) -> dict[str, Any]:
    """Lost time, step times and held time of blocks with snapshots between blocks without; pure."""
    lost_s = [lost_in(block, alone[i], alone[i + 1]) for i, block in enumerate(blocks)]
    complete, num_steps = sum(end["complete"] for end in ends), sum(block.num_steps for block in blocks)
    alone_s = sum(block.wall_s for block in alone) / sum(block.num_steps for block in alone)
    return {
        "requested": sum(end["requested"] for end in ends),
        "taken": sum(end["taken"] for end in ends),
        "complete": complete,
        "not_complete": dict(sum((Counter(end["not_complete"]) for end in ends), Counter())),
        "settle_s": [end["settle_s"] for end in ends],
        "lost_s": sum(lost_s) / complete if complete else None,
        "lost_by_block_s": [lost / max(1, end["complete"]) for lost, end in zip(lost_s, ends, strict=True)],
        "lost_share": sum(lost_s) / (alone_s * num_steps),
        "step_alone_s": alone_s,
        "step_with_s": sum(block.wall_s for block in blocks) / num_steps,
        "steps_alone": spread([s for block in alone for s in block.step_s]),
        "steps_with": spread([s for block in blocks for s in block.step_s]),
        "take": spread([s for block in blocks for s in block.save_s]),
        "hook": spread([block.hook_s[at] for block in blocks for at in block.saved_at]),
        "held": spread([s for block in blocks for s in block.held_s()]),
        "hook_alone": spread([s for block in alone for s in block.hook_s]),
        "event_alone": spread([s for block in alone for s in block.mark_s]),
        "update_alone_s": median([s for block in alone for s in block.update_s]),
        "update_with_s": median([block.update_s[at] for block in blocks for at in block.saved_at]),
    }


def sentence_of(found: dict[str, Any]) -> str:
    lost = f"{1e3 * found['lost_s']:.2f} ms lost per snapshot" if found["lost_s"] is not None else "no snapshot"
    held = found["held"].get("median_s", 0.0)
    rate = f", {found['rate_bytes_s'] / 1e9:.1f} GB/s" if found["rate_bytes_s"] else ""
    return (
        f"every {found['every']}: {lost}, {found['complete']} of {found['requested']} complete, step "
        f"{1e3 * found['step_alone_s']:.1f} -> {1e3 * found['step_with_s']:.1f} ms, held {1e3 * held:.2f} ms{rate}"
    )


def _rate(counters: dict[str, float]) -> float | None:
    """Bytes per second while copying, by the capture's own account."""
    copied, seconds = counters.get("copied_bytes", 0.0), counters.get("copy_s", 0.0)
    return copied / seconds if copied and seconds else None


@contextmanager
def open_cost(workload: Workload, device: Device, results: Results, key: str, sizes: Sizes) -> Iterator[Cost]:
    """Warm up without keepstep, then open it as a training script does; settings come from the environment."""
    for _ in range(sizes.warm_steps):
        workload.step()
    device.synchronize()
    device.reset_peaks()
    block = run_block(workload, device, 2 * sizes.warm_steps)
    base = device.memory()
    results.measure(key, "workload", value=workload.describe())
    results.measure(key, "device", value=device.describe())
    results.measure(key, "before", value={"step_s": block.per_step_s, "steps": spread(block.step_s)})
    say(f"{key}: {workload.describe()}, step {1e3 * block.per_step_s:.1f} ms without keepstep")
    start = time.perf_counter()
    with keepstep.Snapshotter(workload.state) as snapshots:
        workload.hooks.be_last()
        opened_s = time.perf_counter() - start
        snapshots.restore()
        restored_s = time.perf_counter() - start - opened_s
        wait_for_grant(snapshots)
        prepared_s = time.perf_counter() - start - opened_s
        seconds = {"open_s": opened_s, "restore_s": restored_s, "restore_and_prepare_s": prepared_s}
        results.measure(key, "open", value=seconds)
        say(f"{key}: opened in {opened_s:.1f} s, restored in {restored_s:.1f} s, memory prepared in {prepared_s:.1f} s")
        device.reset_peaks()
        for _ in range(2):  # the fence of an optimizer is trusted once its hook was seen
            workload.step()
        yield Cost(workload, device, Saver(snapshots), results, key, base, statistics.median(block.step_s))


def measure(cost: Cost, cadences: tuple[Cadence, ...], num_quiet: int) -> None:
    """What is asked of every workload, the most important first."""
    cost.first()
    for cadence in cadences:
        cost.cadence(cadence)
    if num_quiet:
        cost.quiet(num_quiet)
    cost.memory()


def measure_with_limits(cost: Cost, cadences: tuple[Cadence, ...], sizes: Sizes, *, toy: bool) -> None:
    """The same between the limit of this machine's link and the floor of a copy beside training."""
    with open_ring(sizes.ring_bytes, cost.device) as ring:
        cost.limit(ring, sizes.limit_bytes)
        measure(cost, cadences, sizes.quiet_snapshots)
        cost.floor(ring, toy=toy)


def state_dict_s(workload: Workload) -> float:
    """Seconds that asking every part for its `state_dict()` takes; median of several."""
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        for part in workload.state.values():
            part.state_dict()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def grow_batch(workload: Any, device: Device, start: int, least_s: float) -> int:
    """The batch at which a step takes at least `least_s`."""
    batch = start
    for _ in range(3):
        workload.step()
        seconds = run_block(workload, device, 3).per_step_s
        say(f"batch {batch}: step {seconds:.3f} s")
        if seconds >= least_s:
            break
        batch = int(batch * 1.1 * least_s / seconds) + 1
        workload.set_batch(batch)
    if device.is_cuda:
        torch.cuda.empty_cache()
    return batch
