"""Make the Nth effect fail: `with fail_nth(3) as fault: ...`, then 4, then 5, until `fault.met` is False."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from keepstep import faults


@dataclass
class Fault:
    """The effects that were reached, and the one that failed."""

    nth: int
    make: Callable[[str], BaseException]
    only: str = ""
    passed: list[str] = field(default_factory=list)
    met: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        if not name.startswith(self.only):
            return
        with self._lock:
            self.passed.append(name)
            if len(self.passed) != self.nth:
                return
            self.met = name
        raise self.make(name)


def out_of_memory(name: str) -> BaseException:
    return OSError(errno.ENOMEM, f"injected at {name}")


@contextlib.contextmanager
def fail_nth(nth: int, *, only: str = "", make: Callable[[str], BaseException] = out_of_memory) -> Iterator[Fault]:
    """Make the Nth effect whose name begins with `only` raise; all others succeed."""
    fault = Fault(nth, make, only)
    faults.install(fault)
    try:
        yield fault
    finally:
        faults.install(None)
