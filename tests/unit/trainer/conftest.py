"""Fixtures of the tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keepstep.testing.run import LocalRun


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRun]:
    """A run of this process alone; at its end nothing of it is left."""
    with LocalRun() as run:
        for name, value in run.environ.items():
            monkeypatch.setenv(name, value)
        yield run
