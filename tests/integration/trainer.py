"""A small training process for tests: `python trainer.py STEPS [MEGABYTES] [SLEEP_S]`. Not a test.

Prints one JSON line per event. Everything keepstep needs comes through the environment.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from granted import wait_for_grant

import keepstep


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main(steps: int, megabytes: float, sleep_s: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    count = max(1, int(megabytes * (1 << 20) / 4 / 3))  # AdamW keeps two more of each parameter
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(count))])
    optimizer = torch.optim.AdamW(model.parameters())
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        restored = snapshots.restore()
        wait_for_grant(snapshots)
        say(restored=restored.step if restored else None)
        for step in range(restored.step + 1 if restored else 0, steps):
            model[0].grad = torch.ones_like(model[0])
            optimizer.step()
            pending = snapshots.take(step)
            say(step=step, survives=pending.wait(timeout_s=30).name, reason=pending.reason)
            time.sleep(sleep_s)
    say(finished=True)


if __name__ == "__main__":
    numbers = [float(text) for text in sys.argv[1:]] + [1.0, 0.0][len(sys.argv) - 2 :]
    main(int(numbers[0]), numbers[1], numbers[2])
