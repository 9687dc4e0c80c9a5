"""Chunks of replica sets that this node misses, fetched from the nodes that hold them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import xxhash

from keepstep.keeper.transfer.chunk_store import STOCK, ChunkRequest, ChunkStore, HeldReplicas
from keepstep.keeper.transfer.fetch_replicas import fetch_replicas
from keepstep.keeper.transfer.stripe_reads import ChunkClient, FetchSettings, SourceFailedError
from keepstep.layout import CHUNK_BYTES, FULL, Entry, ReplicaSet, TensorView, class_id
from keepstep.transport.interface import Fetched, FetchError, FetchRequest
from keepstep.types import Incarnation, Version

VERSION = Version(Incarnation(1, 2), 3)
CHUNKS = 6
SIZE = (CHUNKS - 1) * CHUNK_BYTES + 1000
ENTRIES = (Entry(0, SIZE, (TensorView("w", "uint8", (SIZE,), (1,), 0, (SIZE,), (0,), False),)),)
SET = ReplicaSet(class_id((0, 1, 2), ENTRIES), (0, 1, 2), (0, 1, 2), SIZE, ENTRIES, FULL, 3, 0, 0, 0, (), ())
MISSING = [(SET, chunk) for chunk in range(CHUNKS)]


class Holders:
    """Nodes that hold the whole set, and what is wrong with some of them once their holdings are known."""

    def __init__(self, faults: dict[str, FetchError]) -> None:
        self.faults = faults
        self.asked: list[str] = []

    def fetch(self, request: FetchRequest) -> Future[Fetched]:
        future: Future[Fetched] = Future()
        try:
            future.set_result(self._answer(request))
        except FetchError as error:
            future.set_exception(error)
        return future

    def _answer(self, request: FetchRequest) -> Fetched:
        query = msgspec.msgpack.decode(request.query, type=ChunkRequest)
        if query.kind == STOCK:
            sizes = [(chunk, SET.chunk_bytes(chunk)) for chunk in range(CHUNKS)]
            data = msgspec.msgpack.encode([HeldReplicas(SET.class_id, sizes, [])])
            return Fetched(len(data), xxhash.xxh3_128_digest(data), data)
        self.asked.append(request.node_id)
        if request.node_id in self.faults:
            raise self.faults[request.node_id]
        assert request.into is not None
        request.into[:] = content(query.chunk)
        return Fetched(len(request.into), b"")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a fetch does not use {name}")


def content(chunk: int) -> bytes:
    return bytes([chunk + 1]) * SET.chunk_bytes(chunk)


def fetch(transport: Holders) -> list[bytes]:
    client = ChunkClient(ChunkStore("a"), transport)
    settings = FetchSettings(4 * CHUNK_BYTES, 1.0)
    fetched = fetch_replicas(client, VERSION, ["b", "c"], MISSING, settings=settings, stopped=threading.Event())
    try:
        read = fetched.segment.read
        return [read(fetched.offsets[SET.class_id, chunk], SET.chunk_bytes(chunk)) for chunk in range(CHUNKS)]
    finally:
        fetched.close()


def test_every_holder_sends_its_part() -> None:
    holders = Holders({})
    assert fetch(holders) == [content(chunk) for chunk in range(CHUNKS)]
    assert holders.asked == ["b", "c"] * (CHUNKS // 2)


@pytest.mark.parametrize("lost", [False, True], ids=["refuses", "is silent"])
def test_chunk_whose_holder_fails_is_fetched_from_the_next_holder(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.keeper.transfer.stripe_reads.RETRY_S", 0.001)
    holders = Holders({"b": FetchError("b", "gone", lost=lost)})
    if lost:
        monkeypatch.setattr("keepstep.keeper.transfer.stripe_reads.time.monotonic", Clock())
    assert fetch(holders) == [content(chunk) for chunk in range(CHUNKS)]


def test_holder_that_failed_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.keeper.transfer.stripe_reads.RETRY_S", 0.001)
    holders = Holders({"b": FetchError("b", "gone", lost=False)})
    fetch(holders)
    assert holders.asked.count("b") <= 3 + 2, "three tries for one chunk, and one for each that was in flight"


def test_fetch_fails_when_every_holder_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.keeper.transfer.stripe_reads.RETRY_S", 0.001)
    faults = {node_id: FetchError(node_id, "gone", lost=False) for node_id in "bc"}
    with pytest.raises(SourceFailedError, match="gone"):
        fetch(Holders(faults))


class Clock:
    """Time that passes quickly: half a second for each look at the clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now
