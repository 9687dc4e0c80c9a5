"""A training script that fails in the way that its last argument names: `failing_trainer.py FACTS HOW`. Not a test.

Each start adds a line to FACTS/starts: the step that it restored, or the error that `restore()` raised.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

FACTS, HOW = Path(sys.argv[1]), sys.argv[2]
LAST_STEP = 3


def note(text: object) -> int:
    """Returns the number of starts."""
    with (FACTS / "starts").open("a") as file:
        file.write(f"{text}\n")
    return len((FACTS / "starts").read_text().splitlines())


def before_torch() -> None:
    """Ends that need no training."""
    if HOW == "exit":
        note("start")
        sys.exit(3)
    if HOW == "killed":
        if note("start") < 6:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)


def main() -> None:
    import torch
    from granted import wait_for_grant

    import keepstep

    first = not (FACTS / "starts").exists()
    size = 4 if first or HOW != "another-model" else 5
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with keepstep.Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        try:
            restored = snapshots.restore()
        except keepstep.Error as error:
            note(error.message)
            raise
        note(restored and restored.step)
        wait_for_grant(snapshots)
        for step in range(restored.step + 1 if restored else 0, LAST_STEP + 1):
            if step == LAST_STEP:
                raise ValueError("a batch that no model can bear")
            model(torch.ones(1, size)).sum().backward()
            optimizer.step()
            snapshots.take(step).wait()


if __name__ == "__main__":
    before_torch()
    main()
