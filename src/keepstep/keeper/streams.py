"""Where the chunks of replicated state lie on this node, for a trainer that restores it."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.arena.slots import Arena
from keepstep.errors import RecoveryError
from keepstep.keeper.shelf import Book, open_book
from keepstep.protocol import RestoreFrom, StreamSource


def find_streams(arenas: Mapping[str, Arena], answer: RestoreFrom) -> tuple[list[StreamSource], list[str]]:
    """Per stream of the rank's layout, where each chunk is; and the arenas to hand over, the rank's own first."""
    own = open_book(arenas[answer.arena_id], answer.slot)
    if not own.layout.streams:
        return [], [answer.arena_id]
    books = [own]
    for arena in arenas.values():
        for slot in range(arena.num_slots):
            sealed = arena.sealed(slot)
            if sealed is not None and sealed.version == answer.version and arena.arena_id != answer.arena_id:
                books.append(open_book(arena, slot))
    ids = [answer.arena_id]
    sources = []
    for stream in own.layout.streams:
        indexes, offsets = [], []
        for chunk in range(stream.num_chunks):
            book, number = _find(books, stream.class_id, chunk)
            if book.arena.arena_id not in ids:
                ids.append(book.arena.arena_id)
            indexes.append(ids.index(book.arena.arena_id))
            offsets.append(book.chunks[number].span.offset)
        sources.append(StreamSource(stream.class_id, indexes, offsets))
    return sources, ids


def _find(books: list[Book], class_id: str, chunk: int) -> tuple[Book, int]:
    for book in books:
        number = book.find(class_id, chunk)
        if number is not None:
            return book, number
    raise RecoveryError(f"chunk {chunk} of the replicated state {class_id[:8]} is not on this node")
