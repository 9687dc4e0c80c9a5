"""`keepstep.find` names the step that `restore()` then gives, before the objects of the training exist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import keepstep
from keepstep.testing.run import LocalRun

TRAINER = Path(__file__).with_name("trainer_with_find.py")


def test_step_is_none_on_a_first_start_and_the_snapshotter_goes_on_with_the_link() -> None:
    with LocalRun() as local:
        config = local.config()
        assert keepstep.find(config) is None
        assert keepstep.find(config) is None
        with keepstep.Snapshotter({"state": {"x": torch.zeros(1)}}, config) as snapshots:
            assert snapshots.restore() is None
            assert snapshots.take(0).wait() is keepstep.Survives.PROCESS
            with pytest.raises(keepstep.ConfigError, match="another Snapshotter of this run is open"):
                keepstep.find(config)


def test_other_settings_than_those_of_the_snapshotter_are_refused() -> None:
    with LocalRun() as local:
        assert keepstep.find(local.config()) is None
        with pytest.raises(keepstep.ConfigError, match="the settings are not those that"):
            keepstep.Snapshotter({"x": torch.zeros(1)}, local.config(every=2))


def test_step_after_a_kill_is_the_one_that_is_restored() -> None:
    with LocalRun() as local:
        environ = {**os.environ, **local.environ}
        command = [sys.executable, str(TRAINER)]
        lives = [
            subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
            for _ in range(3)
        ]
    assert [life.returncode for life in lives] == [-signal.SIGKILL, -signal.SIGKILL, 0], [life.stderr for life in lives]
    assert [life.stdout.split() for life in lives] == [["None", "None"], ["2", "2"], ["5", "5"]]
