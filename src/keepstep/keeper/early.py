"""Checksums of a slot that is still being written: of the chunks that have landed (`trainer/landing.py`).

A hint and no more. What was read belongs to one writing of the slot, named by the sequence of its trainer header, and
the seal takes it for that one only. A trainer that speaks too soon gets a seal that its own bytes fail: such a version
is refused, never restored.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from keepstep.arena import records as h
from keepstep.arena.chunks import SHARED, UNIQUE, Chunk, chunk_spans
from keepstep.arena.slots import DIGEST_BYTES, Arena

log = logging.getLogger("keepstep.keeper")

Ranges = Sequence[tuple[int, int]]
Read = Callable[[Arena, int, list[Chunk]], bytes | None]
"""16 bytes for each chunk, or None: it is not worth it, or cannot be done now"""
MOST_WAITING = 1024
"""words of trainers; those beyond it are not listened to"""
AT_ONCE = 4
"""words that are heeded together when they have piled up: each call has its price. Who seals waits for one call"""


@dataclass
class Writing:
    """One writing of a slot, and what was read of it."""

    sequence: int
    chunks: list[Chunk]
    """of the payload, in order"""
    found: dict[int, bytes] = field(default_factory=dict)
    """by the offset of the chunk"""
    read_s: float = 0.0


@dataclass(frozen=True)
class Word:
    """What a trainer said of its slot."""

    arena: Arena
    slot: int
    sequence: int
    ranges: Ranges

    @property
    def key(self) -> tuple[str, int]:
        return self.arena.arena_id, self.slot

    def is_more_of(self, other: Word) -> bool:
        return (self.key, self.sequence) == (other.key, other.sequence)


class Early:
    """One thread that reads what has landed. It stands back while a slot is sealed: somebody waits for that."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._words: deque[Word] = deque()
        self._reading: Word | None = None
        self._seals = 0
        self._ended = False
        self._writings: dict[tuple[str, int], Writing] = {}
        self._thread = threading.Thread(target=self._run, name="keepstep-early", daemon=True)
        self._thread.start()

    def landed(self, arena: Arena, slot: int, sequence: int, ranges: Ranges) -> None:
        """`sequence`: of the header under which the slot is being written. Returns at once."""
        with self._changed:
            if len(self._words) < MOST_WAITING and _in_order(ranges):
                self._words.append(Word(arena, slot, sequence, ranges))
                self._changed.notify_all()

    @contextlib.contextmanager
    def standing_back(self) -> Iterator[None]:
        with self._changed:
            self._seals += 1
        try:
            yield
        finally:
            with self._changed:
                self._seals -= 1
                self._changed.notify_all()

    def known(self, arena: Arena, slot: int, committed: int) -> Writing:
        """What was read of the writing whose commit has this sequence. What was not begun is left to the caller."""
        key, sequence = (arena.arena_id, slot), committed - 1
        with self._changed:
            self._words = deque(word for word in self._words if word.key != key)
            self._changed.wait_for(lambda: self._reading is None or self._reading.key != key)
            writing = self._writings.pop(key, None)
        return writing if writing is not None and writing.sequence == sequence else Writing(sequence, [])

    def forget(self, arena_id: str) -> None:
        with self._changed:
            self._words = deque(word for word in self._words if word.arena.arena_id != arena_id)
            self._writings = {key: writing for key, writing in self._writings.items() if key[0] != arena_id}

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    # On the thread

    def _run(self) -> None:
        while (word := self._next()) is not None:
            try:
                self._heed(word)
            except Exception as error:  # the seal reads all of it then, and says what is wrong
                log.debug("not read early: %r", error)
            finally:
                with self._changed:
                    self._reading = None
                    self._changed.notify_all()

    def _next(self) -> Word | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._words and not self._seals))
            if self._ended:
                return None
            first = self._words.popleft()
            more: list[Word] = []
            most = 1 if self._another_is_awaited(first) else AT_ONCE
            while self._words and len(more) < most - 1 and self._words[0].is_more_of(first):
                more.append(self._words.popleft())
            ranges = tuple(itertools.chain(first.ranges, *(word.ranges for word in more)))
            self._reading = replace(first, ranges=ranges)
            return self._reading

    def _another_is_awaited(self, word: Word) -> bool:
        """The snapshot before it has landed and will be sealed in a moment: it must find nobody busy for long."""
        return any(arena == word.arena.arena_id and slot != word.slot for arena, slot in self._writings)

    def _heed(self, word: Word) -> None:
        writing = self._writing(word)
        if writing is None:
            return
        start = word.arena.payload_span(word.slot).offset
        chunks = [chunk for begin, end in word.ranges for chunk in _inside(writing.chunks, start + begin, start + end)]
        if not chunks:
            return
        started = time.monotonic()
        digests = self._read(word.arena, word.slot, chunks)
        writing.read_s += time.monotonic() - started
        if digests is not None:
            own = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
            writing.found.update(zip((chunk.span.offset for chunk in chunks), own, strict=True))

    def _writing(self, word: Word) -> Writing | None:
        found = word.arena.trainer_header(word.slot)
        if found is None:
            return None
        now, trainer = found
        if (now, trainer.state) not in ((word.sequence, h.WRITING), (word.sequence + 1, h.COMMITTED)):
            return None  # it is written anew by now
        if word.arena.sealed(word.slot) is not None:
            return None  # too late: nobody would take it, and it would look as if a seal were still to come
        with self._changed:
            known = self._writings.get(word.key)
            if known is None or known.sequence != word.sequence:
                payload = [c for c in chunk_spans(word.arena, word.slot, trainer) if c.region in (UNIQUE, SHARED)]
                known = self._writings[word.key] = Writing(word.sequence, payload)
            return known


def _in_order(ranges: Ranges) -> bool:
    return all(begin < end for begin, end in ranges) and all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def _inside(chunks: list[Chunk], begin: int, end: int) -> list[Chunk]:
    """Those that lie wholly in this stretch of the arena."""
    first = bisect.bisect_left(chunks, begin, key=lambda chunk: chunk.span.offset)
    found = []
    for chunk in chunks[first:]:
        if chunk.span.offset + chunk.span.size_bytes > end:
            break
        found.append(chunk)
    return found
