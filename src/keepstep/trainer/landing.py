"""Which chunks of a payload are whole when so many of its copies have landed. Pure.

The keeper reads and checksums them while the rest is still on its way, so that little is left to do after the commit.
Copies land in the order in which they were queued: a chunk is whole behind the last of those that write into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepstep.layout import CHUNK_BYTES, num_chunks

Ranges = tuple[tuple[int, int], ...]
"""(begin, end) in the payload, of whole chunks"""

LEAST_BYTES = 32 << 20
MOST_MARKS = 32
"""for each snapshot: the keeper is told of each, and what it has not read yet must fit the socket"""
MOST_RANGES = 16
"""for each mark, for the same reason: of a layout that lands in smaller parts the seal reads the rest"""


def marks(copies: Sequence[tuple[int, int]], payload_bytes: int, shared_offset: int) -> dict[int, Ranges]:
    """By the index of a copy: what became whole since the mark before it, or most of that. Copies are (offset, size).

    Nothing where the payload is so small that the keeper can as well read it afterwards.
    """
    if payload_bytes < 2 * LEAST_BYTES:
        return {}
    own = num_chunks(shared_offset)
    last = [-1] * (own + num_chunks(payload_bytes - shared_offset))
    """by chunk: the last copy that writes into it"""

    def chunk_at(offset: int) -> int:
        if offset < shared_offset:
            return offset // CHUNK_BYTES
        return own + (offset - shared_offset) // CHUNK_BYTES

    for index, (offset, size) in enumerate(copies):
        if size:
            first, end = chunk_at(offset), chunk_at(offset + size - 1) + 1
            last[first:end] = [index] * (end - first)
    found: dict[int, Ranges] = {}
    done = -2
    for index in _ends([size for _, size in copies], max(LEAST_BYTES, payload_bytes // MOST_MARKS)):
        whole = (chunk for chunk, by in enumerate(last) if done < by <= index)
        spans = (_span(chunk, own, payload_bytes, shared_offset) for chunk in whole)
        if ranges := _together(spans)[:MOST_RANGES]:
            found[index] = ranges
        done = index
    return found


def _ends(sizes: Sequence[int], stretch_bytes: int) -> list[int]:
    """Indices where so many bytes have come together, and the last."""
    found, gathered = [], 0
    for index, size in enumerate(sizes):
        gathered += size
        if gathered >= stretch_bytes or index == len(sizes) - 1:
            found.append(index)
            gathered = 0
    return found


def _span(chunk: int, own: int, payload_bytes: int, shared_offset: int) -> tuple[int, int]:
    start, end = (0, shared_offset) if chunk < own else (shared_offset, payload_bytes)
    begin = start + (chunk if chunk < own else chunk - own) * CHUNK_BYTES
    return begin, min(begin + CHUNK_BYTES, end)


def _together(spans: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)
