"""Uploads through a pool of buffers: every byte arrives where it belongs, however the ranges lie."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from keepstep import faults
from keepstep.arena.memfd import Memfd
from keepstep.errors import IntegrityError
from keepstep.trainer.restore import device_upload as module
from keepstep.trainer.restore.device_upload import PinnedUploader, UploadQueue, UploadRange, plan, threads_for

SIZE = 1_000_000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(module, "GAP_BYTES", 100)
    yield
    faults.install(None)


@pytest.fixture
def segment() -> Iterator[Memfd]:
    made = Memfd.create(SIZE)
    made.write(0, os.urandom(SIZE))
    yield made
    made.close()


def draw(rng: random.Random) -> list[tuple[int, int]]:
    """(offset, size) of ranges that do not overlap, with and without room between them."""
    found, at = [], rng.randrange(200)
    while True:
        size = rng.choice([1, 7, 64, 999, 10_000, 10_001, 35_000])
        if at + size > SIZE:
            return found
        found.append((at, size))
        at += size + rng.choice([0, 0, 3, 64, 100, 101, 20_000])


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_arrives(segment: Memfd, seed: int) -> None:
    rng = random.Random(seed)
    places = draw(rng)
    elsewhere = [torch.frombuffer(bytearray(os.urandom(n)), dtype=torch.uint8) for n in (1, 10_000, 25_001)]
    ranges = [UploadRange(at, torch.zeros(size, dtype=torch.uint8)) for at, size in places]
    ranges += [UploadRange(source, torch.zeros_like(source)) for source in elsewhere]
    rng.shuffle(ranges)
    uploader = PinnedUploader(rng.randint(1, 5))
    uploader.load(segment, ranges)
    uploader.close()
    for source, target in ranges:
        expected = segment.read(source, target.numel()) if isinstance(source, int) else bytes(source.numpy())
        assert bytes(target.numpy()) == expected


class LateCopy:
    """An event of a device that reads a buffer only when somebody waits for the copy."""

    def __init__(self, piece: module.UploadPiece, buffer: np.ndarray, streams: object) -> None:
        self._piece, self._buffer = piece, buffer

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        for at, target in self._piece.parts:
            target.copy_(torch.from_numpy(self._buffer)[at : at + target.numel()])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_buffer_is_not_filled_again_before_its_copy_has_ended(
    segment: Memfd, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(module, "_copy_piece", lambda *args: [LateCopy(*args)])
    uploader, target = PinnedUploader(threads), torch.zeros(SIZE, dtype=torch.uint8)
    uploader.load(segment, [UploadRange(0, target)])
    uploader.close()
    assert bytes(target.numpy()) == segment.read(0, SIZE)


class Fake:
    """Streams of two devices, and which of them are current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: str) -> None:
        self.waited: list[str] = []
        self.current: list[str] = []
        self.fails = fails
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, device))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(self, device))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)


class FakeStream:
    """Also the context in which it is current: not a generator, which would leave it when it is collected."""

    def __init__(self, fake: Fake, device: str) -> None:
        self.fake, self.device = fake, device

    def __enter__(self) -> None:
        self.fake.current.append(self.device)

    def __exit__(self, *exc: object) -> None:
        self.fake.current.remove(self.device)

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        if self.fake.fails == f"enter {self.device}":
            raise RuntimeError("CUDA error")

    def synchronize(self) -> None:
        self.fake.waited.append(self.device)
        if self.fake.fails == f"wait {self.device}":
            raise RuntimeError("CUDA error")


