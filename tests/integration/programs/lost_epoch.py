"""After a restore the place in the epoch is right, and the epochs are counted from 0 again. RIGHT=1: they are not."""

import os
import time

import torch

import keepstep

EPOCHS, PER_EPOCH = 3, 3

torch.manual_seed(7)
data = torch.randn(PER_EPOCH, 4, 6)
model = torch.nn.Linear(6, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
began = time.monotonic()
with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
    restored = snapshots.restore()
    step = restored.step + 1 if restored else 0
    first = step // PER_EPOCH if os.environ.get("RIGHT") == "1" else 0
    for epoch in range(first, EPOCHS):
        print(f"epoch {epoch}", flush=True)
        for at in range(step % PER_EPOCH, PER_EPOCH):
            optimizer.zero_grad()
            model(data[at]).square().mean().backward()
            optimizer.step()
            spent = time.monotonic() - began
            snapshots.take(step)
            step += 1
