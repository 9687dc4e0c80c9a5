"""A loop that is exact wherever it is killed: shuffled data, noise from workers, dropout, an evaluation that draws.

    KEEPSTEP_RUN_ID=batches python examples/batches.py

Kill it with `kill -9` and run the same command again, as often as you like: the last line is always the same. The lines
that keepstep adds are marked with `# +`.
"""

from __future__ import annotations

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

import keepstep  # +

EPOCHS = 3
PAUSE_S = float(os.environ.get("PAUSE_S", "0.1"))  # time for you to kill it


class Noisy(Dataset[torch.Tensor]):
    """Vectors with noise that is drawn in the worker."""

    def __len__(self) -> int:
        return 250

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 250) + 0.1 * torch.randn(8)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    progress = {"batches": 0}
    print(f"pid {os.getpid()}", flush=True)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}  # +
    with keepstep.Snapshotter(state, loader=loader) as snapshots:  # +
        for epoch, batch in snapshots.batches(epochs=EPOCHS):  # + instead of the two loops over epochs and the loader
            loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress["batches"] += 1
            if progress["batches"] % 10 == 0:
                noisy = model(torch.randn(64, 8)).square().mean()  # an evaluation that draws
                print(f"epoch {epoch}  batch {progress['batches']:3d}  loss {loss:.6f}  {noisy:.6f}", flush=True)
            time.sleep(PAUSE_S)

    print(f"the sum of all weights is {sum(float(p.sum()) for p in model.parameters()).hex()}")


if __name__ == "__main__":
    main()
