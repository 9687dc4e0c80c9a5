"""The server that peers fetch from: chunks of the store, and chunks rebuilt for a peer that lost them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from keepstep.errors import Error
from keepstep.keeper.transfer.chunk_store import CHECK, REBUILT, ChunkRequest, ChunkStore
from keepstep.keeper.transfer.rebuild import Rebuilder
from keepstep.keeper.workers.results import Result, Results
from keepstep.transport.interface import Body, Refusal
from keepstep.types import Version

_decoder = msgspec.msgpack.Decoder(ChunkRequest)


@dataclass(frozen=True)
class SlotSuspected(Result):
    """A peer received bytes of this slot that do not match their checksum: verify it."""

    arena_id: str
    slot: int
    version: Version


class ChunkServer:
    """Answers the requests of peers, on the threads of the transport."""

    def __init__(self, store: ChunkStore, rebuilder: Rebuilder, results: Results) -> None:
        self._store, self._rebuilder, self._results = store, rebuilder, results

    def answer(self, peer: str, query: bytes) -> Body:
        """The bytes that a peer asks for. Raises Refusal with the reason."""
        try:
            request = _decoder.decode(query)
        except (msgspec.DecodeError, ValueError) as error:
            raise Refusal(f"not a request: {error}") from error
        if request.kind == REBUILT:
            return self._rebuilder.rebuild(request)
        if request.kind == CHECK and request.version is not None:
            try:
                snapshot = self._store.snapshot(request.version, request.rank)
            except (OSError, Error) as error:
                raise Refusal(str(error)) from error
            self._results.put(SlotSuspected(snapshot.arena.arena_id, snapshot.slot, request.version))
            return Body.of_bytes(b"")
        return self._store.read(request)
