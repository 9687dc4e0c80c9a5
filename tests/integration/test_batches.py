"""`snapshots.batches` trains on the batches of the undisturbed run, with any loader and wherever it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("batch_trainer.py")
# One of each kind; all of them are in tests/chaos/test_every_loader.py.
CASES = ("noise-2", "stateful", "stream", "function", "accumulate")


@pytest.mark.timeout(300)
def test_killed_at_every_step_every_kind_of_loader_gives_the_batches_of_the_undisturbed_run(tmp_path: Path) -> None:
    said = tmp_path / "said"  # Not a pipe: a loader worker that outlives its killed trainer would hold it open.
    with open(said, "w") as output:
        subprocess.run(
            [sys.executable, "-W", "error", str(SCRIPT), str(tmp_path), *CASES],
            stdout=output, stderr=subprocess.STDOUT, timeout=280, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    text = said.read_text()
    assert [line for line in text.splitlines() if line.endswith(": equal")] == [f"{case}: equal" for case in CASES], (
        text
    )
