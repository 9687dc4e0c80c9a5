"""Every kind of loader, with and without workers, killed at every step of two epochs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from batch_trainer import LOADERS

SCRIPT = Path(__file__).parents[1] / "integration" / "batch_trainer.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", LOADERS)
def test_samples_are_those_of_the_undisturbed_run(case: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), case],
        capture_output=True, text=True, timeout=580, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == f"{case}: equal\n", done.stdout + done.stderr[-2000:]
