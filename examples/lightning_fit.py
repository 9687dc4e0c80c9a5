"""A fit in Lightning that keeps every step: one process, CPU, half a minute.

    pip install 'keepstep[lightning]'
    KEEPSTEP_RUN_ID=lightning python examples/lightning_fit.py

It tells its pid: `kill -9` it from another terminal and run the same command again within ten minutes (the lease). It
goes on after the update that it was at, in the middle of the epoch, and ends with the same weights and the same metrics
as a fit that nobody killed. The two lines that keepstep adds are marked with `# +`.
"""

from __future__ import annotations

import os
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from keepstep.frameworks.lightning import Keep  # +


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        print(f"epoch {self.current_epoch} batch {batch_idx:2d} loss {loss.item():.6f}", flush=True)
        time.sleep(0.1)  # time for you to kill it
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(inputs), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    pl.seed_everything(0)
    inputs = torch.randn(256, 8)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    train, val = DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=64)
    print(f"pid {os.getpid()}", flush=True)

    module = Regression()
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Keep()],  # +
    )
    trainer.fit(module, train, val)

    metrics = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
    print(f"the sum of all weights is {sum(float(p.sum()) for p in module.parameters()).hex()}, metrics {metrics}")


if __name__ == "__main__":
    main()
