"""Capture and restore on a CUDA device. Runs under pytest, or by itself where pytest is not there:

    PYTHONPATH=src:.carry python tests/gpu/test_cuda.py [--device cpu]

Every tensor encodes its step, so a snapshot that mixes steps is seen; the trainer is SIGKILLed while
copies are in flight and a new process restores onto the device.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("KEEPSTEP_TEST_DEVICE", "cuda")
LIVES = int(os.environ.get("KEEPSTEP_TEST_LIVES", "8"))


class Stamp(torch.optim.Optimizer):
    """After step k every parameter and state tensor is filled with k, as a fused optimizer would write it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), device="cpu")
                    state["moment"] = torch.zeros_like(p)
                state["step"] += 1
                value = float(state["step"])
                p.fill_(value)
                state["moment"].fill_(-value)


def train(log: Path, lives_until: int) -> None:
    import keepstep

    torch.manual_seed(0)
    sizes = [1 << 20, 3_000_001, 257, 64, 8 << 20, 1] * 3
    params = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n, device=DEVICE)) for n in sizes])
    optimizer = Stamp(params.parameters())
    busy = torch.randn(*(2 * [256 if DEVICE == "cpu" else 2048]), device=DEVICE)
    with keepstep.Snapshotter({"model": params, "optimizer": optimizer}) as snapshots:
        restored = snapshots.restore()
        first = restored.step + 1 if restored else 0
        problem = check(params, optimizer, first) if restored else ""
        say(
            log, restored=restored.step if restored else None, problem=problem, seconds=restored and restored.duration_s
        )
        for step in range(first, lives_until):
            for _ in range(random.randint(1, 20)):
                busy = torch.nn.functional.normalize(busy @ busy)
            optimizer.step()
            pending = snapshots.take(step)
            if step % 3 == 0:
                pending.wait(timeout_s=30)
                say(log, complete=step, skipped=pending.reason)
        say(log, finished=True, problem=check(params, optimizer, lives_until))


def check(params, optimizer, steps: int) -> str:
    for index, p in enumerate(params):
        state = optimizer.state[p]
        values = {float(state["step"]), *p.detach().unique().tolist(), *(-state["moment"]).unique().tolist()}
        if values != {float(steps)}:
            return f"parameter {index}: {sorted(values)} instead of {steps}"
        if p.device.type != torch.device(DEVICE).type or state["moment"].device != p.device:
            return f"parameter {index} is on {p.device}, its state on {state['moment'].device}"
    return ""


def say(log: Path, **fields) -> None:
    with log.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def start(log: Path, until: int, environ: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, "--train", str(log), str(until)], env=environ)


def run_lives(lives: int) -> list[dict]:
    home = tempfile.mkdtemp(dir="/tmp")
    log = Path(home) / "log"
    environ = {**os.environ, "KEEPSTEP_RUN_ID": "gpu", "KEEPSTEP_RUNTIME_DIR": f"{home}/r"}
    rng = random.Random(1)
    for _ in range(lives):
        child = start(log, 1_000_000, environ)
        try:
            wait_for(log, "complete", child)
            time.sleep(rng.random())
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    last = max(e.get("complete", 0) for e in events(log))
    child = start(log, last + 30, environ)
    try:
        assert child.wait(timeout=120) == 0
    finally:
        child.kill()
        child.wait()
    return events(log)


def wait_for(log: Path, name: str, child: subprocess.Popen) -> None:
    before = len([e for e in events(log) if name in e])
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if len([e for e in events(log) if name in e]) > before:
            return
        assert child.poll() is None, "the trainer ended by itself"
        time.sleep(0.05)
    raise AssertionError(f"no {name} within 90 s")


def events(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(600)
def test_killed_trainers_get_one_whole_step_back_on_the_device():
    found = run_lives(LIVES)
    restored = [e for e in found if e.get("restored") is not None]
    assert len(restored) == LIVES
    assert [e["problem"] for e in found if e.get("problem")] == []
    newest = -1
    for event in found:
        if "complete" in event and not event["skipped"]:
            newest = event["complete"]
        if event.get("restored") is not None:
            assert event["restored"] >= newest, "an older step than the last complete one came back"


if __name__ == "__main__":
    if "--train" in sys.argv:
        train(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        if "--device" in sys.argv:
            os.environ["KEEPSTEP_TEST_DEVICE"] = DEVICE = sys.argv[sys.argv.index("--device") + 1]
        test_killed_trainers_get_one_whole_step_back_on_the_device()
        print("ok")
