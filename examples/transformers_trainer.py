"""transformers' Trainer that keeps every step: a tiny GPT-2 on the CPU, half a minute.

    KEEPSTEP_RUN_ID=trainer python examples/transformers_trainer.py

`kill -9` it and run the same command again within ten minutes: it goes on with the next batch, and ends with the same
weights and history as a run that nobody killed. With `torchrun --nproc-per-node=2 --rdzv-backend=keepstep
--rdzv-id=trainer --max-restarts=20` it restarts by itself. The lines that keepstep adds are marked with `# +`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from keepstep.frameworks.transformers import KeepTrainer  # +


class MyTrainer(KeepTrainer, Trainer):  # + in place of Trainer; the first base is keepstep's
    pass


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int, seed: int) -> None:
        self.tokens = torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Pause(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"step {state.global_step}", flush=True)
        time.sleep(float(os.environ.get("PAUSE_S", "0.2")))  # time for you to kill it


def main() -> None:
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=os.environ.get("OUTPUT_DIR", "trainer-output"), num_train_epochs=3, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=7, logging_steps=5, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = MyTrainer(
        model=model, args=arguments, train_dataset=Text(104, 2), eval_dataset=Text(16, 3), callbacks=[Pause()]
    )
    print(f"pid {os.getpid()}", flush=True)
    result = trainer.train()
    print(f"the sum of all weights is {float(sum(weight.sum() for weight in model.parameters())).hex()}")
    print(f"the training loss is {float(result.training_loss).hex()}")


if __name__ == "__main__":
    main()
