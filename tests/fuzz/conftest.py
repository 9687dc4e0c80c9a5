"""What the live targets share with tests/many."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ks") as directory:
        yield Path(directory)
