"""What reads bytes from outside: each target takes one input, and raises for a fault only.

A target that refuses an input as documented returns. Anything else that is raised is a fault.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable

import msgspec
import xxhash

from keepstep import layout, values
from keepstep.arena.memfd import Memfd
from keepstep.arena.records import ArenaHeader
from keepstep.arena.slots import Arena
from keepstep.control.framing import FrameError, FrameReader
from keepstep.control.membership import NodeClaim, RoundAgreement
from keepstep.control.signed_store import DocumentSigner, SignedStore
from keepstep.errors import Error
from keepstep.keeper.coordinator import messages
from keepstep.keeper.transfer.chunk_store import ChunkRequest
from keepstep.keeper.workers import manifest
from keepstep.keeper.workers.allocation import describe
from keepstep.launcher.round_document import RoundDocument
from keepstep.transport.frames import FrameVerifier, PeerFrameError
from keepstep.types import Incarnation, Version

RUN_ID, NODE_ID, SECRET = "fuzz", "a", b"the secret of a fuzzed run"
HEADER_BYTES = 16 << 10  # The first header of an arena, its records and its first slot: see `arena`.


def control_frames(data: bytes) -> None:
    reader = FrameReader()
    try:
        with contextlib.suppress(FrameError):
            reader.feed(data, [])
    finally:
        reader.close()


def peer_frames(data: bytes) -> None:
    with contextlib.suppress(PeerFrameError):
        FrameVerifier(bytes(32)).feed(data)


def peer_messages(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        messages.decode(data)


def chunk_requests(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        msgspec.msgpack.decode(data, type=ChunkRequest)


def snapshot_values(data: bytes) -> None:
    with contextlib.suppress(Error):
        values.decode(data)


def layouts(data: bytes) -> None:
    with contextlib.suppress(Error):
        layout.decode(data, payload_bytes=1 << 20)


def manifests(data: bytes) -> None:
    with contextlib.suppress(Error):
        found = manifest.decode(data, Version(Incarnation(1, 1), 5))
        assert found.coded is not None


def arena(data: bytes) -> None:
    """The first pages of an arena, as another process may have left them; the checksum of the header is right."""
    blob = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    header = blob[: ArenaHeader.SIZE - 8]
    blob = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header)) + blob[ArenaHeader.SIZE :]
    segment = Memfd.create(64 << 10)
    try:
        segment.write(0, blob)
        fd = os.dup(segment.fd)
        try:
            adopted = Arena.adopt(fd, run_id=RUN_ID, node_id=NODE_ID)
        except Error:
            os.close(fd)
            return
        try:
            with contextlib.suppress(Error):
                describe(adopted)
        finally:
            adopted.close()
    finally:
        segment.close()


class ListStore:
    """A store that gives back whatever somebody has written."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def add(self, key: str, amount: int) -> int:
        return 0

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return self.raw

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.raw for _ in keys]

    def set(self, key: str, value: str) -> None:
        pass

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.raw


def store_documents(data: bytes) -> None:
    """With a secret nothing that was changed is read; without one it is read or ignored."""
    signed = SignedStore(ListStore(data), DocumentSigner(RUN_ID, SECRET))
    assert signed.read_as(["card/x"], NodeClaim) == [None]
    assert RoundDocument().read(signed).members == []
    plain = SignedStore(ListStore(data), DocumentSigner(RUN_ID, b""))
    plain.read_as(["card/x"], NodeClaim)
    plain.read_as(["agreement/1"], RoundAgreement)
    RoundDocument().read(plain)


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (
        control_frames, peer_frames, peer_messages, chunk_requests, snapshot_values, layouts, manifests, arena,
        store_documents,
    )
}  # fmt: skip
