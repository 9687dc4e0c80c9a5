"""The reader: a process of its own that maps large slots to checksum them, and that nothing depends on."""

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
from pathlib import Path
from typing import Any

import pytest

from keepstep.arena import memfd as segments
from keepstep.arena.checksum import read_digests
from keepstep.arena.chunks import Chunk
from keepstep.arena.slots import CHUNK_BYTES, Arena, SlotSpan, plan_header
from keepstep.keeper.workers import checksum_client as module
from keepstep.keeper.workers.checksum_client import ChecksumClient
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
    made = ChecksumClient(threads=2, least_bytes=1)
    yield made
    made.close()
    assert made._process is None


def chunks_of(arena: Arena, slot: int) -> list[Chunk]:
    begin = arena.payload_span(slot).offset
    sizes = [CHUNK_BYTES, CHUNK_BYTES, 12_345]
    return [Chunk("unique", i, SlotSpan(begin + i * CHUNK_BYTES, size)) for i, size in enumerate(sizes)]


def warmed(reading: ChecksumClient, arena: Arena, slot: int = 0) -> list[Chunk]:
    chunks = chunks_of(arena, slot)
    assert reading.digests(arena, slot, chunks) is None  # not before it was read once
    reading.warm(arena, slot, chunks)
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


def test_it_says_what_is_read_through_the_descriptor(reading: ChecksumClient, arena: Arena) -> None:
    for slot in range(2):
        chunks = warmed(reading, arena, slot)
        assert reading.digests(arena, slot, chunks) == read_digests(arena, slot, chunks)
    before = reading.digests(arena, 1, chunks)
    arena.segment.write(chunks[1].span.offset + 77, b"x")
    after = reading.digests(arena, 1, chunks)
    assert before is not None
    assert after is not None
    assert [before[at : at + 16] == after[at : at + 16] for at in (0, 16, 32)] == [True, False, True]
    assert maps_of(os.getpid()) == 0  # the keeper itself maps nothing


def test_more_chunks_than_fit_a_request(reading: ChecksumClient, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.r, "MOST_SPANS", 2)
    chunks = warmed(reading, arena)
    assert reading.digests(arena, 0, chunks) == read_digests(arena, 0, chunks)


def test_the_largest_request_and_its_answer_fit_a_datagram(reading: ChecksumClient, arena: Arena) -> None:
    warmed(reading, arena)
    many = [Chunk("unique", i, SlotSpan(i, 1)) for i in range(module.r.MOST_SPANS)]
    assert reading.digests(arena, 0, many) == read_digests(arena, 0, many)


def test_what_is_not_worth_it_starts_no_process(arena: Arena) -> None:
    for least_bytes in (0, 2 * PAYLOAD):
        reading = ChecksumClient(threads=2, least_bytes=least_bytes)
        warmed(reading, arena)
        assert reading._process is None
        assert reading.digests(arena, 0, chunks_of(arena, 0)) is None
        reading.close()


def test_reader_that_dies_is_replaced_later_and_its_slots_are_read_through_descriptors_meanwhile(
    reading: ChecksumClient, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = warmed(reading, arena)
    first = pid_of(reading)
    os.kill(first, signal.SIGBUS)  # as a page does that the machine has lost
    assert until(lambda: gone(first))
    with caplog.at_level(logging.WARNING):
        assert reading.digests(arena, 0, chunks) is None
    assert "the reader has failed" in caplog.text
    assert caplog.records[-1].__dict__["exit_status"] == -signal.SIGBUS
    reading.warm(arena, 0, chunks)
    assert reading._process is None
    reading._not_before = 0.0
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    reading.warm(arena, 0, chunks)
    assert pid_of(reading) != first
    assert reading.digests(arena, 0, chunks) == read_digests(arena, 0, chunks)


def test_reader_that_dies_unused_leaves_nothing_behind(reading: ChecksumClient, arena: Arena) -> None:
    warmed(reading, arena)
    reading.tend()
    pid = pid_of(reading)
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: gone(pid))
    reading.tend()
    assert reading._process is None
    assert not Path(f"/proc/{pid}").exists()


