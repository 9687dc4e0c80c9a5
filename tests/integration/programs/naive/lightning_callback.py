"""Lightning's Trainer with keepstep in a callback, as its documentation of callbacks suggests.

FIXED=1: with keepstep's adapter for Lightning. CHECKPOINT=1: with checkpoints of Lightning's, in the same directory at
each start; EMPTIED=1: which is emptied where nothing is restored.
"""

import os
import shutil
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import keepstep


class KeepStep(lightning.Callback):
    def on_fit_start(self, trainer, module):
        state = {"model": module, "optimizer": trainer.optimizers[0]}
        self.snapshots = keepstep.Snapshotter(state)
        restored = self.snapshots.restore()
        self.step = restored.step + 1 if restored else 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.snapshots.take(self.step)
        self.step += 1

    def on_fit_end(self, trainer, module):
        self.snapshots.close()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        source, targets = batch
        return torch.nn.functional.mse_loss(self.net(source), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(42, verbose=False)
data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))
callbacks = [KeepStep()]
if os.environ.get("FIXED") == "1":
    from keepstep.frameworks.lightning import Keep

    callbacks = [Keep()]
checkpoints = os.environ.get("CHECKPOINT") == "1"
if checkpoints:
    emptied = os.environ.get("EMPTIED") == "1"
    directory = Path(os.environ["TMPDIR"], "checkpoints-of-a-run-with-a-long-name")
    if emptied and keepstep.find() is None:
        shutil.rmtree(directory, ignore_errors=True)
    callbacks.append(lightning.pytorch.callbacks.ModelCheckpoint(directory, enable_version_counter=not emptied))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=checkpoints, callbacks=callbacks,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), DataLoader(data, batch_size=4, shuffle=True))
