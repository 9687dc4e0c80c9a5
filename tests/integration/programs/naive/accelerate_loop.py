"""The loop of accelerate's examples with keepstep's lines. STATEFUL=1: with use_stateful_dataloader.

FIXED=1: with keepstep's adapter for accelerate.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import keepstep

set_seed(42)
stateful = os.environ.get("STATEFUL") == "1"
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
dataset = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def train_step(step, source, targets):
    loss = torch.nn.functional.mse_loss(model(source), targets)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.6f}", flush=True)


if os.environ.get("FIXED") == "1":
    from keepstep.frameworks.accelerate import resume

    with resume(accelerator, model, optimizer, loader, scheduler) as run:
        for _ in run.epochs(2):
            model.train()
            for source, targets in run.batches():
                train_step(run.step, source, targets)
else:
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with keepstep.Snapshotter(state) as snapshots:
        restored = snapshots.restore()
        step = restored.step + 1 if restored else 0
        for _ in range(step // len(loader), 2):
            model.train()
            for source, targets in loader:
                train_step(step, source, targets)
                snapshots.take(step)
                step += 1
