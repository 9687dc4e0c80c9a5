"""multigpu_torchrun of pytorch/examples with keepstep's lines, the loader a StatefulDataLoader in the state.

FIXED=1: the loader is a plain one, the loop skips what was done and sets random states at the first batch that is new.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep

FIXED = os.environ.get("FIXED") == "1"


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.train_data = train_data
        self.optimizer = optimizer
        self.model = DistributedDataParallel(model)
        state = {"model": self.model, "optimizer": self.optimizer}
        if not FIXED:
            state["loader"] = train_data
        self.snapshots = keepstep.Snapshotter(state)
        self.restored = self.snapshots.restore()
        self.step = self.restored.step + 1 if self.restored else 0

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.snapshots.take(self.step)
        self.step += 1

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for index, (source, targets) in enumerate(self.train_data):
            if FIXED and epoch * len(self.train_data) + index < self.step:
                continue
            if FIXED and self.restored and self.step == self.restored.step + 1:
                self.restored.restore_rng()
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(self.step // len(self.train_data), max_epochs):
            self._run_epoch(epoch)
        self.snapshots.close()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(40, 20), torch.rand(40, 1))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    kind = DataLoader if FIXED else StatefulDataLoader
    loader = kind(dataset, batch_size=5, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer).train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
