"""How much Python runs: the same on any machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Count:
    lines: int = 0


@contextmanager
def counted_lines(count: Count | None = None) -> Iterator[Count]:
    """Lines of Python that this thread runs inside what is called meanwhile; each turn of a loop counts again.
    They are added to `count`, if there is one.

    What one call into C does (a search in a list, a digest) counts as nothing beyond its own line.
    """
    count = count or Count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        count.lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