def test_reader_that_stands_still_is_given_up(
    reading: ChecksumClient, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = warmed(reading, arena)
    assert reading.digests(arena, 0, chunks) is not None
    pid = pid_of(reading)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    started = time.monotonic()
    assert reading.digests(arena, 0, chunks) is None
    assert time.monotonic() - started < 5
    assert gone(pid)


def test_an_arena_that_is_given_up_is_unmapped_and_not_mapped_again(
    reading: ChecksumClient, arena: Arena, other: Arena
) -> None:
    chunks = warmed(reading, arena)
    others = warmed(reading, other)
    assert reading.digests(arena, 0, chunks) is not None
    assert reading.digests(other, 0, others) is not None
    pid = pid_of(reading)
    assert maps_of(pid) == 2
    reading.forget(arena.arena_id)
    assert maps_of(pid) == 1
    reading.warm(arena, 0, chunks)
    assert reading.digests(arena, 0, chunks) is None
    assert maps_of(pid) == 1
    reading.forget(other.arena_id)
    assert gone(pid)  # there is nothing left to read


def test_reader_that_stands_still_holds_no_arena_that_is_given_up(
    reading: ChecksumClient, arena: Arena, other: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(reading, arena)
    warmed(reading, other)
    pid = pid_of(reading)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    reading.forget(arena.arena_id)
    assert gone(pid)


def test_an_arena_that_was_closed_meanwhile_costs_the_others_nothing(
    reading: ChecksumClient, arena: Arena, other: Arena
) -> None:
    chunks = warmed(reading, arena)
    others = chunks_of(other, 0)
    other.close()
    reading.warm(other, 0, others)
    assert reading.digests(arena, 0, chunks) is not None


class Channel:
    """The keeper's end of the socket, with something in its way."""

    def __init__(self, inner: socket.socket, receive: Callable[[bytes], bytes]) -> None:
        self._inner, self._receive = inner, receive

    def recv(self, size: int) -> bytes:
        return self._receive(self._inner.recv(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_answer_that_was_not_waited_for_answers_nothing_else(reading: ChecksumClient, arena: Arena) -> None:
    first, second = warmed(reading, arena, 0), warmed(reading, arena, 1)
    pid = pid_of(reading)
    assert reading._channel is not None

    def out_of_memory(data: bytes) -> bytes:
        raise MemoryError

    reading._channel = Channel(reading._channel, out_of_memory)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        reading.digests(arena, 0, first)
    assert gone(pid)
    assert reading.digests(arena, 1, second) is None


def test_an_answer_to_another_request_is_refused(reading: ChecksumClient, arena: Arena) -> None:
    chunks = warmed(reading, arena)
    assert reading._channel is not None
    said: list[bytes] = []

    def again(data: bytes) -> bytes:
        said.append(data)
        return said[0]

    reading._channel = Channel(reading._channel, again)  # type: ignore[assignment]
    assert reading.digests(arena, 0, chunks) is not None
    assert reading.digests(arena, 0, chunks) is None
    assert reading._process is None


def test_close_does_not_wait_for_an_answer(reading: ChecksumClient, arena: Arena) -> None:
    chunks = warmed(reading, arena)
    assert reading.digests(arena, 0, chunks) is not None
    pid = pid_of(reading)
    os.kill(pid, signal.SIGSTOP)
    found: list[bytes | None] = [b"nothing yet"]
    waiting = threading.Thread(target=lambda: found.__setitem__(0, reading.digests(arena, 0, chunks)))
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
            from keepstep.arena.chunks import Chunk
            from keepstep.arena.slots import Arena, SlotSpan, plan_header
            from keepstep.keeper.workers.checksum_client import ChecksumClient
            from keepstep.layout import SnapshotSize
            need = SnapshotSize(100, 100, 1000)
            header = plan_header(
                need, slots=2, local_index=0, generation=1, run_id="r", node_id="n", instance=bytes(16)
            )
            arena, reading = Arena.create(header), ChecksumClient(threads=1, least_bytes=1)
            chunks = [Chunk("unique", 0, SlotSpan(arena.payload_span(0).offset, 1000))]
            reading.warm(arena, 0, chunks)
            assert reading.digests(arena, 0, chunks)
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
