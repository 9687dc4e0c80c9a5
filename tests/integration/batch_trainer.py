"""Trains with `snapshots.batches` on every kind of loader, killed at every step. Not a test.

    python batch_trainer.py DIRECTORY CASE...         for each case "equal", or what differs; exit status 1 if anything

Each life is a fork of this process. A life ends by SIGKILL in the step after the one that it was restored from: right
behind its complete snapshot, or with the next batch already fetched. The undisturbed run is without keepstep.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # What torch.optim imports at its first step: done once for all lives.
from granted import wait_for_grant
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep
from keepstep.testing.run import LocalRun

EPOCHS, SAMPLES, BATCH = 2, 26, 4  # seven batches each, the last one smaller
FUNCTION_STEPS = 9
MAX_LIVES = 60

warnings.filterwarnings("ignore", "'set_vital' is deprecated")


class Samples(Dataset[torch.Tensor]):
    """Numbers that name their index, with noise from all generators that it is told to draw from."""

    def __init__(self, noise: str = "") -> None:
        self.noise = noise
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((8,), float(index))
        if self.noise == "global":
            sample = sample + torch.randn(8) + random.random() + float(np.random.normal())
        if self.noise == "own":
            sample = sample + float(self.own.normal())
        if self.noise == "some" and index % 5 == 0:
            sample = sample + torch.randn(8)
        return sample


class Stream(IterableDataset[torch.Tensor]):
    """A stream that knows its position, begins anew at its end, and draws from its own generator."""

    def __init__(self) -> None:
        self.position, self.random = 0, random.Random(5)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        share, shares = (worker.id, worker.num_workers) if worker else (0, 1)
        while self.position < SAMPLES // shares:
            self.position += 1
            yield torch.full((8,), float(self.position * shares + share)) + self.random.random()
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))


class LoadedStream(Stream):
    """Goes on only where it was loaded: torchdata's workers ask a stream that has ended once more."""

    loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.position, self.loaded = self.position if self.loaded else 0, False
        yield from super().__iter__()
        self.position = SAMPLES

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributed(**options: Any) -> DataLoader[Any]:
    data = Samples("global")
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=4), **options)


def weighted(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(), BATCH, sampler=WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], 18), **options)


def batch_sampled(**options: Any) -> DataLoader[Any]:
    data = Samples("some")
    sampler = RandomSampler(data, replacement=True, num_samples=21, generator=seeded(8))
    return DataLoader(data, batch_sampler=BatchSampler(sampler, 5, drop_last=True), **options)


def one_generator(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples("global"), BATCH, shuffle=True, generator=seeded(6), **options)


TWO: dict[str, Any] = {"num_workers": 2}
KEPT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
ALL = {"shuffle": True}
LOADERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Samples(), BATCH, **ALL),
    "plain-2": lambda: DataLoader(Samples(), BATCH, **ALL, **TWO),
    "in-order": lambda: DataLoader(Samples("global"), BATCH, drop_last=True),
    "in-order-2": lambda: DataLoader(Samples("some"), BATCH, drop_last=True, **TWO),
    "noise": lambda: DataLoader(Samples("global"), BATCH, **ALL),
    "noise-2": lambda: DataLoader(Samples("global"), BATCH, **ALL, **TWO),
    "noise-3": lambda: DataLoader(Samples("some"), BATCH, **ALL, num_workers=3),
    "noise-2-kept": lambda: DataLoader(Samples("global"), BATCH, **ALL, **KEPT),
    "own-noise": lambda: DataLoader(Samples("own"), BATCH, **ALL),
    "own-noise-2": lambda: DataLoader(Samples("own"), BATCH, **ALL, **TWO),
    "own-noise-2-kept": lambda: DataLoader(Samples("own"), BATCH, **ALL, **KEPT),
    "subset-2": lambda: DataLoader(Subset(Samples("global"), range(3, 20)), 3, **ALL, **TWO),
    "generator": one_generator,
    "generator-2": lambda: one_generator(**TWO),
    "generator-2-kept": lambda: one_generator(**KEPT),
    "distributed": distributed,
    "distributed-2": lambda: distributed(**TWO),
    "weighted": weighted,
    "weighted-2": lambda: weighted(**TWO),
    "batch-sampler": batch_sampled,
    "batch-sampler-2": lambda: batch_sampled(**TWO),
    "samples": lambda: DataLoader(Samples("global"), batch_size=None, sampler=range(0, SAMPLES, 3)),
    "samples-2": lambda: DataLoader(Samples(), batch_size=None, sampler=range(0, SAMPLES, 3), **TWO),
    "stateful": lambda: StatefulDataLoader(Samples("global"), BATCH, **ALL),
    "stateful-2": lambda: StatefulDataLoader(Samples(), BATCH, **ALL, **TWO),
    "stateful-2-kept": lambda: StatefulDataLoader(Samples(), BATCH, **ALL, **KEPT),
    "stateful-noise-2": lambda: StatefulDataLoader(Samples("global"), BATCH, **ALL, **TWO),
    "stateful-some-3": lambda: StatefulDataLoader(Samples("some"), BATCH, **ALL, num_workers=3),
    "stateful-some-2-kept": lambda: StatefulDataLoader(Samples("some"), BATCH, **ALL, **KEPT),
    "stateful-generator": lambda: StatefulDataLoader(Samples(), BATCH, **ALL, generator=seeded(6)),
    "stateful-distributed": lambda: StatefulDataLoader(
        Samples(), BATCH, sampler=DistributedSampler(Samples(), num_replicas=2, rank=1, seed=4)
    ),
    "stateful-distributed-2": lambda: StatefulDataLoader(
        Samples(), BATCH, sampler=DistributedSampler(Samples(), num_replicas=2, rank=1, seed=4), **TWO
    ),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stateful-stream": lambda: StatefulDataLoader(Stream(), BATCH),
    "stateful-stream-2": lambda: StatefulDataLoader(LoadedStream(), BATCH, **TWO),
    "dataset": Stream,
    "function": lambda: lambda: torch.randn(BATCH, 8),
    "numbered": lambda: lambda number: torch.randn(BATCH, 8, generator=seeded(number)),
    "accumulate": lambda: DataLoader(Samples("global"), BATCH, **ALL),
    "accumulate-2": lambda: DataLoader(Samples("global"), BATCH, **ALL, **TWO),
}


