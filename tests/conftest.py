"""Fixtures that several directories share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lives import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that has imported torch, to fork trainers from (tests/chaos/lives.py)."""
    from lives import Zygote

    made = Zygote()
    try:
        yield made
    finally:
        made.close()
