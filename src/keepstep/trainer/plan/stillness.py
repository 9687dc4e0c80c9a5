"""Is everything still where it was? `take` looks at a share of it, the copy thread at all of it.

Layout and sources of a snapshot are cached, and valid while every place of the state holds the same tensor at the same
address. To look at all of them takes the training thread about a microsecond for each tensor. So a state that has not
moved for a few snapshots is trusted: inside `take` one share is looked at, another one each time, dealt over all of it,
so that what moves many tensors (`module.to`, a swap with averaged weights, off-loading) shows at once; behind it, while
bytes are on their way, everything. What has moved voids that snapshot, and trust has to be earned again.

A state that moves whenever training goes on, as FSDP's does in forward, shows that in its first snapshots: it is looked
at in full inside every `take`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LOOKS = 3
"""full looks inside `take`, and as many behind it, before a share is enough"""
MAX_BREACHES = 3
"""so often trust may be broken before it is never given again"""
MAX_SHARES = 32
SHARE_ITEMS = 8
"""fewer are not worth a share of their own"""

HOLD_S = 0.0005
"""for so long a look may hold the interpreter. To get it back from a thread that never waits takes ten times as long:
it is not given up after every check, or the snapshot would be committed late"""

MOVED = "a tensor of the state was moved or replaced without being noticed inside take"

Check = Callable[[], bool]


def deal(items: Sequence[T]) -> list[list[T]]:
    """Into shares. Shuffled, because models repeat themselves: each share shall see something of every kind."""
    items = list(items)
    random.Random(len(items)).shuffle(items)
    count = max(1, min(MAX_SHARES, len(items) // SHARE_ITEMS))
    return [items[number::count] for number in range(count)]


@dataclass(frozen=True)
class SpotCheck:
    """What one `take` looks at."""

    share: int | None
    """None: everything"""
    era: int
    """looks behind a layout that is no more say nothing of the next one"""


class Stillness:
    """How far one state is trusted not to move. `glance` is for the training thread, `look` for the copy thread."""

    def __init__(self, *, restless: bool = False) -> None:
        """`restless`: it is known to move."""
        self._lock = threading.Lock()
        self._restless = restless
        self._era = self._looks = self._breaches = self._turn = 0

    def glance(self) -> SpotCheck:
        """What to look at in this `take`."""
        with self._lock:
            if self._restless or self._looks < LOOKS:
                return SpotCheck(None, self._era)
            self._turn += 1
            return SpotCheck(self._turn, self._era)

    def start_again(self) -> SpotCheck:
        """There is another layout, or something has moved: look at everything."""
        with self._lock:
            self._forget()
            return SpotCheck(None, self._era)

    def _forget(self) -> None:
        self._looks = 0
        self._era += 1

    def look(self, checks: Sequence[Check], glance: SpotCheck, never: Sequence[Check] = ()) -> str:
        """Behind a `take` that had this glance. Returns why its snapshot is void, or nothing.

        `never`: what `take` does not look at, because nothing that trains ever changes it.
        """
        if not _all(never):
            self.start_again()
            return MOVED
        if self._restless and glance.share is None:
            return ""  # there is nothing to learn, and nothing that was not looked at
        still = _all(checks)
        with self._lock:
            return self._learn(glance, still=still)

    def _learn(self, glance: SpotCheck, *, still: bool) -> str:
        if still:
            self._looks += glance.era == self._era
            return ""
        if glance.share is None:  # it was where it should be, and has moved since: that is how this state is
            self._restless = True
            return ""
        self._breaches += 1
        self._restless = self._restless or self._breaches >= MAX_BREACHES
        self._forget()
        return MOVED


def _all(checks: Sequence[Check]) -> bool:
    """Each check runs outside the interpreter's loop, and so holds it: the training thread may be waiting."""
    since = time.perf_counter()
    for check in checks:
        if not check():
            return False
        if time.perf_counter() - since > HOLD_S:
            time.sleep(0)
            since = time.perf_counter()
    return True
