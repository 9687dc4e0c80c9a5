"""A training script for LocalCluster: `cluster_trainer.py STEPS [SLEEP_S] [MEGABYTES] [plain | early]`. Not a test.

Every rank has parameters of its own (as in FSDP) and the steps couple them, so that the last digest says whether
every rank went through every step exactly once. `plain`: no keepstep, only steps, for tests of rounds.
`early`: the Snapshotter is there before the process group.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from keepstep.testing.facts import tell, tell_restored


def main(steps: int, sleep_s: float, megabytes: float, *, plain: bool, early: bool) -> None:
    torch.set_num_threads(1)
    if not early:
        dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    count = max(64, int(megabytes * (1 << 20) / 4 / 3))  # AdamW keeps two more of each parameter
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(count))])
    optimizer = torch.optim.AdamW(model.parameters())
    if plain:
        tell_restored(None)
        train(range(steps), sleep_s, model, optimizer, None)
    else:
        from granted import wait_for_grant

        import keepstep

        with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
            if early:
                dist.init_process_group("gloo")
            os.environ.setdefault("KEEPSTEP_INCARNATION", f"{snapshots.status().incarnation}:0")  # for `tell`
            restored = snapshots.restore()
            wait_for_grant(snapshots)
            tell_restored(restored)
            train(range(restored.step + 1 if restored else 0, steps), sleep_s, model, optimizer, snapshots)
    digest = hashlib.sha256(model[0].detach().numpy().tobytes())
    for value in optimizer.state[model[0]].values():
        digest.update(value.numpy().tobytes())
    tell("result", digest=digest.hexdigest())
    dist.destroy_process_group()


def train(steps: range, sleep_s: float, model: Any, optimizer: torch.optim.Optimizer, snapshots: Any) -> None:
    parameter = model[0]
    for step in steps:
        total = parameter.detach()[:64].clone()
        dist.all_reduce(total)
        parameter.grad = torch.full_like(parameter, float(total.mean()) + torch.rand(()).item())
        optimizer.step()
        if snapshots is not None:
            snapshots.take(step)
        tell("step", step=step)
        time.sleep(sleep_s)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word not in ("plain", "early")]
    numbers = [float(word) for word in words] + [0.05, 1.0][len(words) - 1 :]
    main(int(numbers[0]), numbers[1], numbers[2], plain="plain" in sys.argv, early="early" in sys.argv)
