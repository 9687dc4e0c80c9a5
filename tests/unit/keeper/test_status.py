"""Names in the status and the metrics."""

from __future__ import annotations

import re
from pathlib import Path

import keepstep.keeper.node
import keepstep.keeper.status as status


def test_every_counter_of_the_core_has_a_name_and_a_help_text() -> None:
    folder = Path(keepstep.keeper.node.__file__).parent
    counted = {
        name for path in folder.glob("*.py") for name in re.findall(r"\.count\(\s*\"(\w+)\"", path.read_text("utf-8"))
    }
    assert counted == set(status.COUNTERS)
