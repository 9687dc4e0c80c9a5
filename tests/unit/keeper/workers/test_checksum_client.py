"""The checksum worker: a process that maps large slots to hash them, and that nothing depends on."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keepstep.arena import memfd as segments
from keepstep.arena.checksum import Chunk, read_digests
from keepstep.arena.slots import CHUNK_BYTES, Arena, SlotSpan, plan_header
from keepstep.keeper.workers import checksum_client as module
from keepstep.keeper.workers.checksum_client import ChecksumClient
from keepstep.keeper.workers.sealing import Sealer
from keepstep.layout import SnapshotSize

PAYLOAD = 2 * CHUNK_BYTES + 12_345


def make_arena(generation: int) -> Arena:
    need = SnapshotSize(100, 100, PAYLOAD)
    made = Arena.create(
        plan_header(need, slots=2, local_index=0, generation=generation, run_id="r", node_id="n", instance=bytes(16))
    )
    for slot in range(2):
        made.segment.write(made.payload_span(slot).offset, os.urandom(PAYLOAD))
    return made


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make_arena(1)
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[Arena]:
    made = make_arena(2)
    yield made
    made.close()


@pytest.fixture
def reading() -> Iterator[ChecksumClient]:
    made = ChecksumClient(num_threads=2)
    yield made
    made.close()
    assert made._process is None


def chunks_of(arena: Arena, slot: int) -> list[Chunk]:
    begin = arena.payload_span(slot).offset
    sizes = [CHUNK_BYTES, CHUNK_BYTES, 12_345]
    return [Chunk("unique", i, SlotSpan(begin + i * CHUNK_BYTES, size)) for i, size in enumerate(sizes)]


def hashed(reading: ChecksumClient, arena: Arena, slot: int = 0) -> list[Chunk]:
    """The chunks of a slot that the worker has hashed, so that it maps the arena."""
    chunks = chunks_of(arena, slot)
    assert reading.digests(arena, chunks) is not None
    return chunks


def pid_of(reading: ChecksumClient) -> int:
    assert reading._process is not None
    return reading._process.pid


def maps_of(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(segments.NAME)


def until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def gone(pid: int) -> bool:
    """Ended, though perhaps nobody has asked how: whoever inherits orphans may be slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_worker_finds_the_same_digests_as_a_read_through_the_descriptor(reading: ChecksumClient, arena: Arena) -> None:
    for slot in range(2):
        chunks = chunks_of(arena, slot)
        assert reading.digests(arena, chunks) == read_digests(arena, chunks)
    before = reading.digests(arena, chunks)
    arena.segment.write(chunks[1].span.offset + 77, b"x")
    after = reading.digests(arena, chunks)
    assert before is not None
    assert after is not None
    assert [before[at : at + 16] == after[at : at + 16] for at in (0, 16, 32)] == [True, False, True]
    assert maps_of(os.getpid()) == 0  # the keeper itself maps nothing


def test_more_chunks_than_fit_a_request(reading: ChecksumClient, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.worker, "MAX_SPANS", 2)
    chunks = chunks_of(arena, 0)
    assert reading.digests(arena, chunks) == read_digests(arena, chunks)


def test_the_largest_request_and_its_answer_fit_a_datagram(reading: ChecksumClient, arena: Arena) -> None:
    hashed(reading, arena)
    many = [Chunk("unique", i, SlotSpan(i, 1)) for i in range(module.worker.MAX_SPANS)]
    assert reading.digests(arena, many) == read_digests(arena, many)


def test_small_slot_starts_no_process(arena: Arena) -> None:
    reading = ChecksumClient(num_threads=2)
    with ThreadPoolExecutor(1) as threads:
        for min_bytes, is_started in ((2 * PAYLOAD, False), (PAYLOAD, True)):
            sealer = Sealer(threads, reading, worker_min_bytes=min_bytes)
            assert sealer._digests(arena, chunks_of(arena, 0)) == read_digests(arena, chunks_of(arena, 0))
            assert (reading._process is not None) == is_started
    reading.close()


