"""A small training loop with one mistake, named by the environment variable MISTAKE; none: exact.

Each mistake is one that a reader of the README may make. The loop has epochs, an evaluation, dropout, a scheduler, and
prints its loss.
"""

import copy
import os
import random

import numpy as np
import torch
from torch.nn import functional

import keepstep

MISTAKE = os.environ.get("MISTAKE", "")
EPOCHS, PER_EPOCH, BATCH = 3, 3, 4
STEPS = EPOCHS * PER_EPOCH


def wrong(name):
    return name == MISTAKE


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 8)
        self.outer = torch.nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(6), persistent=not wrong("buffer"))
        self.calls = 0
        self.cache = None

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        x = x - self.mean
        if wrong("counter in a module") and self.training:
            self.calls += 1
            x = x * (1 + 0.01 * self.calls)
        if wrong("tensor in a module"):
            self.cache = x.detach().mean(0) if self.cache is None else 0.5 * self.cache + 0.5 * x.detach().mean(0)
            x = x + self.cache
        return self.outer(functional.dropout(torch.tanh(self.inner(x)), 0.2, self.training))


class Average:
    """An exponential moving average of the parameters."""

    def __init__(self, model):
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def update(self, model):
        for name, tensor in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(tensor.detach(), alpha=0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)


class Forgetful(Average):
    """Its load_state_dict drops what was saved."""

    def load_state_dict(self, state):
        pass


class Clipper:
    """Clips at a running mean of norms."""

    def __init__(self):
        self.history = [1.0]

    def clip(self, parameters):
        norm = torch.nn.utils.clip_grad_norm_(parameters, sum(self.history) / len(self.history))
        self.history = [*self.history[-3:], float(norm)]


if wrong("python random not seeded"):
    random.seed()
else:
    random.seed(7)
if not wrong("numpy seeded anew at restore"):
    np.random.seed(7)
torch.manual_seed(int.from_bytes(os.urandom(4), "big") if wrong("not seeded") else 7)
data = torch.randn(PER_EPOCH * BATCH, 6)
target = data.sum(1, keepdim=True)
generator = torch.Generator().manual_seed(3)
shuffler = random.Random(3)
noise = np.random.default_rng(3)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
average = Forgetful(model) if wrong("load_state_dict drops") else Average(model)
teacher = copy.deepcopy(model)
clipper = Clipper()
position = {"order": list(range(PER_EPOCH * BATCH))}
counts = {"patience": 0, "best": 1e9, "mean": 0.0}
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average, "position": position}
state |= {"generator": generator, "shuffler": shuffler, "noise": noise, "counts": counts, "teacher": teacher}
OUTSIDE = {
    "average outside": "average", "scheduler outside": "scheduler", "generator outside": "generator",
    "python generator outside": "shuffler", "numpy generator outside": "noise", "optimizer outside": "optimizer",
    "order outside": "position", "counts outside": "counts", "teacher outside": "teacher",
}  # fmt: skip
if MISTAKE in OUTSIDE:
    del state[OUTSIDE[MISTAKE]]
norms = {"scale": torch.ones(6)}
snapshots = keepstep.Snapshotter(state, keepstep.Config(every=1))
restored = None if wrong("restore never called") else snapshots.restore()
begin = restored.step + 1 if restored else 0
if restored and wrong("step lost"):
    begin += 1
if restored and wrong("step repeated"):
    begin -= 1
if restored and wrong("epoch begun anew"):
    begin = begin // PER_EPOCH * PER_EPOCH
if wrong("draw after restore"):
    torch.randn(3)
if wrong("numpy seeded anew at restore") or wrong("seeded after restore"):
    np.random.seed(7)
    random.seed(7)
    torch.manual_seed(11)
if wrong("learning rate set after restore"):
    optimizer.param_groups[0]["lr"] = 0.05
if wrong("weights set after restore"):
    with torch.no_grad():
        model.outer.bias.zero_()


def fetch(step):
    if step % PER_EPOCH == 0:
        shuffler.shuffle(position["order"])
    at = step % PER_EPOCH * BATCH
    indices = position["order"][at : at + BATCH]
    extra = torch.randn(BATCH, 6, generator=generator) + torch.from_numpy(noise.normal(size=(BATCH, 6))).float()
    if wrong("python random not seeded"):
        extra = extra + random.random()
    return data[indices] + 0.1 * extra + 0.1 * torch.randn(BATCH, 6), target[indices]


def evaluate():
    model.eval()
    with torch.no_grad():
        value = functional.mse_loss(model(data + 0.01 * torch.randn_like(data)), target).item()
    model.train()
    return value


total = 0.0
batch = fetch(begin) if wrong("batch fetched ahead") else None
for step in range(begin, STEPS):
    if wrong("take before the step"):
        snapshots.take(step)
    x, y = batch if batch is not None else fetch(step)
    if wrong("scale outside"):
        norms["scale"] = 0.9 * norms["scale"] + 0.1 * x.abs().mean(0)
        x = x / norms["scale"]
    if wrong("accumulation"):
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    else:
        loss = functional.mse_loss(model(x), y) + 0.1 * functional.mse_loss(model(x), teacher(x).detach())
        loss = loss / (1 + counts["mean"])
        optimizer.zero_grad()
        loss.backward()
        if wrong("running mean of norms"):
            clipper.clip(model.parameters())
        optimizer.step()
    if wrong("batch fetched ahead"):
        batch = fetch(step + 1)
    if not wrong("scheduler after take"):
        scheduler.step()
    average.update(model)
    if step % 2 == 0:
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.data.lerp_(new.data, 0.5)
    total = total + loss.item() if wrong("mean outside") else loss.item()
    counts["mean"] = loss.item()
    print(f"step {step}: loss {total / (step + 1) if wrong('mean outside') else total:.6f}", flush=True)
    if step % PER_EPOCH == 1 and not wrong("evaluation after take"):
        value = evaluate()
        if value < counts["best"]:
            counts.update(best=value, patience=0)
        else:
            counts["patience"] += 1
            optimizer.param_groups[0]["lr"] *= 0.5
    if wrong("kernels"):
        with torch.no_grad():
            model.outer.bias.add_(1e-9 * (os.getpid() % 1000))
    if not wrong("take before the step"):
        snapshots.take(step // 2 * 2 + 1 if wrong("same step twice") else step)
    if wrong("scheduler after take"):
        scheduler.step()
    if wrong("evaluation after take") and step % PER_EPOCH == 1:
        evaluate()
    if wrong("weights clamped after take"):
        with torch.no_grad():
            model.outer.weight.clamp_(-0.2, 0.2)
    if wrong("fails after restore") and restored and step == begin + 1:
        raise StopIteration
snapshots.close()
