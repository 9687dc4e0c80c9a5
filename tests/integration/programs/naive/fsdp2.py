"""The FSDP2 example of pytorch/examples with keepstep's lines: exact as it stands."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import keepstep


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, 2 * width)
        self.outer = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + torch.nn.functional.dropout(self.outer(torch.relu(self.inner(x))), 0.1, self.training)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(8) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        restored = snapshots.restore()
        for step in range(restored.step + 1 if restored else 0, 10):
            x = torch.randn(4, 8)
            loss = model(x).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            snapshots.take(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
