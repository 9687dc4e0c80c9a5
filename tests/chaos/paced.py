"""A training script that keeps time: `paced.py STEPS REST_S MEGABYTES`. Not a test.

Each step is a real optimizer step over the whole state, a sum over all ranks, a take and a rest; each tells how long
all of it took, and take alone.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import keepstep
from keepstep.testing.facts import tell, tell_restored


def main(steps: int, rest_s: float, megabytes: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count = int(megabytes * (1 << 20) / 4 / 3)  # AdamW keeps two more of each parameter
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(count // 8)) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1e-3)
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        restored = snapshots.restore()
        tell_restored(restored)
        for step in range(restored.step + 1 if restored else 0, steps):
            started = time.monotonic()
            optimizer.step()
            dist.all_reduce(torch.ones(64))
            stepped = time.monotonic()
            pending = snapshots.take(step)
            taken = time.monotonic()
            time.sleep(rest_s)
            ended = time.monotonic()
            tell("step", step=step, step_s=ended - started, take_s=taken - stepped, skipped=pending.reason)
    tell("result", digest="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
