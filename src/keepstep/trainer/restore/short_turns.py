"""Short turns of the interpreter while one thread has a lot to do in small calls, and somebody waits for it.

Every call that leaves the interpreter, as each one into torch does, gives other threads a turn: 5 ms, by default, for
one that only computes, such as an import or a data loader's. A restore makes thousands of such calls: beside one busy
thread 1,168 tensors took 33 s instead of 0.07, and take 0.7 with short turns.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 0.0001

_lock = threading.Lock()
_num_inside = 0
_before_s = 0.0
"""what the user has set: it comes back when the last one is done, and in children that are forked meanwhile"""


@contextmanager
def short_turns() -> Iterator[None]:
    """From any number of threads."""
    global _num_inside, _before_s
    with _lock:
        if not _num_inside:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, TURN_S))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                _put_back()


def _put_back() -> None:
    sys.setswitchinterval(_before_s + 5e-7)  # it counts microseconds, and rounds down


def _in_forked_child() -> None:
    global _num_inside, _lock
    _lock = threading.Lock()
    if _num_inside:
        _num_inside = 0
        _put_back()


os.register_at_fork(after_in_child=_in_forked_child)
