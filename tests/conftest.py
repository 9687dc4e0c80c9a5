"""Fixtures that several directories share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lives import Zygote


STARTING_TORCH = Path(__file__).parent / "integration"
CHAOS = Path(__file__).parent / "chaos"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs what computes beside what starts torch again and again, on two cores.

    A file of tests/integration that belongs to the first says so by its `pytestmark`.
    """
    for item in items:
        if STARTING_TORCH not in item.path.parents:
            item.add_marker("computing")
        if CHAOS in item.path.parents:
            item.add_marker("chaos")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that has imported torch, to fork trainers from (tests/chaos/lives.py)."""
    from lives import Zygote

    made = Zygote()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def restore_returns_early() -> None:
    """Asked for by tests of what happens while the memory for snapshots is still being prepared."""


@pytest.fixture(autouse=True)
def _restore_waits_for_a_grant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`restore()` returns before the memory for snapshots is ready. Most tests want to capture their first step."""
    if "torch" not in sys.modules or "restore_returns_early" in request.fixturenames:
        return
    from granted import wait_for_grant

    from keepstep.trainer.snapshotter import Snapshotter

    restore: Callable[..., Any] = Snapshotter.restore

    def restore_and_wait(self: Snapshotter, *args: Any, **options: Any) -> Any:
        restored = restore(self, *args, **options)
        wait_for_grant(self)
        return restored

    monkeypatch.setattr(Snapshotter, "restore", restore_and_wait)