@pytest.mark.parametrize("fails", ["", "wait a", "wait b", "body"])
def test_every_stream_is_waited_for_whatever_fails(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    fake = Fake(monkeypatch, fails=fails)
    expected = pytest.raises(RuntimeError, match="CUDA error") if fails else nullcontext()
    with expected, PinnedUploader(1)._current_streams(dict.fromkeys("ab")):  # type: ignore[arg-type]
        assert fake.current == ["a", "b"]
        if fails == "body":
            raise RuntimeError("CUDA error")
    assert sorted(fake.waited) == ["a", "b"]
    assert fake.current == []


def test_a_device_that_fails_at_first_leaves_the_callers_streams_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, fails="enter b")
    streams = PinnedUploader(1)._current_streams(dict.fromkeys("ab"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="CUDA error"), streams:
        pass
    assert fake.current == []


def test_without_threads_to_be_had_it_fails_and_leaves_none(segment: Memfd, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, 0

    def third_fails(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    uploader = PinnedUploader(4)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        uploader.load(segment, [UploadRange(0, torch.zeros(SIZE, dtype=torch.uint8))])
    uploader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("keepstep-upload")]


def test_what_lies_side_by_side_is_read_together_and_what_is_large_is_cut(segment: Memfd) -> None:
    def upload_range(at: int, size: int) -> UploadRange:
        return UploadRange(at, torch.zeros(size, dtype=torch.uint8))

    together = plan([upload_range(5_000, 1_000), upload_range(0, 4_900)])
    assert [(piece.source, piece.size_bytes, len(piece.parts)) for piece in together] == [(0, 6_000, 2)]
    apart = plan([upload_range(0, 1_000), upload_range(1_101, 1_000)])
    assert [(piece.source, piece.size_bytes) for piece in apart] == [(0, 1_000), (1_101, 1_000)]
    cut = plan([upload_range(50, 25_000)])
    assert [(piece.source, piece.size_bytes) for piece in cut] == [(50, 10_000), (10_050, 10_000), (20_050, 5_000)]


def test_bad_memory_is_an_error_that_says_so_and_ends_all_threads(segment: Memfd) -> None:
    reads = 0

    def fail(name: str) -> None:
        nonlocal reads
        reads += name == "segment.read"
        if reads == 5:
            raise OSError(5, "Input/output error")

    faults.install(fail)
    uploader = PinnedUploader(3)
    with pytest.raises(IntegrityError, match="memory of the arena is bad"):
        uploader.load(segment, [UploadRange(0, torch.zeros(SIZE, dtype=torch.uint8))])
    uploader.close()
    assert reads < 20


def test_nothing_is_written_after_an_interruption(segment: Memfd) -> None:
    """As Ctrl-C is one; by another signal, since a background job ignores that."""
    reads = 0

    def raise_it(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def interrupt(name: str) -> None:
        nonlocal reads
        reads += name == "segment.read"
        if reads == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.02)

    before = signal.signal(signal.SIGUSR1, raise_it)
    faults.install(interrupt)
    uploader, target = PinnedUploader(2), torch.zeros(SIZE, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt):
        uploader.load(segment, [UploadRange(0, target)])
    signal.signal(signal.SIGUSR1, before)
    uploader.close()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("keepstep-upload")]
    assert not any(thread.is_alive() for thread in ours)
    assert not target[SIZE // 2 :].any()


def test_more_ranks_than_cores_share_one_thread_each(segment: Memfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [threads_for(1), threads_for(2), threads_for(8)] == [2, 1, 0]
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert threads_for(8) == 2  # cores of its own
    target = torch.zeros(50, dtype=torch.uint8)
    uploader = PinnedUploader(0)
    uploader.load(segment, [UploadRange(7, target)])
    uploader.close()
    assert bytes(target.numpy()) == segment.read(7, 50)


def test_loads_are_counted_from_the_payload_and_done_once(segment: Memfd) -> None:
    uploader = PinnedUploader(1)
    loads = UploadQueue(uploader, segment, payload_offset=1_000)
    first, second = torch.zeros(50, dtype=torch.uint8), torch.zeros(60, dtype=torch.uint8)
    loads.add(10, first)
    loads.run()
    assert bytes(first.numpy()) == segment.read(1_010, 50)
    first.zero_()
    loads.add(100, second)
    loads.run()
    assert bytes(second.numpy()) == segment.read(1_100, 60)
    assert not first.any()
    uploader.close()
    uploader.lock()  # too late, and no matter
    loads.add(10, first)
    with pytest.raises(AssertionError, match="closed"):
        loads.run()
