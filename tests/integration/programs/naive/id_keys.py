"""An optimizer that is none of torch's, as NorMuonAndAdam of modded-nanogpt: its state has the ids of parameters.

FIXED=1: its state has their names.
"""

import os

import torch

import keepstep

FIXED = os.environ.get("FIXED") == "1"


class Momentum:
    def __init__(self, named, lr):
        self.named = list(named)
        self.lr = lr
        self.buffers = {self.key(name, p): torch.zeros_like(p) for name, p in self.named}

    def key(self, name, p):
        return name if FIXED else id(p)

    @torch.no_grad()
    def step(self):
        for name, p in self.named:
            buffer = self.buffers[self.key(name, p)]
            buffer.mul_(0.9).add_(p.grad)
            p.sub_(buffer, alpha=self.lr)
            p.grad = None

    def state_dict(self):
        return {"buffers": self.buffers}

    def load_state_dict(self, state):
        for key, value in state["buffers"].items():
            if key in self.buffers:
                self.buffers[key].copy_(value)


torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = Momentum(model.named_parameters(), lr=0.1)
with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
    restored = snapshots.restore()
    for step in range(restored.step + 1 if restored else 0, 8):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        snapshots.take(step)
