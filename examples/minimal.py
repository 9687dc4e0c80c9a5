"""The smallest training that keeps every step: one process, CPU, half a minute.

    KEEPSTEP_RUN_ID=minimal python examples/minimal.py

It tells its pid: `kill -9` it from another terminal and run the same command again within ten minutes (the lease). It
goes on after the step that it was at, and ends with the same weights as a run that nobody killed. The run id is what
both starts have in common. The five lines that keepstep adds to the loop are marked with `# +`.
"""

from __future__ import annotations

import os
import time

import torch

import keepstep  # +

STEPS = 300


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    print(f"pid {os.getpid()}", flush=True)

    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:  # +
        restored = snapshots.restore()  # + None on a first start
        for step in range(restored.step + 1 if restored else 0, STEPS):  # +
            inputs = torch.randn(32, 8)  # from the random state, which keepstep restores too
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            snapshots.take(step)  # + returns before the copy has finished
            print(f"step {step:3d}  loss {loss.item():.6f}", flush=True)
            time.sleep(0.1)  # time for you to kill it

    print(f"the sum of all weights is {float(model.weight.sum()).hex()}")


if __name__ == "__main__":
    main()
