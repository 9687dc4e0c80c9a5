"""A training with Muon, as in modded-nanogpt, with keepstep's lines: exact as it stands.

The optimizer keeps its momentum in its groups, made at the first step.
"""

import torch
from torch.nn.functional import cross_entropy

import keepstep


def orthogonalise(update, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update / (update.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if "buffers" not in group:
                group["buffers"] = [torch.zeros_like(p) for p in group["params"]]
            for p, buffer in zip(group["params"], group["buffers"], strict=True):
                buffer.lerp_(p.grad, 1 - group["momentum"])
                p.add_(orthogonalise(p.grad.lerp(buffer, group["momentum"])), alpha=-group["lr"])


torch.manual_seed(0)
tokens = torch.arange(4000) * 31 % 13
model = torch.nn.Sequential(
    torch.nn.Embedding(13, 16), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 13)
)
matrices = [p for p in model[1:].parameters() if p.ndim == 2]
others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
optimizers = [torch.optim.Adam(others, lr=0.01), Muon(matrices)]
with keepstep.Snapshotter({"model": model, "optimizers": optimizers}) as snapshots:
    restored = snapshots.restore()
    for step in range(restored.step + 1 if restored else 0, 12):
        batch = tokens[step * 64 : step * 64 + 65]
        loss = cross_entropy(model(batch[:-1]), batch[1:])
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / 12)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        print(f"step:{step}/12 train_loss:{loss.item():.4f}", flush=True)
        snapshots.take(step)
