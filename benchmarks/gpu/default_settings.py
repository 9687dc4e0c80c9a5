"""Snapshots at default settings, as users write the loop: how many of those asked for are taken, and what they cost.

    PYTHONPATH=.carry python3 benchmarks/gpu/default_settings.py --tree src --tree before=OTHER/src --out out.json
    python benchmarks/gpu/default_settings.py --tree src --device cpu       small, to see that it runs

Uses keepstep's public API only, so that any two versions can be measured side by side in one run. For each tree, three
processes in this order:

first     a first start: when `restore()` returns, when snapshots begin, what the first steps cost; then a snapshot at
          every 2nd step in a loop that never waits for its device; killed at its end
again     restores what `first` left; then the same in a loop that reads its loss one step late
late      a first start of that loop (only when asked for)
every     four slots and a snapshot at every step

Each process runs the first round (from the first snapshot on), a steady round of as many steps, and then, for the cost,
rounds of three short blocks: without anything, with snapshots, and with a free copy at the same steps. Lost time is
that of the second block against the first one of its round, per snapshot; the floor is that of the third: a copy of
as many bytes to page-locked memory on which nothing depends. Both are medians of all rounds, with the extremes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

TOY = {"width": 64, "layers": 2, "heads": 2, "vocab": 256, "context": 32, "batch": 2}
BOX_S = 190.0  # for one process; a hang of one must not cost the rest
READY_S = 60.0  # snapshots must have begun by then
WARM_STEPS = 8  # the first ones load kernels
TAIL_STEPS = 2  # at the end of a short block: the copy of its last snapshot ends before the block does
PIECE_BYTES = 64 << 20
RUN_ID = "default-settings"


class Loop:
    """A training loop, timed in blocks: the device is synchronised only at the ends of a block."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from measuring import Device
        from sizes import H200, GptSize
        from workloads import Gpt, _batches, _loss

        size = GptSize(**TOY) if options.toy else H200.gpt
        self.torch, self.device, self.late_loss = torch, Device(options.device), options.late_loss
        torch.manual_seed(0)
        with torch.device(options.device):
            self.model = Gpt(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batches, self._loss, self._last = _batches(size, options.device), _loss, None

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        batch = next(self._batches)
        with self.torch.autocast(self.device.kind, dtype=self.torch.bfloat16):
            loss = self._loss(self.model(batch), batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.late_loss and self._last is not None:
            self._last.item()
        self._last = loss.detach()

    def block(self, num_steps: int, after: Callable[[int], object] = lambda index: None) -> dict[str, Any]:
        """Run steps, `after` each with its index. Returns the wall time and the device's time of each step."""
        self.device.synchronize()
        marks, called_s = [self.device.mark()], []
        start = time.perf_counter()
        for index in range(num_steps):
            self.step()
            before = time.perf_counter()
            after(index)
            called_s.append(time.perf_counter() - before)
            marks.append(self.device.mark())
        self.device.synchronize()
        return {
            "steps": num_steps,
            "wall_s": time.perf_counter() - start,
            "step_s": self.device.seconds(marks),
            "called_s": called_s,
        }

    def tensors(self) -> list[Any]:
        kept = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*(p.detach() for p in self.model.parameters()), *(v for v in kept if self.torch.is_tensor(v))]


class FreeCopy:
    """Copies as many bytes as the state has to page-locked memory, on a stream of its own: the floor of a snapshot.

    From one buffer in large pieces, so that queueing the copies costs the training thread nothing.
    """

    def __init__(self, loop: Loop, size_bytes: int) -> None:
        torch = loop.torch
        self._torch, self._cuda = torch, loop.device.is_cuda
        self._num_copies = max(1, size_bytes // PIECE_BYTES)
        self._source = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=loop.device.kind)
        self._target = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._cuda)
        self._stream = torch.cuda.Stream() if self._cuda else None

    def start(self) -> None:
        if self._stream is None:
            return
        self._stream.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(self._stream):
            for _ in range(self._num_copies):
                self._target.copy_(self._source, non_blocking=True)


class Takes:
    """Every `take`, and what became of it."""

    def __init__(self, snapshots: Any, first_step: int) -> None:
        self.snapshots, self.step, self.pending = snapshots, first_step, []

    def after(self, every: int) -> Callable[[int], object]:
        def take(index: int) -> None:
            self.step += 1
            if (index + 1) % every == 0:
                self.pending.append(self.snapshots.take(self.step))

        return take

    def settle(self) -> dict[str, Any]:
        pending, self.pending = self.pending, []
        deadline = time.perf_counter() + 20
        for one in pending:
            one.wait(timeout_s=max(0.0, deadline - time.perf_counter()))
        reasons = Counter("".join("#" if c.isdigit() else c for c in one.reason) for one in pending if one.skipped)
        complete = sum(one.survives.name != "NOTHING" for one in pending)
        skipped_at = [index for index, one in enumerate(pending) if one.skipped]
        return {
            "asked": len(pending), "complete": complete, "skipped": dict(reasons.most_common(5)),
            "skipped_at": skipped_at[:10],
        }  # fmt: skip


