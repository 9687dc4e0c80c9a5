"""Chunks from any node, this one included: what lies here is read, what lies elsewhere is fetched."""

from __future__ import annotations

import os
from concurrent.futures import Future

import xxhash

from keepstep.keeper.transfer.chunk_store import ChunkStore
from keepstep.transport.interface import Fetched, FetchError, FetchRequest, Refusal, Transport


class ChunkClient:
    """`fetch` of the peers, with this node among them."""

    def __init__(self, node_id: str, shelf: ChunkStore, peers: Transport) -> None:
        self.node_id, self.shelf, self._peers = node_id, shelf, peers

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        if request.node_id != self.node_id:
            return self._peers.fetch(request)
        future: Future[Fetched] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._read(request))
        except FetchError as error:
            future.set_exception(error)
        return future

    def _read(self, request: FetchRequest) -> Fetched:
        into, size_bytes = request.into, request.size_bytes
        try:
            body = self.shelf.serve(self.node_id, request.query)
        except Refusal as refusal:
            raise FetchError(self.node_id, str(refusal), lost=False) from refusal
        try:
            if body.size_bytes > size_bytes or (into is not None and body.size_bytes != size_bytes):
                raise FetchError(self.node_id, f"{body.size_bytes} bytes where {size_bytes} are wanted", lost=False)
            buffer = into if into is not None else memoryview(bytearray(body.size_bytes))
            if body.data is not None:
                buffer[:] = body.data
            else:
                _fill(body.fd, body.offset, buffer, self.node_id)
        finally:
            if body.release is not None:
                body.release()
        digest = xxhash.xxh3_128_digest(buffer)
        if digest != (request.expect or body.checksum):
            raise FetchError(self.node_id, "the bytes do not match their checksum", lost=False)
        return Fetched(len(buffer), digest, None if into is not None else bytes(buffer))


def _fill(fd: int, offset: int, buffer: memoryview, node_id: str) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise FetchError(node_id, f"memory here cannot be read: {error.strerror}", lost=False) from error
        if count <= 0:
            raise FetchError(node_id, "memory here ends early", lost=False)
        done += count
