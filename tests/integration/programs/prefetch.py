"""The loop of nanoGPT: the next batch is fetched before `take`.

CARRIED=1: the fetched batch is part of the state. BATCHES=1: keepstep asks for the batches.
"""

import os

import torch

import keepstep

CARRIED = os.environ.get("CARRIED") == "1"

torch.manual_seed(1337)
data = torch.arange(1000) % 7
model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def get_batch():
    at = torch.randint(990, (4,))
    return torch.stack([data[i : i + 8] for i in at]), torch.stack([data[i + 1 : i + 9] for i in at])


def train_step(iter_num, X, Y, fetch_next):
    """One iteration; the next batch is fetched while the device would compute."""
    loss = torch.nn.functional.cross_entropy(model(X).view(-1, 7), Y.view(-1))
    following = fetch_next()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
    return following


def train():
    X, Y = get_batch()
    ahead = {"X": X, "Y": Y}
    state = {"model": model, "optimizer": optimizer}
    if CARRIED:
        state["ahead"] = ahead
    with keepstep.Snapshotter(state) as snapshots:
        restored = snapshots.restore()
        iter_num = 0
        if restored:
            iter_num = restored.step + 1
            if CARRIED:
                X, Y = ahead["X"], ahead["Y"]
        while iter_num < 10:
            X, Y = train_step(iter_num, X, Y, get_batch)
            ahead.update(X=X, Y=Y)
            snapshots.take(iter_num)
            iter_num += 1


def train_by_batches():
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}, loader=get_batch) as snapshots:
        for _, (X, Y) in snapshots.batches(steps=10):
            train_step("", X, Y, lambda: None)


if os.environ.get("BATCHES") == "1":
    train_by_batches()
else:
    train()
