"""Where the chunks of replicated state lie on this node, for a trainer that restores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepstep.arena.slots import Arena
from keepstep.control.messages import ReplicaSetSource, RestoreFrom
from keepstep.keeper.transfer.fetch_replicas import FetchedReplicas
from keepstep.keeper.workers.sealed_snapshot import SealedSnapshot, open_sealed
from keepstep.layout import ReplicaSet


@dataclass
class ReplicaSources:
    """What a trainer is handed for its streams, and what is not on this node."""

    sources: list[ReplicaSetSource] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    """the rank's own arena first"""
    missing: list[tuple[ReplicaSet, int]] = field(default_factory=list)


def find_streams(
    arenas: Mapping[str, Arena], answer: RestoreFrom, gathered: FetchedReplicas | None = None
) -> ReplicaSources:
    """Per stream of the rank's layout, where each chunk is: in slots of this node, else among what was gathered."""
    own = open_sealed(arenas[answer.arena_id], answer.slot)
    found = ReplicaSources(fds=[own.arena.segment.fd])
    books = [own]
    if own.index.replica_sets:
        for arena in arenas.values():
            for slot in range(arena.num_slots):
                sealed = arena.sealed(slot)
                if sealed is not None and sealed.version == answer.version and arena.arena_id != answer.arena_id:
                    books.append(open_sealed(arena, slot))
    for stream in own.index.replica_sets:
        indexes, offsets = [], []
        for chunk in range(stream.num_chunks):
            place = _find(books, gathered, stream.class_id, chunk)
            if place is None:
                found.missing.append((stream, chunk))
                continue
            fd, offset = place
            if fd not in found.fds:
                found.fds.append(fd)
            indexes.append(found.fds.index(fd))
            offsets.append(offset)
        found.sources.append(ReplicaSetSource(stream.class_id, indexes, offsets))
    return found


def _find(
    books: list[SealedSnapshot], gathered: FetchedReplicas | None, class_id: str, chunk: int
) -> tuple[int, int] | None:
    for book in books:
        number = book.find(class_id, chunk)
        if number is not None:
            return book.arena.segment.fd, book.chunks[number].span.offset
    if gathered is not None and (class_id, chunk) in gathered.places:
        return gathered.segment.fd, gathered.places[class_id, chunk]
    return None
