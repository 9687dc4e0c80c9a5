"""transformers' Trainer with keepstep in a callback, as its documentation of callbacks suggests.

FIXED=1: with keepstep's adapter for transformers. EVALUATE=1: it evaluates, which logs how long that takes.
"""

import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import keepstep


class KeepStep(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        objects = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler}
        self.snapshots = keepstep.Snapshotter(objects)
        restored = self.snapshots.restore()
        if restored:
            state.global_step = restored.step

    def on_step_end(self, args, state, control, **kwargs):
        self.snapshots.take(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self.snapshots.close()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        out = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


set_seed(42)
rows = [{"x": torch.randn(6), "labels": torch.randn(1)} for _ in range(24)]
arguments = TrainingArguments(
    output_dir=os.environ["TMPDIR"], per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
    eval_strategy="steps" if os.environ.get("EVALUATE") == "1" else "no", eval_steps=2,
)  # fmt: skip
if os.environ.get("FIXED") == "1":
    from keepstep.frameworks.transformers import keep

    keep(Trainer(model=Net(), args=arguments, train_dataset=rows, eval_dataset=rows)).train()
else:
    Trainer(model=Net(), args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[KeepStep()]).train()
