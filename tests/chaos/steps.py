"""A training script whose every tensor says which step it is of, so that a mix is seen. Not a test.

    python steps.py zygote          imports torch once, then forks one trainer per line of JSON on standard input
    python steps.py '{"log": ...}'  one trainer, as torchrun starts it

After step k every parameter, momentum buffer, module buffer, plain tensor, value and random state is
a function of (k, rank, index). On start the trainer restores, checks all of it against the one step
that `restore()` named, and says what it found in its log: one JSON object per line, written with one
`write`, so that a SIGKILL loses nothing that was said.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import random
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SEED = 1234
WAVE = 251
WRONG, ALONE, RAISED = 3, 4, 5
"""exit codes: the restored state is not of one step; the other rank is gone; keepstep raised"""

# Elements per parameter: from one to a few hundred thousand, around the bounds at which copies are cut.
SIZES = (1, 3, 17, 1000, 16384, 16385, 20011, 65536, 100003, 131072, 262147, 7, 300007, 24593)
PLAIN_SIZES = (1, 5, 16383, 40009, 150001, 2)


@dataclass
class Life:
    """What one trainer does, as the test says it."""

    log: str
    steps: int = 30_000
    pace_s: float = 0.02
    """time before each optimizer step, in which the throttled copy runs"""
    meet: str = ""
    """a file in which ranks wait for each other before each step"""
    ballast_mb: int = 0
    linger_s: float = 0.0
    """between opening the Snapshotter and restoring"""
    children: int = 0
    """forked processes (data-loader workers) that outlive the trainer"""
    finish: bool = False
    """end normally after `steps`"""
    env: dict[str, str] = field(default_factory=dict)


def momentum_value(n: int, index: int) -> int:
    """The momentum buffer of parameter `index` after n steps."""
    return n % WAVE + index % 3 if n else 0


def parameter_value(n: int, rank: int, index: int) -> int:
    """What is left of a parameter after n steps of SGD with momentum 1 and lr 1: minus the sum of its momenta."""
    whole, rest = divmod(n, WAVE)
    total = whole * (WAVE * (WAVE - 1) // 2) + rest * (rest + 1) // 2
    return 1000 * rank + index - total - n * (index % 3)


def plain_value(n: int, rank: int, index: int) -> int:
    return n * 1000 + 100 * rank + index


class Training:
    """The state and one step of it."""

    def __init__(self, rank: int, ballast_mb: int = 0) -> None:
        self.rank = rank
        self.model = torch.nn.Module()
        for index, size in enumerate(SIZES):
            dtype = torch.float64 if index % 4 == 3 else torch.float32
            parameter = torch.full((size,), float(parameter_value(0, rank, index)), dtype=dtype)
            self.model.register_parameter(f"p{index}", torch.nn.Parameter(parameter))
            self.model.register_buffer(f"b{index}", torch.full((min(size, 999),), plain_value(0, rank, index)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=1.0)
        tensors = [torch.full((size,), plain_value(0, rank, i)) for i, size in enumerate(PLAIN_SIZES)]
        self.plain: dict[str, Any] = {"tensors": tensors, "steps": 0, "name": ("step", 0)}
        if ballast_mb:
            self.plain["ballast"] = torch.zeros(ballast_mb << 20, dtype=torch.uint8)
        torch.manual_seed(SEED)
        random.seed(SEED)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}

    def step(self, step: int) -> None:
        n = step + 1
        for index, parameter in enumerate(self.model.parameters()):
            assert parameter.grad is not None
            parameter.grad.fill_(float(momentum_value(n, index) - momentum_value(n - 1, index)))
        self.optimizer.step()
        for index in range(len(SIZES)):
            self.model.get_buffer(f"b{index}").fill_(plain_value(n, self.rank, index))
        for index, tensor in enumerate(self.plain["tensors"]):
            tensor.fill_(plain_value(n, self.rank, index))
        self.plain.update(steps=n, name=("step", n))
        torch.rand(1)
        random.random()

    def problems(self, step: int) -> list[str]:
        """Everything that is not of `step` (-1: before the first). Empty when all is."""
        n = step + 1
        found = [
            f"{name} is {seen} and should be {value} at step {step}"
            for name, tensor, value in self._expected(n)
            if (seen := _seen(tensor)) != [float(value)]
        ]
        if (self.plain["steps"], self.plain["name"]) != (n, ("step", n)):
            found.append(f"values are {self.plain['steps']}, {self.plain['name']} at step {step}")
        torch_draws, python_draws = torch.Generator().manual_seed(SEED), random.Random(SEED)
        for _ in range(n):
            torch.rand(1, generator=torch_draws)
            python_draws.random()
        if not torch.equal(torch.get_rng_state(), torch_draws.get_state()):
            found.append(f"the random state of torch is not of step {step}")
        if random.getstate() != python_draws.getstate():
            found.append(f"the random state of python is not of step {step}")
        return found

    def _expected(self, n: int) -> list[tuple[str, torch.Tensor, int]]:
        rows: list[tuple[str, torch.Tensor, int]] = []
        for index, parameter in enumerate(self.model.parameters()):
            rows.append((f"p{index}", parameter.detach(), parameter_value(n, self.rank, index)))
            rows.append((f"b{index}", self.model.get_buffer(f"b{index}"), plain_value(n, self.rank, index)))
            state = self.optimizer.state.get(parameter, {})
            momentum = state.get("momentum_buffer")
            if n:
                missing = torch.full((1,), float("nan"))
                wanted = momentum_value(n, index)
                rows.append((f"m{index}", missing if momentum is None else momentum, wanted))
        rows += [(f"plain{i}", tensor, plain_value(n, self.rank, i)) for i, tensor in enumerate(self.plain["tensors"])]
        return rows


def _seen(tensor: torch.Tensor) -> list[float]:
    """The different values in a tensor, a few of them at most."""
    low, high = tensor.min().item(), tensor.max().item()
    return [float(low)] if low == high else [float(low), float(high)]


class Log:
    """Appends a line per event."""

    def __init__(self, path: str, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rank = rank

    def __call__(self, event: str, **fields: Any) -> None:
        line = {"event": event, "rank": self._rank, "pid": os.getpid(), "at": time.monotonic(), **fields}
        os.write(self._fd, (json.dumps(line) + "\n").encode())


def meet(path: str, rank: int, world: int, step: int, deadline_s: float = 30.0) -> bool:
    """Wait until every rank has come to `step`. False when one does not come."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8 * world) as shared:
        shared[8 * rank : 8 * rank + 8] = (step + 1).to_bytes(8, "little")
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if all(int.from_bytes(shared[8 * r : 8 * r + 8], "little") > step for r in range(world)):
                return True
            time.sleep(0.0005)
    return False


