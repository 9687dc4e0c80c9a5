"""Ranges of a stream: which bytes of which entries a stretch of it is made of, and what lies between them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.layout import CHUNK_BYTES, Entry, ReplicaSet


@dataclass(frozen=True)
class ChunkRun:
    """Chunks that follow each other in the stream and in the payload: one stretch of both."""

    start: int
    """in the stream"""
    offset: int
    """in the payload"""
    size_bytes: int


def cut(entries: Sequence[Entry], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(entry, begin, end) for every entry that has bytes in [start, end) of its stream; begin and end count in it."""
    first = max(0, bisect_right(entries, start, key=lambda entry: entry.offset) - 1)
    for index in range(first, len(entries)):
        entry = entries[index]
        if entry.offset >= end:
            return
        begin, stop = max(start, entry.offset), min(end, entry.offset + entry.size_bytes)
        if begin < stop:
            yield index, begin - entry.offset, stop - entry.offset


def runs(stream: ReplicaSet) -> list[ChunkRun]:
    """The chunks of the stream that a slot stores, as few stretches as possible."""
    found: list[ChunkRun] = []
    for stored in stream.stored():
        if stored.chunk < 0:
            continue
        start, size = stored.chunk * CHUNK_BYTES, stream.chunk_bytes(stored.chunk)
        last = found[-1] if found else ChunkRun(-1, -1, 0)
        if (last.start + last.size_bytes, last.offset + last.size_bytes) == (start, stored.offset):
            found[-1] = ChunkRun(last.start, last.offset, last.size_bytes + size)
        else:
            found.append(ChunkRun(start, stored.offset, size))
    return found


def gaps(stream: ReplicaSet) -> list[tuple[int, int]]:
    """(offset, size) in the payload of the bytes of stored chunks that belong to no entry, and of their padding."""
    found: list[tuple[int, int]] = []
    for run in runs(stream):
        at = run.start
        for index, begin, end in cut(stream.entries, run.start, run.start + run.size_bytes):
            entry = stream.entries[index]
            if entry.offset + begin > at:
                found.append((run.offset + at - run.start, entry.offset + begin - at))
            at = entry.offset + end
        if at < run.start + run.size_bytes:
            found.append((run.offset + at - run.start, run.start + run.size_bytes - at))
    for stored in stream.stored():
        if stored.chunk >= 0 and stored.size_bytes > stream.chunk_bytes(stored.chunk):
            used = stream.chunk_bytes(stored.chunk)
            found.append((stored.offset + used, stored.size_bytes - used))
    return found
