"""Fixtures that several directories share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
