"""Replicas that should be the same and are not: which, and whose. Pure, and the reading that it needs.

The digest of a class is a sum over its chunks, so that local ranks that hold different chunks of it add
up, in any order, to what another node has. When two nodes differ, every node says what it holds chunk by
chunk, and the smaller party is named: this is also how silent data corruption shows itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import xxhash

from keepstep import layout as layouts
from keepstep.arena.slots import DIGEST_BYTES
from keepstep.keeper.shelf import Book
from keepstep.keeper.words import ShareChunk
from keepstep.layout import FULL

MAX_PATHS = 16


def share_digests(book: Book) -> tuple[tuple[str, bytes], ...]:
    """(class, digest) of what one slot holds of state that other nodes keep in full too."""
    total: dict[str, int] = defaultdict(int)
    for (class_id, chunk), number in book.stored(FULL).items():
        own = book.table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        total[class_id] ^= int.from_bytes(xxhash.xxh3_128_digest(chunk.to_bytes(8, "little") + own), "little")
    return tuple((class_id, value.to_bytes(DIGEST_BYTES, "little")) for class_id, value in sorted(total.items()))


def share_chunks(book: Book, class_id: str) -> list[ShareChunk]:
    """What one slot holds of a class, with the paths that lie in each chunk."""
    stream = next((stream for stream in book.layout.streams if stream.class_id == class_id), None)
    if stream is None:
        return []
    found = []
    for (owner, chunk), number in book.stored(FULL).items():
        if owner == class_id:
            digest = book.table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            found.append(ShareChunk(chunk, book.sealed.trainer.rank, digest, _paths(stream, chunk)))
    return found


def _paths(stream: layouts.Stream, chunk: int) -> tuple[str, ...]:
    start, end = chunk * layouts.CHUNK_BYTES, (chunk + 1) * layouts.CHUNK_BYTES
    inside = [entry.path for entry in stream.entries if entry.offset < end and entry.offset + entry.size_bytes > start]
    return tuple(inside[:MAX_PATHS])


def odd_one_out(answers: Sequence[Sequence[ShareChunk]]) -> tuple[int, str, tuple[str, ...]]:
    """(rank, sentence, paths): which replicas differ from the most."""
    by_chunk: dict[int, list[ShareChunk]] = defaultdict(list)
    for answer in answers:
        for one in answer:
            by_chunk[one.chunk].append(one)
    ranks: set[int] = set()
    paths: dict[str, None] = {}
    tied = False
    for held in by_chunk.values():
        counts = Counter(one.digest for one in held).most_common()
        if len(counts) < 2:
            continue
        tied = tied or counts[0][1] == counts[1][1]
        for one in held:
            paths.update(dict.fromkeys(one.paths))
            if one.digest != counts[0][0] or counts[0][1] == counts[1][1]:
                ranks.add(one.rank)
    if not paths:
        return -1, "replicated state differs between nodes, and not any more when they were asked", ()
    named = ", ".join(list(paths)[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
    side = "differ from each other" if tied else "differ from the other replicas"
    text = f"replicated state has diverged: {named}: {who} {side} (silent corruption, or not replicated after all)"
    return min(ranks), text, tuple(paths)
