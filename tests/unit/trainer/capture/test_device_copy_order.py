"""The order in which a snapshot is queued on a device, with streams that only write it down and run at once.

That a real device then does what is expected is shown by tests/gpu; but not every machine that runs tests has one.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from keepstep.trainer.capture import device_copy, device_lane
from keepstep.trainer.capture.device_copy import DeviceTransfer, TransferPlan, cut
from keepstep.trainer.capture.device_lane import DeviceLane, QueuedWork, StagingPolicy
from keepstep.trainer.capture.host_copy import RateCap
from keepstep.trainer.capture.small_tensors import make_batches
from keepstep.trainer.integrity.checks import SnapshotChecks
from keepstep.trainer.integrity.fingerprints import DeviceFingerprints
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.state.optimizer_fence import CopyGate, ReadCounter

HOST = torch.device("cpu")
PIECE = 1 << 20


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing, self.at = enable_timing, 0.0
        self.covers: frozenset[int] = frozenset()

    def synchronize(self) -> None:
        assert self.at, "nobody has recorded it"

    def query(self) -> bool:
        return self.at > 0

    def elapsed_time(self, end: Event) -> float:
        assert self.timing
        assert end.timing
        return 1000 * (end.at - self.at)


class Stream:
    def __init__(self, device: object = None) -> None:
        self.waited_for: list[Event] = []
        self.after: set[int] = set()
        """numbers of the copies that are done before what is queued here next"""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.at, event.covers = time.perf_counter(), frozenset(self.after)
        return event

    def wait_event(self, event: Event) -> None:
        assert event.at, "it would not wait for anything"
        self.waited_for.append(event)
        self.after |= event.covers


class Device:
    """What is queued, and where."""

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.copied: list[tuple[Stream, int, int]] = []
        """(stream, address, bytes) of each copy, in order"""
        self.unordered: list[int] = []
        """copies that may run beside an earlier one"""

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def streams_into(self, memory: torch.Tensor) -> list[Stream]:
        begin = memory.data_ptr()
        return [stream for stream, at, _ in self.copied if begin <= at < begin + memory.numel()]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, copy = Device(), torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        number = len(made.copied)
        if made.current.after != set(range(number)):
            made.unordered.append(number)
        made.copied.append((made.current, self.data_ptr(), self.nbytes))
        made.current.after.add(number)
        return copy(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.compute)
    monkeypatch.setattr(device_copy, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(device_lane, "TURN_BYTES", 2 * PIECE)
    return made


class State:
    """Some tensors, large and small, of two optimizers."""

    def __init__(self, *sizes: int) -> None:
        nobody: Any = None
        self.units, self.small, end = list[CopyOp](), list[CopyOp](), 0
        for number, size in enumerate((100, 4, 64, *sizes)):
            source = torch.randint(256, (size,), dtype=torch.uint8)
            unit = CopyOp(source, end, size, f"tensor {number}", frozenset({number % 2}), nobody)
            (self.units if number > 2 else self.small).append(unit)
            end += -(-size // 64) * 64
        self.payload_bytes = end
        self.gathered = make_batches(self.small)

    def depart(self, lane: DeviceLane, payload: torch.Tensor) -> tuple[DeviceTransfer, SnapshotChecks]:
        pieces = [piece for u in self.units for piece in cut(payload[u.offset :][: u.size_bytes], u.source, u.owners)]
        checks = SnapshotChecks(None, [DeviceFingerprints(self.units, random.Random(0), whole=True)])
        cargo = TransferPlan(payload, self.gathered, pieces)
        return DeviceTransfer(lane, cargo, (), checks), checks

    def is_in(self, payload: torch.Tensor) -> bool:
        every = [*self.units, *self.small]
        return all(torch.equal(payload[u.offset :][: u.size_bytes], u.source) for u in every)

    def move_on(self) -> None:
        for unit in [*self.units, *self.small]:
            unit.source.random_(0, 256)


def lane_with(room: int) -> DeviceLane:
    lane = DeviceLane(HOST, 0)
    lane.memory, lane.policy = torch.empty(room, dtype=torch.uint8), StagingPolicy(room)
    return lane


def issue(departure: DeviceTransfer) -> ReadCounter:
    """Queue all copies. Returns the count of reads, with one gate per optimizer."""
    gates = {owner: CopyGate(owner, [departure]) for owner in departure.owners}
    reads = ReadCounter(gates, [departure.owners])
    departure.issue(reads, RateCap(0))
    return reads


SIZES = [(5 * PIECE + 4, 3 * PIECE, 999_999), (5 * PIECE,), (20 * PIECE, 7), (70_001, 70_001, 70_001)]


@pytest.mark.parametrize("room", [0, PIECE, 3 * PIECE + 64, 64 * PIECE])
@pytest.mark.parametrize("sizes", SIZES)
def test_snapshot_after_snapshot_leaves_whole(device: Device, room: int, sizes: tuple[int, ...]) -> None:
    lane, state = lane_with(room), State(*sizes)
    for _ in range(3):
        payload = torch.zeros(state.payload_bytes, dtype=torch.uint8)
        departure, checks = state.depart(lane, payload)
        reads = issue(departure)
        assert sorted(reads.gates) == [0, 1]
        for gate in reads.gates.values():
            assert gate.done.is_set()
            gate.wait()
        departure.finish()
        assert state.is_in(payload)
        assert checks.changed_in_transit(payload) is None
        state.move_on()


def test_with_room_for_all_of_it_nothing_is_read_behind_the_clones(device: Device) -> None:
    state = State(70_001, 2 * PIECE + 1)
    departure, _ = state.depart(lane_with(4 * PIECE), torch.zeros(state.payload_bytes, dtype=torch.uint8))
    assert not departure._direct, "odd sizes have their place, too"


@pytest.mark.parametrize("room", [0, 3 * PIECE])
def test_copies_to_the_host_run_one_after_the_other(device: Device, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """One engine of a GPU does all copies to the host: two streams with work for it slow each other down."""
    fingerprint_streams: list[Stream] = []
    copy = DeviceFingerprints.copy_to_host
    monkeypatch.setattr(
        DeviceFingerprints, "copy_to_host", lambda self: (fingerprint_streams.append(device.current), copy(self))
    )
    lane, state = lane_with(room), State(20 * PIECE)
    for _ in range(3):
        departure, _ = state.depart(lane, torch.zeros(state.payload_bytes, dtype=torch.uint8))
        issue(departure)
    assert len(device.copied) > 60
    assert not device.unordered
    copy_streams = set(lane.copies._streams)
    assert {stream for stream, _, _ in device.copied} == copy_streams, "clones are made by kernels"
    assert set(fingerprint_streams) <= copy_streams


def test_no_stream_has_more_than_one_turn_at_a_time(device: Device) -> None:
    """What training copies to the host itself, as `loss.item()` does, is served between two turns."""
    lane, state = lane_with(5 * PIECE), State(20 * PIECE)
    departure, _ = state.depart(lane, torch.zeros(state.payload_bytes, dtype=torch.uint8))
    issue(departure)
    turns = [
        sum(size for _, _, size in copies) for _, copies in itertools.groupby(device.copied, key=lambda copy: copy[0])
    ]
    assert len(turns) >= 20 / 2
    assert max(turns) < 3 * PIECE, "two pieces, and small tensors"


def test_what_was_seen_leaves_early(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `take` that must know whether an optimizer has written waits for it."""
    before: list[int] = []
    leave = DeviceFingerprints.copy_to_host
    monkeypatch.setattr(
        DeviceFingerprints, "copy_to_host", lambda self: (before.append(len(device.copied)), leave(self))
    )
    state = State(30 * PIECE)
    cargo = state.depart(lane_with(0), torch.zeros(state.payload_bytes, dtype=torch.uint8))[0]
    issue(cargo)
    assert before[0] <= device_copy.FIRST_PIECES + len(state.gathered)


def test_a_snapshot_waits_for_its_turn_unless_an_optimizer_waits_for_it(device: Device) -> None:
    lane, state = lane_with(0), State(PIECE)
    departure, _ = state.depart(lane, torch.zeros(state.payload_bytes, dtype=torch.uint8))
    assert not departure.must_wait
    left: Any = Event()
    lane.direct_end = left
    assert departure.must_wait
    gate = CopyGate(0)
    reads = ReadCounter({0: gate}, [departure.owners])
    waits = threading.Thread(target=departure.wait_for_turn, args=(reads,), daemon=True)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    gate.waited_for.set()
    waits.join(10)
    assert not waits.is_alive()
    left.at = 1.0
    departure.wait_for_turn(ReadCounter({}, []))


def test_queued_work_is_pending_until_every_device_has_reached_its_event(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: dict[str, Stream] = {"a": Stream(), "b": Stream()}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[str(device)])
    names: Any = ["a", "b"]
    work = QueuedWork(names)
    assert not work.is_pending()
    work._events[1].at = 0.0  # type: ignore[attr-defined]
    assert work.is_pending()
    assert not QueuedWork([]).is_pending(), "a loop without devices never waits"
