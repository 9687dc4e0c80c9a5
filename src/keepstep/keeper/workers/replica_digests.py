"""What this node says of the replicated state that it holds, so that the coordinator can compare.

The digest of a class is a sum over what is held of it, so that ranks and nodes add up in any order. Where every node
holds all of it, the sums are equal. Where each holds a share, data and parity are fingerprinted, and since those obey
the arithmetic of the code, the sum over all nodes is zero unless somebody's replica is not that of the others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import xxhash

from keepstep.arena.checksum import MapFunction
from keepstep.arena.slots import DIGEST_BYTES
from keepstep.keeper.coordinator.messages import ReplicaAudit, ReplicaAuditAnswer, ReplicaSetDigest, ReplicaUnit
from keepstep.keeper.transfer.chunk_store import SealedSnapshot
from keepstep.layout import CHUNK_BYTES, FULL, ReplicaSet, StoredChunk
from keepstep.parity import galois
from keepstep.parity.code import coefficients
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, fingerprint

MAX_PATHS = 64


class _Own(threading.local):
    """Of each thread: new memory for every chunk would have them wait for each other at the kernel."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(CHUNK_BYTES))


_own = _Own()


def class_digests(book: SealedSnapshot, over: MapFunction = map) -> tuple[ReplicaSetDigest, ...]:
    """Of everything in one slot that other nodes have too."""
    whole = _whole(book)
    shared = [stream for stream in book.holdings.streams if stream.mode != FULL]
    coded = [ReplicaSetDigest(stream.class_id, _sum_of_share(book, stream, over), stream.n) for stream in shared]
    return tuple(sorted([*whole, *coded], key=lambda one: one.class_id))


def answer(book: SealedSnapshot, asked: ReplicaAudit) -> ReplicaAuditAnswer | None:
    """For one slot; None when it holds nothing of the class."""
    stream = next((stream for stream in book.holdings.streams if stream.class_id == asked.class_id), None)
    if stream is None:
        return None
    if asked.chunks:
        whole = next(one for one in book.layout().streams if one.class_id == asked.class_id)
        return ReplicaAuditAnswer(paths=_paths(whole, asked.chunks))
    rank = book.sealed.trainer.rank
    if stream.mode == FULL:
        units = [ReplicaUnit(chunk, -1, rank, found) for chunk, found in _table_digests(book, stream)]
        return ReplicaAuditAnswer(stream.n, 0, tuple(units))
    coded = [ReplicaUnit(_place(one), one.code_row, rank, _read(book, one)) for one in stream.stored()]
    return ReplicaAuditAnswer(stream.n, stream.m, tuple(coded))


def _whole(book: SealedSnapshot) -> list[ReplicaSetDigest]:
    """Of chunks that are the same on every node: from their checksums, nothing is read."""
    total: dict[str, int] = defaultdict(int)
    for stream in book.holdings.streams:
        if stream.mode == FULL:
            for chunk, found in _table_digests(book, stream):
                named = chunk.to_bytes(8, "little") + found
                total[stream.class_id] ^= int.from_bytes(xxhash.xxh3_128_digest(named), "little")
    return [ReplicaSetDigest(class_id, value.to_bytes(DIGEST_BYTES, "little")) for class_id, value in total.items()]


def _sum_of_share(book: SealedSnapshot, stream: ReplicaSet, over: MapFunction) -> bytes:
    """One sum for each row of the code: parity there equals the combination of the data it was made from.

    Every stripe has weights of its own, or the same fault in two stripes would cancel out.
    """
    k = stream.n - stream.m
    sums = [bytes(FINGERPRINT_BYTES)] * stream.m
    stored = stream.stored()
    for one, found in zip(stored, over(partial(_read, book), stored), strict=True):
        stripe, source = (one.row, -1) if one.chunk < 0 else divmod(one.chunk, k)
        weighted = _times(_weights(stripe), found)
        for row in range(stream.m):
            if source >= 0:
                factor = coefficients(stream.m, row, k)[source]
                sums[row] = galois.add(sums[row], galois.scale(factor, weighted))
            elif row == one.code_row:
                sums[row] = galois.add(sums[row], weighted)
    return b"".join(sums)


def _weights(stripe: int) -> bytes:
    drawn = xxhash.xxh3_128_digest(stripe.to_bytes(8, "little"))
    return bytes(value or 1 for value in drawn)  # zero would not count at all


def _times(weights: bytes, values: bytes) -> bytes:
    return bytes(map(galois.mul, weights, values))


def _read(book: SealedSnapshot, stored: StoredChunk) -> bytes:
    """The fingerprint of a stored chunk; the padding of a short one is zero and changes nothing."""
    start = book.arena.payload_span(book.slot).offset + stored.offset
    window = _own.buffer[: stored.size_bytes]
    book.arena.segment.read_into(start, window)
    return fingerprint(window)


def _place(stored: StoredChunk) -> int:
    return stored.chunk if stored.chunk >= 0 else stored.row


def _table_digests(book: SealedSnapshot, stream: ReplicaSet) -> Iterator[tuple[int, bytes]]:
    """The checksums of the chunks of a stream that the slot holds."""
    for chunk in stream.chunks:
        number = book.find(stream.class_id, chunk)
        assert number is not None
        yield chunk, book.table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


def _paths(stream: ReplicaSet, chunks: tuple[int, ...]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for chunk in chunks:
        start, end = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        inside = (entry for entry in stream.entries if entry.offset < end and entry.offset + entry.size_bytes > start)
        found.update(dict.fromkeys(entry.path for entry in inside))
    return tuple(found)[:MAX_PATHS]
