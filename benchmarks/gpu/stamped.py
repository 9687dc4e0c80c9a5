"""Trainers whose tensors encode their step, to be killed, read and checked. Children of kills.py and poison.py.

Words between parent and child are lines of JSON in a file, written with one call each: a SIGKILL loses none.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from limit import open_ring
from measuring import Device, without_numbers
from results import Results, say
from sizes import GptSize, Task
from stamps import COUNTER, KINDS, ODD, number_of, numels_for, salt_of
from torch import Tensor, nn

import keepstep
from keepstep import Survives
from keepstep.trainer.capture import capture
from keepstep.trainer.capture.device_lane import DeviceLanes

WORDS, STOP = "words", "stop"
SCALE = "KEEPSTEP_BENCH_WINDOW_SCALE"  # from the parent, for `train_poisoned`
HALF_EVERY = 4
"""every so many parameters one is bf16"""
MOST_MATMULS = 12
MOST_AHEAD = 4
"""steps that the host may be ahead of the device: what it queues begins no earlier than what it queued before"""
WAIT_S = 120.0
INTEGERS = {2: torch.int16, 4: torch.int32}


class Stamp(torch.optim.Optimizer):
    """After `step()` with `at` = s every tensor that it owns is stamped with s, written in place as fused ones do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})
        self.at = 0
        self._ramps: dict[tuple[torch.device, int], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for index, parameter in enumerate(self._parameters()):
            state = self.state[parameter]
            if not state:
                state[COUNTER] = torch.zeros(())
                state.update({kind: torch.zeros_like(parameter) for kind in KINDS if kind})
            state[COUNTER].fill_(float(self.at))
            for kind in KINDS:
                tensor = (state[kind] if kind else parameter).detach()
                flat, ramp, number = self._stamp(tensor, salt_of(index, kind), self.at)
                torch.add(ramp, number, out=flat)

    def problem(self, step: int, device: str) -> str:
        """What is not as it was after `step`; empty when every bit is."""
        for index, parameter in enumerate(self._parameters()):
            state = self.state[parameter]
            if float(state[COUNTER]) != step:
                return f"the counter of parameter {index} is {float(state[COUNTER])} at step {step}"
            for kind in KINDS:
                tensor = (state[kind] if kind else parameter).detach()
                if tensor.device.type != device:
                    return f"{kind or 'parameter'} {index} is on {tensor.device}"
                flat, ramp, number = self._stamp(tensor, salt_of(index, kind), step)
                if not torch.equal(flat, ramp + number):
                    return f"{kind or 'parameter'} {index} is not that of step {step}"
        return ""

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _stamp(self, tensor: Tensor, salt: int, step: int) -> tuple[Tensor, Tensor, int]:
        """The tensor's elements as integers, the ramp under them, and the number that is added."""
        size = tensor.element_size()
        key = (tensor.device, size)
        if key not in self._ramps:
            longest = max(parameter.numel() for parameter in self._parameters())
            ramp = torch.arange(longest, dtype=torch.int32, device=tensor.device) * ODD
            self._ramps[key] = ramp.to(INTEGERS[size])
        flat = tensor.view(INTEGERS[size]).view(-1)
        return flat, self._ramps[key][: flat.numel()], number_of(step, salt, 8 * size)


def make_stamped(numels: list[int], device: str, *, mixed: bool = True) -> tuple[nn.ParameterList, Stamp]:
    model = nn.ParameterList()
    for index, numel in enumerate(numels):
        dtype = torch.bfloat16 if mixed and index % HALF_EVERY == HALF_EVERY - 1 else torch.float32
        model.append(nn.Parameter(torch.zeros(numel, dtype=dtype, device=device)))
    return model, Stamp(model.parameters())


def gpt_numels(size: GptSize) -> list[int]:
    """The parameters of that GPT, by number of elements."""
    w = size.width
    layer = [w, w, w, w, 3 * w * w, 3 * w, w * w, w, 4 * w * w, 4 * w, 4 * w * w, w]
    return [size.vocab * w, size.context * w, *layer * size.layers, w, w, size.vocab * w]


class Words:
    def __init__(self, task: Task) -> None:
        self._fd = os.open(Path(task.scratch) / WORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, **fields: Any) -> None:
        os.write(self._fd, json.dumps(fields).encode() + b"\n")


class Busy:
    """Computation of changing length between two updates."""

    def __init__(self, device: str) -> None:
        self._matrix = torch.randn(2 * (64 if device == "cpu" else 2048,), device=device)
        self._random = random.Random()

    def __call__(self) -> None:
        for _ in range(self._random.randint(0, MOST_MATMULS)):
            self._matrix = torch.nn.functional.normalize(self._matrix @ self._matrix)


def train_until_killed(task: Task) -> None:
    """Restore, check every bit, then snapshots at full speed. Option `last`: check only, and end."""
    words, busy = Words(task), Busy(task.device)
    model, optimizer = make_stamped(numels_for(task.sizes.killed_bytes), task.device)
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        restored = snapshots.restore()
        problem = optimizer.problem(restored.step, task.device) if restored else ""
        seconds = restored.duration_s if restored else None
        words.say(restored=restored.step if restored else None, problem=problem, seconds=seconds)
        step = restored.step + 1 if restored else 0
        while task.option != "last":
            busy()
            optimizer.at = step
            optimizer.step()
            words.say(take=step)
            pending = snapshots.take(step)
            words.say(skipped=step) if pending.skipped else words.say(begun=step)
            step += 1


def train_poisoned(task: Task) -> None:
    """Snapshots at full speed until the parent has seen enough; then what became of each."""
    words, busy, device = Words(task), Busy(task.device), Device(task.device)
    model, optimizer = make_stamped(numels_for(task.sizes.poison_bytes), task.device)
    capture.DeviceLanes = partial(DeviceLanes, window_scale=float(os.environ.get(SCALE, "1")))  # type: ignore[misc]
    stop = Path(task.scratch) / STOP
    taken: list[keepstep.PendingSnapshot] = []
    reasons: dict[str, int] = {}
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        snapshots.restore()
        words.say(ready=True)
        step = 0
        while not stop.exists():
            busy()
            optimizer.at = step
            optimizer.step()
            pending = snapshots.take(step)
            if not pending.skipped:
                taken.append(pending)
            else:
                reason = without_numbers(pending.reason)
                reasons[reason] = reasons.get(reason, 0) + 1
            step += 1
            if step % MOST_AHEAD == 0:
                device.synchronize()
        for pending in taken:
            pending.wait(timeout_s=WAIT_S)
        complete = sum(pending.survives >= Survives.PROCESS for pending in taken)
        void = [pending.reason for pending in taken if pending.skipped and "superseded" not in pending.reason]
        fence = getattr(getattr(snapshots, "_fence", None), "waited_s", None)
        words.say(
            steps=step, taken=len(taken), complete=complete, void=void[:10], num_void=len(void), skipped=reasons,
            waited_s=fence,
        )  # fmt: skip


# A restore of 17 GB


def save_large(task: Task) -> None:
    """One snapshot of a state with the tensors of the 1.42 B GPT; then wait to be killed."""
    words = Words(task)
    model, optimizer = make_stamped(gpt_numels(task.sizes.gpt), task.device, mixed=False)
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        snapshots.restore()
        for step in range(1000):
            optimizer.at = step
            optimizer.step()
            pending = snapshots.take(step)
            if not pending.skipped and pending.wait(timeout_s=WAIT_S) >= Survives.PROCESS:
                words.say(complete=step)
                time.sleep(max(0.0, task.deadline - time.monotonic()))
                return
            time.sleep(0.1)


def load_large(task: Task) -> None:
    """A new process: from `restore()` to the state on the device, and where the time went, as far as is said."""
    results, device = Results(Path(task.out), task.part), Device(task.device)
    model, optimizer = make_stamped(gpt_numels(task.sizes.gpt), task.device, mixed=False)
    size_bytes = 3 * sum(parameter.nbytes for parameter in model)
    with open_ring(task.sizes.ring_bytes, device) as ring:
        buffer = torch.empty(min(task.sizes.limit_bytes, 1 << 30), dtype=torch.uint8, device=task.device)
        limit = ring.rate(buffer, task.sizes.limit_bytes, to_device=True)
        del buffer
    lines = Lines()
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        device.synchronize()
        lines.begin()
        restored = snapshots.restore()
        returned_s = lines.elapsed()
        device.synchronize()
        synchronized_s = lines.elapsed()
        assert restored is not None, "there was nothing to restore"
        problem = optimizer.problem(restored.step, task.device)
        results.measure(
            "restore",
            value={
                "state_bytes": size_bytes, "state_s": restored.duration_s + synchronized_s - returned_s,
                "returned_s": returned_s, "synchronized_s": synchronized_s, "problem": problem,
                "limit_bytes_s": limit["best_bytes_s"], "limit_s": size_bytes / limit["best_bytes_s"],
                "restored": _fields_of(restored), "log": lines.found,
            },
        )  # fmt: skip
    say(
        f"restore: state after {restored.duration_s:.2f} s, returned after {returned_s:.2f} s, {problem or 'every bit'}"
    )


class Lines(logging.Handler):
    """What keepstep logs, with the time since `begin`: where a restore spends it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[dict[str, Any]] = []
        self._began = time.perf_counter()
        log = logging.getLogger("keepstep")
        log.setLevel(logging.DEBUG)
        log.addHandler(self)

    def begin(self) -> None:
        self.found.clear()
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.found) < 60:
            self.found.append({"at_s": round(self.elapsed(), 4), "text": record.getMessage()[:300]})


def _fields_of(restored: Any) -> dict[str, Any]:
    """Every public field, whatever this version has: phases of the restore may be among them."""
    named = {one.name: getattr(restored, one.name) for one in dataclasses.fields(restored) if one.name[0] != "_"}
    found: dict[str, Any] = json.loads(json.dumps(named, default=str))
    return found
