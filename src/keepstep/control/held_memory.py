"""Memory of the node that a trainer or a launcher holds for its keeper, and returns when a new keeper takes over.

Invariants:
- A memfd stays open from the keeper's Hold until a keeper sends its name in `forget`, or until its holder closes.
- The descriptors in here are never lent: readers get duplicates, so forgetting one cannot close what is being read.
- A refused memfd stays held: the next keeper may accept it, and nothing else has these bytes.
- A keeper that replaces a dead one gets the membership again; without it, it would act as the only node of the job.

Written by the connection's reading thread (Hold) and by the owner; any thread may read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator

from keepstep.control.client import KeeperClient
from keepstep.control.membership import with_own_card
from keepstep.control.messages import Adopted, CardIs, Done, GiveBack, Hold, Membership, WantCard

MAX_FDS_PER_REQUEST = 60  # A message carries at most 64 descriptors.

log = logging.getLogger("keepstep")


class HeldMemory:
    """Duplicates of the node's memfds by arena id, and the membership that a new keeper must know."""

    def __init__(self, membership: Membership | None = None, *, request_timeout_s: float) -> None:
        """`membership`: given where this process, and no launcher, introduces the keeper to its peers."""
        self._membership, self._request_timeout_s = membership, request_timeout_s
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._duplicates: set[int] = set()
        self._closed = False

    def names(self) -> list[str]:
        """Names of everything held."""
        with self._lock:
            return list(self._fds)

    def hold(self, arena_id: str, fd: int) -> None:
        """Keep a duplicate of `fd`, unless this memory is held already. The caller keeps its own descriptor."""
        with self._lock:
            if arena_id not in self._fds and not self._closed:
                self._fds[arena_id] = os.dup(fd)

    def apply(self, message: Hold, fds: list[int]) -> None:
        """Forget and hold what the keeper asks for. Takes ownership of `fds`."""
        self.forget(message.forget)
        for arena_id, fd in zip(message.arena_ids, fds, strict=True):
            with self._lock:
                if arena_id in self._fds or self._closed:
                    os.close(fd)
                else:
                    self._fds[arena_id] = fd

    def forget(self, arena_ids: Iterable[str]) -> None:
        """Close these memfds. Unknown names are ignored."""
        with self._lock:
            for arena_id in arena_ids:
                if arena_id in self._fds:
                    os.close(self._fds.pop(arena_id))

    def forget_all(self) -> None:
        """Close every memfd; new ones may be held afterwards."""
        self.forget(self.names())

    @contextlib.contextmanager
    def duplicates(self) -> Iterator[dict[str, int]]:
        """Duplicates of everything held, by name: valid inside the `with` block, whatever is forgotten meanwhile."""
        with contextlib.ExitStack() as stack:
            duplicates: dict[str, int] = {}
            with self._lock:
                for arena_id, fd in self._fds.items():
                    duplicates[arena_id] = duplicate = os.dup(fd)
                    self._duplicates.add(duplicate)
                    stack.callback(self._close_duplicate, duplicate)
            yield duplicates

    def give_back(self, client: KeeperClient) -> dict[str, str]:
        """Offer everything held to a new keeper. Returns what it refused, with the reasons."""
        refused: dict[str, str] = {}
        with self.duplicates() as duplicates:
            held = list(duplicates.items())
            for start in range(0, len(held), MAX_FDS_PER_REQUEST):
                batch = dict(held[start : start + MAX_FDS_PER_REQUEST])
                answer, _ = client.request(
                    GiveBack(list(batch)), Adopted, timeout_s=self._request_timeout_s, fds=list(batch.values())
                )
                refused.update(answer.refused)
        for arena_id, reason in refused.items():
            log.error("the keeper refused arena %s: %s", arena_id, reason)
        return refused

    def set_membership(self, membership: Membership) -> None:
        """The membership of a new incarnation: every keeper from now on gets this one."""
        with self._lock:
            self._membership = membership

    def reintroduce(self, client: KeeperClient) -> CardIs | None:
        """Send the membership to a keeper that does not have it. Returns the keeper's card if it was sent."""
        with self._lock:
            membership = self._membership
        if membership is None:
            return None
        card, _ = client.request(WantCard(), CardIs, timeout_s=self._request_timeout_s)
        known_card = membership.nodes[membership.node_rank]
        if card.card == known_card and card.members_number >= membership.incarnation.number:
            return None  # The same keeper as before: only the connection was lost.
        membership = with_own_card(membership, card.card)
        client.request(membership, Done, timeout_s=self._request_timeout_s)
        with self._lock:
            if self._membership is not None and self._membership.incarnation == membership.incarnation:
                self._membership = membership
        return card

    def close(self) -> None:
        """Close every memfd, and whatever is to be held later at once."""
        with self._lock:
            self._closed = True
        self.forget_all()

    def close_in_forked_child(self) -> None:
        """Close all descriptors in a child process, where other threads do not exist and may have held the lock."""
        self._lock = threading.Lock()
        self._closed = True
        for fd in (*self._fds.values(), *self._duplicates):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds, self._duplicates = {}, set()

    def _close_duplicate(self, fd: int) -> None:
        with self._lock:
            self._duplicates.discard(fd)
            os.close(fd)