class Training:
    """A small model with dropout, trained on the batches of one case."""

    def __init__(self, case: str, out: Path) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = LOADERS[case]()
        self.out = out
        self.accumulated = 3 if case.startswith("accumulate") else 1
        self.progress = {"batches": 0}

    def train(self, epoch: int, batch: torch.Tensor) -> bool:
        """Train on one batch; returns whether the optimizer stepped."""
        loss = self.model(batch / SAMPLES).square().mean()
        loss.backward()
        number = self.progress["batches"]
        self.progress["batches"] = number + 1
        with (self.out / "steps").open("a") as file:
            print(number, epoch, hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:12], loss.item().hex(), file=file)
        if self.progress["batches"] % self.accumulated:
            return False
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.progress["batches"] % 5 == 0:
            torch.randn(3)  # as an evaluation may: behind the step
        return True

    def finish(self) -> None:
        state = [*self.model.state_dict().values(), torch.randn(3), torch.tensor([random.random(), np.random.rand()])]
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state)).hexdigest()
        (self.out / "end").write_text(digest)

    def run_bare(self) -> None:
        for epoch, batch in self.bare_batches():
            self.train(epoch, batch)
        self.finish()

    def bare_batches(self) -> Iterator[tuple[int, Any]]:
        if not isinstance(self.loader, Iterable):
            numbers = itertools.count() if self.loader.__code__.co_argcount else itertools.repeat(None)
            for number in itertools.islice(numbers, FUNCTION_STEPS):
                yield 0, self.loader() if number is None else self.loader(number)
            return
        for epoch in range(EPOCHS):
            sampler = getattr(self.loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            for batch in self.loader:
                yield epoch, batch

    def run(self, local: LocalRun) -> None:
        """One life. It is killed after its first step, unless that was the last."""
        if (self.out / "steps").exists():
            torch.manual_seed(77)  # Nothing may be right by chance.
        state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        limit: dict[str, Any] = {"epochs": EPOCHS} if isinstance(self.loader, Iterable) else {"steps": FUNCTION_STEPS}
        with keepstep.Snapshotter(state, local.config(), loader=self.loader) as snapshots:
            taken: list[int] = []

            def take(step: int, take: Callable[[int], Any] = snapshots.take) -> Any:
                assert wait_for_grant(snapshots)
                pending = take(step)
                assert pending.wait(timeout_s=60.0), pending
                taken.append(step)
                if step % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return pending

            snapshots.take = take  # type: ignore[method-assign]
            for epoch, batch in snapshots.batches(**limit):
                if taken:  # The next batch is fetched.
                    os.kill(os.getpid(), signal.SIGKILL)
                self.train(epoch, batch)
        self.finish()


def forked(life: Callable[[], None], log: Path) -> int:
    """Run a life in a child process; returns its exit code, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 2)
        life()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def compare(case: str, directory: Path) -> str:
    """What differs between the undisturbed run and the killed one; empty where nothing does."""
    bare, killed = directory / "bare", directory / "killed"
    for place in (bare, killed):
        place.mkdir(parents=True)
    log = directory / "log"
    if forked(lambda: Training(case, bare).run_bare(), log):
        return f"the undisturbed run failed: {log.read_text()[-2000:]}"
    codes: list[int] = []
    with LocalRun(f"batches-{case}") as local:
        while not codes or (codes[-1] == -signal.SIGKILL and len(codes) < MAX_LIVES):
            codes.append(forked(lambda: Training(case, killed).run(local), log))
        if codes[-1]:
            return f"life {len(codes)} ended with {codes[-1]}: {log.read_text()[-2000:]}"
    expected = (bare / "steps").read_text().splitlines()
    seen = (killed / "steps").read_text().splitlines()
    by_number = {int(line.split()[0]): line for line in expected}
    wrong = [line for line in seen if by_number.get(int(line.split()[0])) != line]
    if wrong:
        return f"life of {len(codes)}: {wrong[0]!r} is {by_number.get(int(wrong[0].split()[0]))!r} undisturbed"
    if {int(line.split()[0]) for line in seen} != set(by_number):
        return f"{len(set(seen))} of {len(expected)} batches were trained"
    if (bare / "end").read_text() != (killed / "end").read_text():
        return "the final states differ"
    if len(codes) < len(expected) // 3:
        return f"only {len(codes)} lives"
    return ""


def main() -> int:
    directory, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    failed = False
    for case in cases or LOADERS:
        difference = compare(case, Path(directory) / case)
        print(f"{case}: {difference or 'equal'}", flush=True)
        failed = failed or bool(difference)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