def live(life: Life) -> int:
    """One trainer. Returns its exit code."""
    os.environ.update(life.env)
    rank = int(os.environ.get("RANK", "0"))
    log = Log(life.log, rank)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    log("begins")
    import keepstep

    training = Training(rank, life.ballast_mb)
    try:
        with keepstep.Snapshotter(training.state) as snapshots:
            log("open")
            for _ in range(life.children):
                _fork_child(log)
            time.sleep(life.linger_s)
            restored = snapshots.restore()
            step = restored.step if restored else -1
            plan = list(restored.plan) if restored else []
            problems = training.problems(step)
            log("restored", step=step, problems=problems[:5], plan=plan)
            if problems:
                return WRONG
            return _train(life, training, snapshots, log, step + 1)
    except keepstep.Error as error:
        log("raised", kind=type(error).__name__, text=str(error))
        return RAISED


def _train(life: Life, training: Training, snapshots: Any, log: Log, first: int) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    pending: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_report, args=(pending, log), daemon=True).start()
    for step in range(first, life.steps):
        if life.meet and not meet(life.meet, training.rank, world, step):
            log("alone", step=step)
            return ALONE
        started = time.monotonic()
        time.sleep(life.pace_s)
        training.step(step)
        taken = snapshots.take(step)
        log("taken", step=step, skipped=taken.reason, took=time.monotonic() - started)
        if not taken.skipped:
            pending.put(taken)
    log("trained", problems=training.problems(life.steps - 1)[:5])
    if not life.finish:
        time.sleep(3600)
    return 0


def _report(pending: queue.SimpleQueue[Any], log: Log) -> None:
    """Say which versions are complete, as soon as they are."""
    while True:
        taken = pending.get()
        survives = taken.wait(timeout_s=3600)
        log("complete" if survives else "void", step=taken.step, reason=taken.reason)


def _fork_child(log: Log) -> None:
    if os.fork() == 0:
        log("child")
        time.sleep(600)
        os._exit(0)


# The zygote


def zygote() -> None:
    """Fork a trainer for each line on standard input; say when one has started and when one has ended."""
    import msgspec  # noqa: F401
    import numpy  # noqa: F401
    import torch.distributed.tensor
    import xxhash  # noqa: F401

    # The first optimizer imports torch's compiler, which takes longer than all the rest of a life.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=1.0).step()
    children: set[int] = set()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    try:
        while True:
            readable, _, _ = select.select([0], [], [], 0.01)
            if readable:
                line = _read_line()
                if not line:
                    return
                children.add(_fork_life(Life(**json.loads(line))))
            for pid in list(children):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    children.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    print(json.dumps({"ended": pid, "code": code}), flush=True)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _read_line() -> bytes:
    """One line, unbuffered: select must see what is left."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


def _fork_life(life: Life) -> int:
    pid = os.fork()
    if pid:
        print(json.dumps({"started": pid}), flush=True)
        return pid
    code = 70
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(life.log + ".stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(null, 0)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        code = live(life)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


if __name__ == "__main__":
    if sys.argv[1] == "zygote":
        zygote()
    else:
        raise SystemExit(live(Life(**json.loads(sys.argv[1]))))
