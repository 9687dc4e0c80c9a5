"""Snapshots at every step of loops that do not look like the textbook's, on a device. Under pytest, or by itself:

    PYTHONPATH=src:.carry python tests/gpu/test_ways_to_train.py [--device cpu]

Each way trains with a snapshot at every step, in several lives. Whatever a life restores must be, bit for bit, what the
tensors held when that step was taken. Where no hook of an optimizer shows itself (a replayed CUDA graph), everything
is staged inside `take`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keepstep
from keepstep.config import ArenaConfig, TakeConfig
from keepstep.testing.run import LocalRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch, when it compiles
DEVICE = os.environ.get("KEEPSTEP_TEST_DEVICE", "cuda")
LIVES, STEPS = 3, 9
WIDTH, DEPTH = (2048, 12) if DEVICE == "cuda" else (64, 4)


class Training:
    """A stack of layers; `step` does one step, however that is done here."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(DEPTH)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(64, WIDTH, device=DEVICE)).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        optimizers = [part for part in self.state.values() if isinstance(part, torch.optim.Optimizer)]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        moments = [state[name] for state in states for name in sorted(state)]
        return [tensor.detach() for tensor in (*self.model.parameters(), *moments)]


class Fused(Training):
    def __init__(self) -> None:
        super().__init__(fused=True)


class Foreach(Training):
    def __init__(self) -> None:
        super().__init__(foreach=True)


class Compiled(Training):
    """Forward, backward and the optimizer's step by inductor."""

    def __init__(self) -> None:
        super().__init__()
        self._loss = torch.compile(self.loss)
        self._step = torch.compile(self.optimizer.step)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss().backward()
        self._step()


class Accumulated(Training):
    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(3):
            self.loss().backward()
        self.optimizer.step()


class Scaled(Training):
    """Every third step overflows: the scaler skips it, and no hook fires."""

    def __init__(self) -> None:
        super().__init__(fused=True)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
        self.state["scaler"] = self.scaler
        self._count = 0

    def step(self) -> None:
        self._count += 1
        self.optimizer.zero_grad()
        loss = self.loss() * (float("inf") if self._count % 3 == 0 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class InBackward(Training):
    """One optimizer for each parameter, stepped as soon as its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = {p: torch.optim.AdamW([p], lr=1e-3, fused=True) for p in self.model.parameters()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._update)
        self.state = {"model": self.model, **{f"optimizer{i}": o for i, o in enumerate(self.optimizers.values())}}

    def _update(self, parameter: torch.Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def step(self) -> None:
        self.loss().backward()


class Turns(Training):
    """Two optimizers, one of which steps at every third step only: a `take` finds it silent, and must not accuse it."""

    def __init__(self) -> None:
        super().__init__()
        half = DEPTH // 2
        self.often = torch.optim.AdamW(self.model[:half].parameters(), lr=1e-3, fused=True)
        self.rarely = torch.optim.AdamW(self.model[half:].parameters(), lr=1e-3, fused=True)
        self.state = {"model": self.model, "often": self.often, "rarely": self.rarely}
        self._count = 0

    def step(self) -> None:
        self._count += 1
        self.model.zero_grad()
        self.loss().backward()
        self.often.step()
        if self._count % 3 == 1:
            self.rarely.step()


class Graphed(Training):
    """The whole step is one CUDA graph: no Python runs in a replay, and no hook."""

    def __init__(self) -> None:
        super().__init__(capturable=True, fused=True)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input = torch.randn(64, WIDTH, device=DEVICE)

    def _whole(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._input).square().mean().backward()
        self.optimizer.step()

    def step(self) -> None:
        if self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._whole()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._whole()
        self._input.normal_()
        self._graph.replay()


ANYWHERE: list[Callable[[], Training]] = [Fused, Foreach, Accumulated, InBackward, Turns]
ON_CUDA: list[Callable[[], Training]] = [Scaled, Compiled, Graphed]


def config(run: LocalRun, slots: int) -> keepstep.Config:
    return run.config(arena=ArenaConfig(slots=slots), take=TakeConfig(budget_ms=60_000))


def live(run: LocalRun, way: Callable[[], Training], slots: int, truth: dict[int, list[torch.Tensor]]) -> int:
    """One life: what it restores is right; then it trains on. Returns how many snapshots were complete."""
    training = way()
    with_state = way is not Graphed or bool(truth)
    if with_state and truth:
        training.step()  # a graph is captured, or an optimizer has its state: restored into what is there
    snapshots = keepstep.Snapshotter(training.state, config(run, slots))
    restored = snapshots.restore()
    assert (restored is None) == (not truth)
    step = 0
    if restored is not None:
        step = restored.step + 1
        pairs = zip(training.tensors(), truth[restored.step], strict=True)
        assert all(torch.equal(here, there) for here, there in pairs), f"step {restored.step} is not what it was"
    taken = []
    for number in range(step, step + STEPS):
        training.step()
        truth[number] = [tensor.clone() for tensor in training.tensors()]
        taken.append(snapshots.take(number))
    complete = [one for one in taken if one.wait(timeout_s=60) >= keepstep.Survives.PROCESS]
    assert complete, [one.reason for one in taken]
    if way is Turns:
        assert not any(watched.untrusted_reason for watched in snapshots._fence.watched)
    snapshots.close(finished=False)
    return len(complete)


@pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice, given while it compiles
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("way", ANYWHERE + (ON_CUDA if DEVICE == "cuda" else []), ids=lambda way: way.__name__)
def test_every_life_restores_exactly_what_was_taken(way: Callable[[], Training], slots: int) -> None:
    with LocalRun() as run:
        truth: dict[int, list[torch.Tensor]] = {}
        found = [live(run, way, slots, truth) for _ in range(LIVES)]
    print(f"{way.__name__}, {slots} slots: {sum(found)} of {LIVES * STEPS} snapshots complete")


if __name__ == "__main__":
    if "--device" in sys.argv:
        os.environ["KEEPSTEP_TEST_DEVICE"] = sys.argv[sys.argv.index("--device") + 1]
        os.execv(sys.executable, [sys.executable, __file__])
    failed = []
    for one in ANYWHERE + (ON_CUDA if DEVICE == "cuda" else []):
        for count in (2, 3):
            try:
                test_every_life_restores_exactly_what_was_taken(one, count)
            except Exception as error:
                failed.append((one.__name__, count))
                print(f"{one.__name__}, {count} slots: FAILED: {error!r}"[:2000])
    print("passed" if not failed else f"failed: {failed}", DEVICE)
    sys.exit(bool(failed))