def test_worker_that_dies_is_replaced_later_and_slots_are_read_through_descriptors_meanwhile(
    reading: ChecksumClient, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = hashed(reading, arena)
    first = pid_of(reading)
    os.kill(first, signal.SIGBUS)  # as a page does that the machine has lost
    assert until(lambda: gone(first))
    with caplog.at_level(logging.WARNING):
        assert reading.digests(arena, chunks) is None
    assert "checksum worker has failed" in caplog.text
    assert caplog.records[-1].__dict__["exit_status"] == -signal.SIGBUS
    assert reading.digests(arena, chunks) is None
    assert reading._process is None
    assert not Path(f"/proc/{first}").exists()
    reading._not_before = 0.0
    assert reading.digests(arena, chunks) == read_digests(arena, chunks)
    assert pid_of(reading) != first


def test_worker_that_hangs_is_ended(reading: ChecksumClient, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = hashed(reading, arena)
    pid = pid_of(reading)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    started = time.monotonic()
    assert reading.digests(arena, chunks) is None
    assert time.monotonic() - started < 5
    assert gone(pid)


def test_closed_arena_is_unmapped_and_not_mapped_again(reading: ChecksumClient, arena: Arena, other: Arena) -> None:
    chunks = hashed(reading, arena)
    hashed(reading, other)
    pid = pid_of(reading)
    assert maps_of(pid) == 2
    arena.close()
    reading.forget(arena.arena_id)
    assert maps_of(pid) == 1
    assert reading.digests(arena, chunks) is None
    assert maps_of(pid) == 1
    other.close()
    reading.forget(other.arena_id)
    assert gone(pid)  # no arena is left to read


def test_worker_that_hangs_holds_no_arena_that_was_forgotten(
    reading: ChecksumClient, arena: Arena, other: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed(reading, arena)
    hashed(reading, other)
    pid = pid_of(reading)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    reading.forget(arena.arena_id)
    assert gone(pid)


def test_arena_that_was_closed_meanwhile_costs_the_others_nothing(
    reading: ChecksumClient, arena: Arena, other: Arena
) -> None:
    hashed(reading, arena)
    pid = pid_of(reading)
    others = chunks_of(other, 0)
    other.close()
    assert reading.digests(other, others) is None
    hashed(reading, arena)
    assert pid_of(reading) == pid


class Channel:
    """The keeper's end of the socket, with something in its way."""

    def __init__(self, inner: socket.socket, receive: Callable[[bytes], bytes]) -> None:
        self._inner, self._receive = inner, receive

    def recv(self, size: int) -> bytes:
        return self._receive(self._inner.recv(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_answer_that_was_not_waited_for_answers_nothing_else(reading: ChecksumClient, arena: Arena) -> None:
    first, second = hashed(reading, arena, 0), hashed(reading, arena, 1)
    pid = pid_of(reading)
    assert reading._channel is not None

    def out_of_memory(data: bytes) -> bytes:
        raise MemoryError

    reading._channel = Channel(reading._channel, out_of_memory)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        reading.digests(arena, first)
    assert gone(pid)
    assert reading.digests(arena, second) is None


def test_an_answer_to_another_request_is_refused(reading: ChecksumClient, arena: Arena) -> None:
    chunks = hashed(reading, arena)
    assert reading._channel is not None
    said: list[bytes] = []

    def again(data: bytes) -> bytes:
        said.append(data)
        return said[0]

    reading._channel = Channel(reading._channel, again)  # type: ignore[assignment]
    assert reading.digests(arena, chunks) is not None
    assert reading.digests(arena, chunks) is None
    assert reading._process is None


def test_close_does_not_wait_for_an_answer(reading: ChecksumClient, arena: Arena) -> None:
    chunks = hashed(reading, arena)
    assert reading.digests(arena, chunks) is not None
    pid = pid_of(reading)
    os.kill(pid, signal.SIGSTOP)
    found: list[bytes | None] = [b"nothing yet"]
    waiting = threading.Thread(target=lambda: found.__setitem__(0, reading.digests(arena, chunks)))
    waiting.start()
    time.sleep(0.1)
    started = time.monotonic()
    reading.close()
    waiting.join(5)
    assert time.monotonic() - started < 5
    assert found == [None]
    assert gone(pid)


def test_it_ends_with_the_keeper_however_that_ends() -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import time
            from keepstep.arena.checksum import Chunk
            from keepstep.arena.slots import Arena, SlotSpan, plan_header
            from keepstep.keeper.workers.checksum_client import ChecksumClient
            from keepstep.layout import SnapshotSize
            need = SnapshotSize(100, 100, 1000)
            header = plan_header(
                need, slots=2, local_index=0, generation=1, run_id="r", node_id="n", instance=bytes(16)
            )
            arena, reading = Arena.create(header), ChecksumClient(num_threads=1)
            chunks = [Chunk("unique", 0, SlotSpan(arena.payload_span(0).offset, 1000))]
            assert reading.digests(arena, chunks)
            print(reading._process.pid, flush=True)
            time.sleep(60)
        """)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert keeper.stdout is not None
        reader = int(keeper.stdout.readline())
        assert not gone(reader)
    finally:
        keeper.kill()
        keeper.communicate(timeout=10)
    assert until(lambda: gone(reader))
