"""A training loop around accelerate that keeps every update: CPU, half a minute.

    KEEPSTEP_RUN_ID=accelerate python examples/accelerate_loop.py

`kill -9` it and run the same command again within ten minutes: it goes on with the next batch, and ends with the same
weights as a run that nobody killed. With `torchrun --nproc-per-node=2 --rdzv-backend=keepstep --rdzv-id=accelerate
--max-restarts=20` it restarts by itself. The lines that keepstep adds or changes are marked with `# +`.
"""

from __future__ import annotations

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from keepstep.frameworks.accelerate import resume  # +

EPOCHS = 3


def main() -> None:
    set_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    inputs = torch.randn(168, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    loader = DataLoader(TensorDataset(inputs[:160], inputs[:160].sum(dim=1)), batch_size=8, shuffle=True)
    held_out = DataLoader(TensorDataset(inputs[160:], inputs[160:].sum(dim=1)), batch_size=8)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    accelerator.print(f"pid {os.getpid()}", flush=True)

    with resume(accelerator, model, optimizer, loader, scheduler) as run:  # +
        if run.restored:
            accelerator.print(f"restored update {run.restored.step}", flush=True)
        for epoch in run.epochs(EPOCHS):  # + in place of range(EPOCHS)
            model.train()
            for x, y in run.batches():  # + in place of loader
                with accelerator.accumulate(model):
                    loss = (model(x).squeeze(1) - y).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accelerator.print(f"epoch {epoch} batch {run.batch} loss {loss.item():.6f}", flush=True)
                time.sleep(float(os.environ.get("PAUSE_S", "0.1")))  # time for you to kill it
            model.eval()
            with torch.no_grad():
                errors = [(model(x).squeeze(1) - y).square().mean().item() for x, y in held_out]
            accelerator.print(f"after epoch {epoch} the error is {sum(errors) / len(errors):.6f}", flush=True)

    weights = accelerator.unwrap_model(model).parameters()
    accelerator.print(f"the sum of all weights is {sum(weight.sum().item() for weight in weights).hex()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
