"""Settings of a trainer under `keepstep check`."""

from __future__ import annotations

import pytest

from keepstep.config import Config
from keepstep.control.check_events import CHECK
from keepstep.trainer.connection.environment import find_settings


def test_check_captures_every_step_under_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Config(every=5, run_id="training")
    assert find_settings(own).every == 5
    monkeypatch.setenv(CHECK, "/tmp/a-check")
    monkeypatch.setenv("KEEPSTEP_RUN_ID", "check-1")
    monkeypatch.setenv("KEEPSTEP_RUNTIME_DIR", "/tmp/a-check/r")
    settings = find_settings(own)
    assert (settings.every, settings.run_id, settings.runtime_dir) == (1, "check-1", "/tmp/a-check/r")
