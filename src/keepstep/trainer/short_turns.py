"""Short turns of the interpreter while one thread has a lot to do in small calls, and somebody waits for it.

Every call that leaves the interpreter, as each one into torch does, gives other threads a turn: 5 ms, by default, for
one that only computes, such as an import or a data loader's. A restore makes thousands of such calls: beside one busy
thread 1,168 tensors took 33 s instead of 0.07, and take 0.7 with short turns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 0.0001


@contextmanager
def short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
