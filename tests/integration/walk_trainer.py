"""A training script for `walked_files`: it opens and closes the windows in which functions are recorded. Not a test.

One `take` at a time, in step with its device, so that the window has one snapshot in it, as in a run that is going on.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from granted import wait_for_grant
from walked_files import RESTORE, TAKE, Windows

import keepstep
from keepstep.testing.facts import tell, tell_restored
from keepstep.types import Survives

WARM = 4  # snapshots before the one that is walked: plans are made, the first ones are compared in full
PROTECTED_S = 30.0


def main(cuda: bool) -> None:
    torch.set_num_threads(1)
    windows = Windows(os.environ["KEEPSTEP_TEST_WALK"])
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 16))
    model.to("cuda" if cuda else "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        restored = snapshots.restore()
        dist.barrier()
        if rank == 0:
            windows.close(RESTORE)
        tell_restored(restored)
        step, walked = restored.step if restored else -1, 0
        while walked <= WARM:
            step += 1
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            wait_for_grant(snapshots)
            dist.barrier()
            last = walked == WARM and restored is None
            if last and rank == 0:
                windows.open(TAKE)
            dist.barrier()
            pending = snapshots.take(step)
            if not pending.skipped:
                pending.wait(Survives.NODE, timeout_s=PROTECTED_S)
            dist.barrier()
            if last and rank == 0:
                windows.close(TAKE)
            counted = torch.tensor([int(not pending.skipped and pending.survives is Survives.NODE)])
            dist.all_reduce(counted, op=dist.ReduceOp.MIN)
            walked += int(counted)
            assert not (last and not int(counted)), f"the walked snapshot was not protected: {pending}"
        tell("step", step=step)
        while restored is None:
            time.sleep(1)  # until a node is lost, and the launchers end this process
        tell("result", digest="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main("cuda" in sys.argv)
