"""Copies that leave a CUDA device while training goes on.

    take          an event on the compute stream; everything begins behind it
    copy thread   small tensors are gathered, fingerprints computed and what is late is cloned on the device, beside
                  the computation; piece after piece goes straight from the live tensors (direct), the clones last
    pre-hook      the update waits, on the device, for what still reads live tensors: the direct copies and the cloning

All of it is queued at once. The host usually runs far ahead of the device, so nothing that it sees can tell how far
copies will come before the update: what is late is decided beforehand, from how the last snapshots went (`split`).

Nothing here blocks the training thread but the time that a few calls take; the device waits for events. All that
leaves it goes on one stream, the smallest thing too: one engine of the device does it all, and serves two streams more
slowly than one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from keepstep import faults
from keepstep.layout import align
from keepstep.trainer.capture.device_lane import PIECE_BYTES, DeviceLane, timing_event
from keepstep.trainer.capture.small_tensors import SmallTensorBatch, foreach_copies
from keepstep.trainer.memory.pinned import copy_to_host
from keepstep.trainer.plan.copy_plan import CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp, ParityRun, parity_runs

log = logging.getLogger("keepstep")

FIRST_PIECES = 8
"""small things leave behind these: the device had time to make them ready"""
TURN_S = 0.005
"""how often it is looked whether the last snapshot has left"""


@dataclass(frozen=True)
class CopyPiece:
    """Part of a unit, small enough to be one copy."""

    target: torch.Tensor
    source: torch.Tensor | ParityRun
    owners: frozenset[int]

    @property
    def size_bytes(self) -> int:
        return self.target.numel()

    def leave(self, lane: DeviceLane) -> None:
        """Queue the copy to the host on the current stream; parity is computed on the way."""
        faults.point("capture.copy")
        source = self.source
        if isinstance(source, ParityRun):
            source = source.compute(lane.scratch(self.size_bytes), lane.checking)
        copy_to_host(self.target, source)


def cut(target: torch.Tensor, source: torch.Tensor, owners: frozenset[int]) -> list[CopyPiece]:
    starts = range(0, target.numel(), PIECE_BYTES)
    return [CopyPiece(target[a : a + PIECE_BYTES], source[a : a + PIECE_BYTES], owners) for a in starts]


@dataclass(frozen=True)
class TransferPlan:
    """The copies from one device into one slot. Made once, executed by every `DeviceTransfer`."""

    payload: torch.Tensor
    batches: Sequence[SmallTensorBatch]
    pieces: Sequence[CopyPiece]

    @classmethod
    def build(
        cls, payload: torch.Tensor, schedule: CopySchedule, device: torch.device, batches: Sequence[SmallTensorBatch]
    ) -> TransferPlan:
        """Cut the lazy operations of a device into pieces. `batches`: its small tensors."""
        pieces: list[CopyPiece] = []
        parity_ops: list[ParityOp] = []
        for op in schedule.lazy:
            if op.device != device:
                continue
            if isinstance(op, ParityOp):
                parity_ops.append(op)
            else:
                pieces += cut(payload[op.offset : op.offset + op.size_bytes], op.source, op.owners)
        for run in parity_runs(parity_ops):
            pieces.append(CopyPiece(payload[run.offset : run.offset + run.size_bytes], run, run.owners))
        return cls(payload, batches, pieces)

    @cached_property
    def room_bytes(self) -> int:
        """That all of it would need in the memory for clones."""
        return sum(align(piece.size_bytes) for piece in self.pieces)

    @cached_property
    def owners(self) -> frozenset[int]:
        found = {piece.owners for piece in self.pieces} | {one.owners for one in self.batches}
        return frozenset[int]().union(*found)


class DeviceTransfer:
    """What one snapshot copies from one device."""

    def __init__(
        self,
        lane: DeviceLane,
        cargo: TransferPlan,
        staged: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        look: Callable[[], None] = lambda: None,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Made inside `take`: begins where the compute stream stands now.

        `staged`: (target, clone) that `take` has made already. `look`: queues what else reads the live tensors;
        `tell`: queues the way of what was seen to the host.
        """
        self.lane = lane
        self.begin = torch.cuda.current_stream(lane.device).record_event(timing_event())
        self._cargo, self._staged, self._look, self._tell, pieces = cargo, staged, look, tell, cargo.pieces
        late_bytes, cut_at = lane.split.late_of(cargo.room_bytes), len(pieces)
        while cut_at and align(pieces[cut_at - 1].size_bytes) <= late_bytes:
            cut_at -= 1
            late_bytes -= align(pieces[cut_at].size_bytes)
        self._direct, self._late = pieces[:cut_at], pieces[cut_at:]
        self._reads: dict[int, list[torch.cuda.Event]] = {owner: [] for owner in cargo.owners}
        """by optimizer: the ends of what reads the tensors that it writes"""
        self._looked = self._cloned = self._started = self._left = self._done = timing_event()
        self._hooked: torch.cuda.Event | None = None
        self._small_left = False

    @property
    def owners(self) -> frozenset[int]:
        return self._cargo.owners

    # On the copy thread

    @property
    def must_wait(self) -> bool:
        """Whether more than clones of the last snapshot is still on its way."""
        left = self.lane.left
        return left is not None and not left.query()  # type: ignore[no-untyped-call]

    def wait_for_turn(self, wanted: Callable[[], bool]) -> None:
        """Copies that stand in line slow down the one that is on its way, by a thirtieth. While the clones of the last
        snapshot leave there is time to queue this one. Not when an optimizer waits for that: `wanted`.
        """
        while self.must_wait and not wanted():
            time.sleep(TURN_S)

    def issue(self, passed: Callable[[int], None], pace: Callable[[int], None]) -> None:
        """Queue everything; `passed` is told of each optimizer when all that it must wait for is queued."""
        stream = self.lane.stream
        clones = self._clone()
        ends = self._ends()
        with torch.cuda.stream(stream):
            stream.wait_event(self.begin)
            for target, clone in self._staged:
                copy_to_host(target, clone)
            self._started = stream.record_event(timing_event())
            self._read_until_here(ends.get(-1, ()), passed)
            for index, piece in enumerate(self._direct):
                piece.leave(self.lane)
                pace(piece.size_bytes)
                self._read_until_here(ends.get(index, ()), passed)
                if index + 1 == FIRST_PIECES:
                    self._leave_small()
            self._leave_small()
            self._left = self.lane.left = stream.record_event(timing_event())
            stream.wait_event(self._cloned)
            for piece, clone in zip(self._late, clones, strict=True):
                faults.point("capture.copy")
                copy_to_host(piece.target, clone)
            self._done = self.lane.vacant = stream.record_event(_waited_for())

    def _clone(self) -> list[torch.Tensor]:
        """Beside the computation, at its start: by the time of the update it is long done. Returns the clones."""
        stream, late = self.lane.cloning, frozenset[int]().union(*(piece.owners for piece in self._late))
        with torch.cuda.stream(stream):
            stream.wait_event(self.begin)
            if self._cargo.batches and self.lane.left is not None:
                stream.wait_event(self.lane.left)  # what was gathered before has left its place
            for one in self._cargo.batches:
                one.collect()
            self._look()
            self._looked = stream.record_event()
            if self._late and self.lane.vacant is not None:
                stream.wait_event(self.lane.vacant)
            clones = self._fill()
            self._cloned = stream.record_event()
            self._reads = {owner: [self._cloned if owner in late else self._looked] for owner in self.owners}
        return clones

    def _fill(self) -> list[torch.Tensor]:
        """By kernels: a copy would want the engine that is needed for the way to the host."""
        clones: list[torch.Tensor] = []
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        at = 0
        for piece in self._late:
            clones.append(self.lane.memory[at : at + piece.size_bytes])
            at += align(piece.size_bytes)
            if isinstance(piece.source, ParityRun):
                piece.source.compute(clones[-1], self.lane.checking)
            else:
                copied[0].append(clones[-1])
                copied[1].append(piece.source)
        for some, sources in foreach_copies(*copied):
            torch._foreach_copy_(some, sources)
        return clones

    def _leave_small(self) -> None:
        """What was gathered and what was seen: not at once, because kernels wait their turn beside the computation and
        the link would, too."""
        if self._small_left:
            return
        self._small_left = True
        self.lane.stream.wait_event(self._looked)
        for one in self._cargo.batches:
            one.copy_to_host(self._cargo.payload)
        self._tell()

    def _ends(self) -> dict[int, list[int]]:
        """By the index of a direct piece, -1 for none: the optimizers that own no later one."""
        last = {owner: index for index, piece in enumerate(self._direct) for owner in piece.owners}
        found: dict[int, list[int]] = {}
        for owner in self.owners:
            found.setdefault(last.get(owner, -1), []).append(owner)
        return found

    def _read_until_here(self, owners: Sequence[int], passed: Callable[[int], None]) -> None:
        if owners:
            event = self.lane.stream.record_event()
            for owner in owners:
                self._reads[owner].append(event)
                passed(owner)

    # On the training thread

    def overtake(self, owner: int) -> None:
        """This optimizer is about to write: the device waits for what still reads."""
        stream = torch.cuda.current_stream(self.lane.device)
        if self._hooked is None:
            self._hooked = stream.record_event(timing_event())
        for event in self._reads[owner]:
            stream.wait_event(event)

    # On the thread that commits

    def finish(self) -> tuple[int, float]:
        """Wait until everything has landed, and learn from it. Returns the direct bytes and the seconds they took."""
        self._done.synchronize()
        direct_bytes = sum(piece.size_bytes for piece in self._direct)
        took_s = self._at_s(self._left) - self._at_s(self._started)
        if direct_bytes and took_s > 0:
            split, spare_s = self.lane.split, self._spare_s()
            log.debug(
                "direct: %d bytes in %.4f s, %.4f s to spare; late: %d", direct_bytes, took_s, spare_s, split.late_bytes
            )
            split.learn(spare_s, direct_bytes / took_s)
        return direct_bytes, took_s

    def _spare_s(self) -> float:
        """From the end of the direct copies to the update, as the device saw it."""
        if self._hooked is None or not self._hooked.query():  # type: ignore[no-untyped-call]
            return self._at_s(self._left)  # it is still to come: there was time for more
        return self._at_s(self._hooked) - self._at_s(self._left)

    def _at_s(self, event: torch.cuda.Event) -> float:
        return float(self.begin.elapsed_time(event)) / 1000


def _waited_for() -> torch.cuda.Event:
    """By a thread that sleeps meanwhile."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
