"""torch.compile beside keepstep: the hooks that fence an optimizer are not compiled with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

import keepstep
from keepstep.testing.run import LocalRun

STEPS, EVERY = 15, 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when it compiles
def test_a_compiled_step_is_compiled_once_and_fenced_at_every_step() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    compiled = torch.compile(optimizer.step, backend=backend)
    with LocalRun() as run, keepstep.Snapshotter({"model": model, "optimizer": optimizer}, run.config()) as snapshots:
        snapshots.restore()
        complete = 0
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 200)).square().mean().backward()
            # The state of the optimizer appears in the first step; after that there is nothing to compile again.
            with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
                compiled()
            assert snapshots._fence.watched[0].fired == 1 + step % EVERY  # it ran, and as often as the step
            if step % EVERY == EVERY - 1:
                complete += snapshots.take(step).wait(timeout_s=10) >= keepstep.Survives.PROCESS
    assert complete == STEPS // EVERY
    assert graphs