def cost(loop: Loop, takes: Takes, copy: FreeCopy, options: argparse.Namespace) -> dict[str, Any]:
    """Lost time per snapshot, and the floor, by rounds of short blocks side by side."""
    every, last = options.every, options.block_steps - TAIL_STEPS * options.every

    def due(index: int) -> bool:
        return index < last and (index + 1) % every == 0

    def snapshot(index: int) -> None:
        takes.step += 1
        if due(index):
            takes.pending.append(takes.snapshots.take(takes.step))

    num_snapshots = sum(map(due, range(options.block_steps)))
    lost, floor, step_s = list[float](), list[float](), list[float]()
    loop.block(options.block_steps)
    for _ in range(options.rounds):
        alone = loop.block(options.block_steps)["wall_s"]
        taken = loop.block(options.block_steps, snapshot)["wall_s"]
        free = loop.block(options.block_steps, lambda index: copy.start() if due(index) else None)["wall_s"]
        lost.append(1000 * (taken - alone) / num_snapshots)
        floor.append(1000 * (free - alone) / num_snapshots)
        step_s.append(alone / options.block_steps)
    return {
        **takes.settle(), "snapshots_per_block": num_snapshots, "lost_ms": statistics.median(lost),
        "floor_ms": statistics.median(floor), "lost_ms_of_rounds": lost, "floor_ms_of_rounds": floor,
        "alone_step_s": statistics.median(step_s),
    }  # fmt: skip


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def child(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    if options.device == "cuda":
        torch.zeros((), device="cuda")
    else:
        torch.set_num_threads(1)
    import keepstep

    loop = Loop(options)
    if options.scenario == "first":
        loop.block(WARM_STEPS)
    before = loop.block(options.block_steps) if options.scenario == "first" else None
    snapshots, construct_s = timed(lambda: keepstep.Snapshotter(loop.state))
    restored, restore_s = timed(snapshots.restore)
    found: dict[str, Any] = {"construct_s": construct_s, "restore_s": restore_s, "restored": None}
    if restored is not None:
        found["restored"] = {"step": restored.step, "duration_s": restored.duration_s, "bytes": restored.bytes}
    takes = Takes(snapshots, restored.step if restored else 0)
    found.update(first_steps(loop, takes, options, before))
    block = loop.block(options.steps, takes.after(options.every))
    found["steady"] = {
        **takes.settle(),
        "take_ms": 1000 * statistics.median(block["called_s"][options.every - 1 :: options.every]),
        "wall_s": block["wall_s"],
    }
    found["state_bytes"] = sum(tensor.nbytes for tensor in loop.tensors())
    found["cost"] = cost(loop, takes, FreeCopy(loop, found["state_bytes"]), options)
    found["status"] = json.loads(msgspec.json.encode(snapshots.status()))
    if options.scenario != "first":
        snapshots.close()
    return found


def first_steps(loop: Loop, takes: Takes, options: argparse.Namespace, before: dict[str, Any] | None) -> dict[str, Any]:
    """From `restore()` on, at the cadence of the run: until the first snapshot begins, and one round from there.

    The device is never waited for in between: that would put the loop in step with it.
    """
    start, every = time.perf_counter(), options.every
    reasons: Counter[str] = Counter()
    begun_s, begun_step, num_steps, marks = None, 0, 0, [loop.device.mark()]
    while (begun_s is None and time.perf_counter() - start < READY_S) or num_steps < begun_step + options.steps:
        takes.step += 1
        num_steps += 1
        loop.step()
        marks.append(loop.device.mark())
        if num_steps % every:
            continue
        pending = takes.snapshots.take(takes.step)
        if begun_s is None and not pending.skipped:
            begun_s, begun_step = time.perf_counter() - start, num_steps
        if begun_s is None:
            reasons["".join("#" if c.isdigit() else c for c in pending.reason)] += 1
        else:
            takes.pending.append(pending)
    loop.device.synchronize()
    step_s = loop.device.seconds(marks)
    waiting = step_s[: begun_step or num_steps]
    found: dict[str, Any] = {
        "until_first_snapshot": {
            "steps": begun_step, "s": begun_s, "skipped": dict(reasons), "step_s": sum(waiting) / len(waiting),
        },
        "first_round": {**takes.settle(), "step_s": sum(step_s[begun_step:]) / max(1, num_steps - begun_step)},
    }  # fmt: skip
    if before is not None:
        found["before_step_s"] = before["wall_s"] / before["steps"]
    return found


SCENARIOS: dict[str, dict[str, Any]] = {
    "first": {"every": 2, "late_loss": False, "kill": True},
    "again": {"every": 2, "late_loss": True, "kill": False},
    "late": {"every": 2, "late_loss": True, "kill": False},
    "every": {"every": 1, "late_loss": False, "kill": False, "environ": {"KEEPSTEP_ARENA_SLOTS": "4"}},
}

USUAL = ("first", "again", "every")
OWN_RUNS = ("late", "every")  # The others go on with the run of `first`.


def run_tree(name: str, path: Path, options: argparse.Namespace, out: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="ks-", dir="/tmp") as runtime:
        base = {
            **os.environ, "KEEPSTEP_RUN_ID": RUN_ID, "KEEPSTEP_NODE_ID": "node", "KEEPSTEP_RUNTIME_DIR": runtime,
            "PYTHONPATH": os.pathsep.join([str(path.resolve()), os.environ.get("PYTHONPATH", "")]),
            "KEEPSTEP_KEEPER_LEASE_S": "60",
        }  # fmt: skip
        for scenario in options.only or USUAL:
            if options.deadline - time.monotonic() < 30:
                out.setdefault(name, {})[scenario] = {"error": "no time was left"}
                continue
            what = SCENARIOS[scenario]
            environ = {**base, **what.get("environ", {})}
            if scenario in OWN_RUNS:
                environ["KEEPSTEP_RUN_ID"] = f"{RUN_ID}-{scenario}"
            out.setdefault(name, {})[scenario] = run_child(scenario, what, environ, options)
            print(f"{name} {scenario}: {summary(out[name][scenario])}", flush=True)
        for run_id in (RUN_ID, *(f"{RUN_ID}-{scenario}" for scenario in OWN_RUNS)):
            release = [sys.executable, "-m", "keepstep.cli.main", "release", "--run-id", run_id, "--force"]
            subprocess.run(release, env=base, capture_output=True, timeout=60, check=False)


def run_child(
    scenario: str, what: dict[str, Any], environ: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    read, write = os.pipe()
    command = [
        sys.executable, __file__, "--child", scenario, "--device", options.device, "--answer", str(write),
        "--rounds", str(options.rounds),
    ]  # fmt: skip
    command += ["--toy"] if options.toy else []
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environ, pass_fds=[write], stderr=errors, start_new_session=True)
        os.close(write)
        box_s = max(10.0, min(BOX_S, options.deadline - time.monotonic()))
        killer = threading.Timer(box_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        killer.start()
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read()  # ends when the child does, which kills itself where the scenario says so
        process.wait()
        killer.cancel()
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-1500:]
    return json.loads(text) if text else {"error": said or "no answer in time"}


def summary(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"]).strip().splitlines()[-1]
    first, until, steady, cost = (found[key] for key in ("first_round", "until_first_snapshot", "steady", "cost"))
    begun = f"{until['s'] or -1:.1f} s, {until['steps']} steps of {until['step_s']:.4f} s"
    restored = f" (step {found['restored']['step']})" if found["restored"] else " (first start)"
    alone = f", alone {found['before_step_s']:.4f}" if "before_step_s" in found else ""
    return "\n".join(
        [
            f"Snapshotter() {found['construct_s']:.2f} s, restore() {found['restore_s']:.2f} s{restored}",
            f"  first snapshot after {begun}{alone}, skipped {until['skipped']}",
            f"  first round {first['complete']} of {first['asked']} complete, skipped {first['skipped']}",
            f"  steady {steady['complete']} of {steady['asked']}, take {steady['take_ms']:.1f} ms, "
            f"skipped {steady['skipped']}",
            f"  cost {cost['complete']} of {cost['asked']}, step {cost['alone_step_s']:.4f} s, "
            f"lost {cost['lost_ms']:.1f} ms each {_range(cost['lost_ms_of_rounds'])}, "
            f"floor {cost['floor_ms']:.1f} {_range(cost['floor_ms_of_rounds'])}",
        ]
    )


def _range(values: list[float]) -> str:
    return f"({min(values):.1f} to {max(values):.1f})"


def trees_of(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for text in options.tree:
        name, _, path = text.rpartition("=")
        yield name or "now", Path(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], help="[NAME=]PATH to the src of a version")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="small sizes; implied on the cpu")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=[])
    parser.add_argument("--rounds", type=int, default=5, help="for the cost")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--child", choices=SCENARIOS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.toy = options.toy or options.device == "cpu"
    options.steps, options.block_steps = (20, 10) if options.toy else (60, 14)
    if options.child:
        options.scenario = options.child
        options.every, options.late_loss = SCENARIOS[options.child]["every"], SCENARIOS[options.child]["late_loss"]
        if options.every == 1 and not options.toy:
            options.steps, options.block_steps = 30, 22
        found = child(options)
        os.write(options.answer, json.dumps(found).encode())
        if SCENARIOS[options.child]["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0
    options.deadline = time.monotonic() + 60 * options.minutes
    out: dict[str, Any] = {}
    for name, path in trees_of(options):
        run_tree(name, path, options, out)
    if options.out:
        import torch

        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        about = {"commit": options.commit, "device": device, "torch": torch.__version__, "cores": os.cpu_count(),
                 "command": " ".join(sys.argv)}  # fmt: skip
        Path(options.out).write_text(json.dumps({"about": about, "trees": out}, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in scenario for tree in out.values() for scenario in tree.values()))


if __name__ == "__main__":
    sys.exit(main())
