"""Checksums of a slot that is still being written: of the chunks that have landed (`trainer/landing.py`).

A hint and no more. What was read belongs to one writing of the slot, named by the sequence of its trainer header, and
the seal takes it for that one only. A trainer that speaks too soon gets a seal that its own bytes fail: such a version
is refused, never restored.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from keepstep.arena import header as h
from keepstep.arena.chunks import SHARED, UNIQUE, Chunk, chunk_spans
from keepstep.arena.slots import DIGEST_BYTES, Arena
from keepstep.errors import Error

log = logging.getLogger("keepstep.keeper")

Ranges = Sequence[tuple[int, int]]
Read = Callable[[Arena, int, list[Chunk]], bytes | None]
"""16 bytes for each chunk, or None: it is not worth it, or cannot be done now"""
MOST_WAITING = 1024
"""words of trainers; those beyond it are not listened to"""


@dataclass
class Writing:
    """One writing of a slot, and what was read of it."""

    sequence: int
    chunks: list[Chunk]
    """of the payload, in order"""
    found: dict[int, bytes] = field(default_factory=dict)
    """by the offset of the chunk"""
    read_s: float = 0.0


class Early:
    """One thread that reads what has landed, slot after slot."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepstep-early")
        self._writings: dict[tuple[str, int], Writing] = {}
        self._waiting = threading.Semaphore(MOST_WAITING)

    def landed(self, arena: Arena, slot: int, sequence: int, ranges: Ranges) -> None:
        """`sequence`: of the header under which the slot is being written. Returns at once."""
        if self._waiting.acquire(blocking=False):
            self._thread.submit(self._landed, arena, slot, sequence, ranges)

    def known(self, arena: Arena, slot: int, committed: int) -> Writing:
        """What was read of the writing whose commit has this sequence. Waits for what is being read."""
        return self._thread.submit(self._take, arena.arena_id, slot, committed - 1).result()

    def forget(self, arena_id: str) -> None:
        self._thread.submit(self._forget, arena_id)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # On the thread

    def _landed(self, arena: Arena, slot: int, sequence: int, ranges: Ranges) -> None:
        self._waiting.release()
        try:
            writing = self._writing(arena, slot, sequence)
            if writing is None or not _in_order(ranges):
                return
            chunks = [chunk for begin, end in ranges for chunk in _inside(writing.chunks, arena, slot, begin, end)]
            started = time.monotonic()
            digests = self._read(arena, slot, chunks) if chunks else None
            writing.read_s += time.monotonic() - started
            for at, chunk in enumerate(chunks if digests else ()):
                assert digests is not None
                writing.found[chunk.span.offset] = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        except (OSError, MemoryError, Error) as error:  # the seal reads all of it then, and says what is wrong
            log.debug("not read early: %r", error)

    def _writing(self, arena: Arena, slot: int, sequence: int) -> Writing | None:
        found = arena.trainer_header(slot)
        if found is None:
            return None
        now, trainer = found
        if (now, trainer.state) not in ((sequence, h.WRITING), (sequence + 1, h.COMMITTED)):
            return None  # it is written anew by now
        key = (arena.arena_id, slot)
        if key not in self._writings or self._writings[key].sequence != sequence:
            payload = [chunk for chunk in chunk_spans(arena, slot, trainer) if chunk.region in (UNIQUE, SHARED)]
            self._writings[key] = Writing(sequence, payload)
        return self._writings[key]

    def _take(self, arena_id: str, slot: int, sequence: int) -> Writing:
        writing = self._writings.pop((arena_id, slot), None)
        return writing if writing is not None and writing.sequence == sequence else Writing(sequence, [])

    def _forget(self, arena_id: str) -> None:
        self._writings = {key: writing for key, writing in self._writings.items() if key[0] != arena_id}


def _in_order(ranges: Ranges) -> bool:
    return all(begin < end for begin, end in ranges) and all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def _inside(chunks: list[Chunk], arena: Arena, slot: int, begin: int, end: int) -> list[Chunk]:
    """Those that lie wholly in this stretch of the payload."""
    start = arena.payload_span(slot).offset
    first = bisect.bisect_left(chunks, start + begin, key=lambda chunk: chunk.span.offset)
    found = []
    for chunk in chunks[first:]:
        if chunk.span.offset + chunk.span.size_bytes > start + end:
            break
        found.append(chunk)
    return found
