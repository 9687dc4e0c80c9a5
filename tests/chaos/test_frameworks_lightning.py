"""Fits in Lightning that are killed again and again end as the fit without keepstep, in every bit that they log.

Thirteen batches an epoch. With accumulation over two batches that is seven updates: 0 is the first of an epoch, 5 the
last but one, 6 the last (its snapshot is taken when the next epoch asks for its first batch), 7 the first of the next.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning_lives import FitRecord, FitServer, compare

from keepstep.testing.run import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_fit.py"

EDGES = ["0", "5", "6", "7", "13"]
BATCH_EDGES = ["0", "11", "12", "13", "25"]  # without accumulation

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"kills": [*EDGES, "batch 0 2", "batch 1 4", "batch 2 11"]},
    "metrics and stored checkpoints": {"kills": EDGES, "metrics": True, "save": True},
    "validation per epoch": {"kills": [*EDGES, "val 7 1", "val 14 2"], "validation": True, "metrics": True},
    "validation every five batches": {
        "kills": ["1", "2", "3", *EDGES, "val 2 0", "val 5 2", "val 9 1"], "validation": True, "val_check_interval": 5,
    },
    "plateau scheduler per update": {
        "kills": ["1", *EDGES, "val 2 2"], "validation": True, "val_check_interval": 5, "plateau": "step",
    },
    "plateau scheduler per epoch": {"kills": ["11", "12", "13", "20", "26"], "accumulate": 1, "plateau": "epoch"},
    "manual optimization": {"kills": BATCH_EDGES, "optimization": "manual", "validation": True},
    "two optimizers": {"kills": [*BATCH_EDGES, "batch 1 6"], "optimization": "two", "metrics": True},
    "two workers": {"kills": [*EDGES, "val 7 1"], "workers": 2, "validation": True},
    "workers that stay": {"kills": [*EDGES, "val 7 1"], "workers": 2, "persistent": True, "validation": True},
    "every third update": {"kills": ["3", "5", "6", "7", "10", "15"], "every": 3},
    "a number of updates": {"kills": EDGES, "max_steps": 17, "validation": True},
}  # fmt: skip

PARALLEL: dict[str, dict[str, Any]] = {
    "two ranks": {
        "ranks": 2, "samples": 100, "kills": ["0", "1@5", "6", "1@7", "val 7 1"], "validation": True, "metrics": True,
    },
    "three ranks": {"ranks": 3, "samples": 150, "kills": ["0", "2@5", "1@6", "7", "2@batch 1 5"], "epochs": 2},
    "three ranks, manual": {
        "ranks": 3, "samples": 150, "kills": ["0", "2@11", "1@12", "13", "20"], "epochs": 2, "optimization": "two",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[FitServer]:
    this = FitServer()
    yield this
    this.close()


@pytest.fixture
def records() -> Iterator[list[FitRecord]]:
    made: list[FitRecord] = []
    yield made
    for record in made:
        record.clear()


def make(records: list[FitRecord], **options: Any) -> FitRecord:
    records.append(FitRecord(**options))
    return records[-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_killed_fit_ends_as_the_fit_without_keepstep(case: str, server: FitServer, records: list[FitRecord]) -> None:
    options = dict(CASES[case])
    kills = options.pop("kills")
    truth, killed = make(records, keep=False, **options), make(records, kills=kills, **options)
    assert truth.finish(server) == 0
    assert killed.finish(server) == len(kills)
    compare(truth, killed)
    killed.check_no_trace()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", PARALLEL)
def test_killed_ranks_end_as_the_fit_without_keepstep(case: str, records: list[FitRecord]) -> None:
    options = dict(PARALLEL[case])
    kills = options.pop("kills")
    truth, killed = make(records, keep=False, **options), make(records, kills=kills, **options)
    truth.launch(backend="c10d")
    killed.launch(backend="keepstep")
    assert killed.num_killed == len(kills)
    compare(truth, killed, options["ranks"])


@pytest.mark.timeout(600)
def test_memory_comes_before_the_checkpoint_on_disk(server: FitServer, records: list[FitRecord]) -> None:
    first = make(records, keep=False, epochs=1, save=True)
    first.finish(server)
    checkpoint = str(first.out / "checkpoints" / "last.ckpt")
    truth = make(records, keep=False, checkpoint=checkpoint)
    killed = make(records, checkpoint=checkpoint, kills=["7", "12", "13", "14", "batch 1 3"])
    assert truth.finish(server) == 0
    assert killed.finish(server) == 5
    compare(truth, killed)


@pytest.mark.timeout(300)
def test_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    endings = []
    for kill in ("", "epoch 2 batch 17"):
        with LocalRun("example") as run:
            if kill:
                assert live(run, kill)[0] == -signal.SIGKILL
            code, lines = live(run)
            assert code == 0, lines
            endings.append(lines[-1])
    assert re.match("the sum of all weights is", endings[0])
    assert endings[0] == endings[1]


def live(run: LocalRun, kill: str | None = None) -> tuple[int, list[str]]:
    """One life of the example, perhaps killed when it prints this."""
    lines = []
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE)], env={**os.environ, **run.environ}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if kill and kill in line:
                process.kill()
    return process.returncode, lines
