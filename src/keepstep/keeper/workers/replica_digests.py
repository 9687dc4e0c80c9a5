"""Digests of the replica sets that this node holds, which the coordinator compares.

The digest of a replica set is a sum over the chunks that are held, so ranks and nodes can be added in any order. In
`full` mode every node holds the whole set, and the sums are equal. In `share` mode each node holds a part: data and
parity are fingerprinted, and because fingerprints are linear like the code, the sum over all nodes is zero unless one
replica differs from the others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import xxhash

from keepstep.arena.slots import DIGEST_BYTES
from keepstep.keeper.workers.sealed_snapshot import SealedSnapshot
from keepstep.layout import CHUNK_BYTES, FULL, ReplicaSet, StoredChunk
from keepstep.parity import galois
from keepstep.parity.code import coefficients
from keepstep.parity.divergence import ReplicaAudit, ReplicaAuditAnswer, ReplicaSetDigest, ReplicaUnit
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, fingerprint

MAX_PATHS = 64


class _ThreadBuffer(threading.local):
    """One chunk of memory for each thread: with new memory for every chunk the threads would wait for the kernel."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(CHUNK_BYTES))


_buffer = _ThreadBuffer()


class MapFunction(Protocol):
    """`map`, or that of a pool of threads."""

    def __call__(self, work: Callable[[StoredChunk], bytes], stored: tuple[StoredChunk, ...], /) -> Iterable[bytes]: ...


def set_digests(snapshot: SealedSnapshot, over: MapFunction = map) -> tuple[ReplicaSetDigest, ...]:
    """The digest of each replica set in one slot."""
    whole = _digests_of_full(snapshot)
    shared = [one for one in snapshot.index.replica_sets if one.mode != FULL]
    coded = [ReplicaSetDigest(one.class_id, _digest_of_share(snapshot, one, over), one.n) for one in shared]
    return tuple(sorted([*whole, *coded], key=lambda digest: digest.class_id))


def answer(snapshot: SealedSnapshot, asked: ReplicaAudit) -> ReplicaAuditAnswer | None:
    """The coordinator's question about one replica set, answered for one slot; None when the slot holds none of it."""
    replica_set = next((one for one in snapshot.index.replica_sets if one.class_id == asked.class_id), None)
    if replica_set is None:
        return None
    if asked.chunks:
        with_entries = next(one for one in snapshot.layout().replica_sets if one.class_id == asked.class_id)
        return ReplicaAuditAnswer(paths=_paths(with_entries, asked.chunks))
    rank = snapshot.sealed.trainer.rank
    if replica_set.mode == FULL:
        units = [ReplicaUnit(chunk, -1, rank, digest) for chunk, digest in _table_digests(snapshot, replica_set)]
        return ReplicaAuditAnswer(replica_set.n, 0, tuple(units))
    coded = [
        ReplicaUnit(_position(stored), stored.code_row, rank, _fingerprint(snapshot, stored))
        for stored in replica_set.stored()
    ]
    return ReplicaAuditAnswer(replica_set.n, replica_set.m, tuple(coded))


def _digests_of_full(snapshot: SealedSnapshot) -> list[ReplicaSetDigest]:
    """Digests of chunks that are the same on every node: from their checksums, no payload is read."""
    total: dict[str, int] = defaultdict(int)
    for replica_set in snapshot.index.replica_sets:
        if replica_set.mode == FULL:
            for chunk, digest in _table_digests(snapshot, replica_set):
                named = chunk.to_bytes(8, "little") + digest
                total[replica_set.class_id] ^= int.from_bytes(xxhash.xxh3_128_digest(named), "little")
    return [ReplicaSetDigest(class_id, value.to_bytes(DIGEST_BYTES, "little")) for class_id, value in total.items()]


def _digest_of_share(snapshot: SealedSnapshot, replica_set: ReplicaSet, over: MapFunction) -> bytes:
    """One sum for each row of the code: its parity equals the combination of the data that it was encoded from.

    Every stripe has weights of its own, or the same fault in two stripes would cancel out.
    """
    k = replica_set.n - replica_set.m
    sums = [bytes(FINGERPRINT_BYTES)] * replica_set.m
    chunks = replica_set.stored()
    for stored, value in zip(chunks, over(partial(_fingerprint, snapshot), chunks), strict=True):
        stripe, source = (stored.row, -1) if stored.chunk < 0 else divmod(stored.chunk, k)
        weighted = _times(_weights(stripe), value)
        for row in range(replica_set.m):
            if source >= 0:
                factor = coefficients(replica_set.m, row, k)[source]
                sums[row] = galois.add(sums[row], galois.scale(factor, weighted))
            elif row == stored.code_row:
                sums[row] = galois.add(sums[row], weighted)
    return b"".join(sums)


def _weights(stripe: int) -> bytes:
    values = xxhash.xxh3_128_digest(stripe.to_bytes(8, "little"))
    return bytes(value or 1 for value in values)  # zero would not count at all


def _times(weights: bytes, values: bytes) -> bytes:
    return bytes(map(galois.mul, weights, values))


def _fingerprint(snapshot: SealedSnapshot, stored: StoredChunk) -> bytes:
    """The fingerprint of a stored chunk; the padding of a short one is zero and changes nothing."""
    start = snapshot.arena.payload_span(snapshot.slot).offset + stored.offset
    window = _buffer.view[: stored.size_bytes]
    snapshot.arena.segment.read_into(start, window)
    return fingerprint(window)


def _position(stored: StoredChunk) -> int:
    return stored.chunk if stored.chunk >= 0 else stored.row


def _table_digests(snapshot: SealedSnapshot, replica_set: ReplicaSet) -> Iterator[tuple[int, bytes]]:
    """The checksums of the chunks of a replica set that the slot holds."""
    for chunk in replica_set.chunks:
        number = snapshot.find(replica_set.class_id, chunk)
        assert number is not None
        yield chunk, snapshot.digest(number)


def _paths(replica_set: ReplicaSet, chunks: tuple[int, ...]) -> tuple[str, ...]:
    """The tensors that lie in these chunks, by path."""
    paths: dict[str, None] = {}
    for chunk in chunks:
        start, end = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        entries = (one for one in replica_set.entries if one.offset < end and one.offset + one.size_bytes > start)
        paths.update(dict.fromkeys(entry.path for entry in entries))
    return tuple(paths)[:MAX_PATHS]
