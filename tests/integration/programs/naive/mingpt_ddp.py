"""The trainer of minGPT-ddp (pytorch/examples) with keepstep's lines: two ranks, two loader workers, evaluation.

FIXED=1: an epoch whose last step is done is entered again, what was done is skipped, and random states are set at the
first batch that is new. BATCHES=1: keepstep asks for the batches.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import keepstep

FIXED, BATCHES = os.environ.get("FIXED") == "1", os.environ.get("BATCHES") == "1"
VOCABULARY, BLOCK = 11, 6


class Characters(Dataset):
    def __init__(self, num):
        self.data = torch.arange(num) * 7 % VOCABULARY

    def __len__(self):
        return len(self.data) - BLOCK

    def __getitem__(self, index):
        return self.data[index : index + BLOCK], self.data[index + 1 : index + BLOCK + 1]


class Trainer:
    def __init__(self, model, optimizer, train_dataset, test_dataset):
        self.optimizer = optimizer
        self.train_loader = self._prepare(train_dataset)
        self.test_loader = self._prepare(test_dataset)
        self.model = DistributedDataParallel(model)
        self.global_step = 0
        self.progress = {"step": 0}
        state = {"model": self.model, "optimizer": optimizer, "progress": self.progress}
        self.snapshots = keepstep.Snapshotter(state, loader=self.train_loader if BATCHES else None)
        self.restored = self.snapshots.restore()
        if self.restored:
            self.global_step = self.restored.step + 1

    def _prepare(self, dataset):
        return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=2)

    def _run_epoch(self, epoch, loader, train, skip=0):
        loader.sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if index < skip:
                continue
            if skip and index == skip:
                self.restored.restore_rng()
            self._run_batch(epoch, x, y, train)
            if train:
                self.snapshots.take(self.global_step)
                self.global_step += 1
        if skip and skip == len(loader):
            self.restored.restore_rng()

    def _run_batch(self, epoch, x, y, train):
        self.model.train(train)
        with torch.set_grad_enabled(train):
            loss = cross_entropy(self.model(x).view(-1, VOCABULARY), y.reshape(-1))
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            print(f"[RANK{dist.get_rank()}] Epoch {epoch} | Train Loss {loss.item():.5f}", flush=True)

    def train_by_batches(self, epochs):
        for epoch, (x, y) in self.snapshots.batches(epochs=epochs):
            self._run_batch(epoch, x, y, True)
            self.progress["step"] += 1
            if self.progress["step"] % len(self.train_loader) == 0:
                self._run_epoch(epoch, self.test_loader, False)
        self.snapshots.close()

    def train(self, epochs):
        length = len(self.train_loader)
        begin, skip = self.global_step // length, 0
        if FIXED and self.restored:
            begin, skip = self.restored.step // length, self.restored.step % length + 1
        for epoch in range(begin, epochs):
            self._run_epoch(epoch, self.train_loader, True, skip if epoch == begin else 0)
            self._run_epoch(epoch, self.test_loader, False)
        self.snapshots.close()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = (torch.nn.Embedding(VOCABULARY, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, VOCABULARY))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, Characters(70), Characters(40))
    if BATCHES:
        trainer.train_by_batches(3)
    else:
        trainer.train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
