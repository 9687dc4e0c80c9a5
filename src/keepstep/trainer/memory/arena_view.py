"""The trainer's writable view of its arena: slots as byte tensors, their layouts, the preparation of its memory.

The target of each copy in a slot is a view too, made once for thousands of snapshots (SlotTargets).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from keepstep.arena.memfd import Mapping
from keepstep.arena.slots import Arena
from keepstep.trainer.memory import pinned
from keepstep.trainer.plan.copy_plan import CopyOp, CopyPlan, CopySchedule
from keepstep.trainer.plan.parity_ops import ParityOp

log = logging.getLogger("keepstep")

PREFAULT_THREADS = 2  # Few, because training runs beside them: 17 GiB of new pages take 5 s with two.
PREFAULT_BYTES = 1 << 30  # Pages that are faulted in between two looks at whether to stop.
REGISTER_SHARE = 0.2  # Share of the time in which page-locking keeps other threads from launching kernels.


class ArenaView:
    """The slots of a mapped arena as tensors. Owns the mapping and the arena."""

    def __init__(self, arena: Arena, mapping: Mapping) -> None:
        self.arena, self.mapping = arena, mapping
        # Through numpy: torch.frombuffer takes no reference to the map and crashes after close.
        self.bytes = torch.from_numpy(np.frombuffer(mapping.map, dtype=np.uint8))
        self._layouts: dict[int, bytes] = {}
        self._registered: list[int] = []  # Addresses of the ranges that are page-locked.

    def payload(self, slot: int) -> torch.Tensor:
        span = self.arena.payload_span(slot)
        return self.bytes[span.offset : span.offset + span.size_bytes]

    def write_layout(self, slot: int, plan: CopyPlan) -> None:
        """Write the layout of a slot, if it holds another one: layouts are the same for thousands of snapshots."""
        if self._layouts.get(slot) != plan.layout_digest:
            self._layouts.pop(slot, None)
            self.arena.segment.write(self.arena.layout_span(slot).offset, plan.encoded)
            self._clear_gaps(slot, plan)
            self._layouts[slot] = plan.layout_digest

    def _clear_gaps(self, slot: int, plan: CopyPlan) -> None:
        """Zero the bytes that no copy writes, once per layout: equal state must give equal chunks on all nodes."""
        payload = self.payload(slot)
        for offset, size in plan.gaps:
            payload[offset : offset + size].zero_()

    def forget_layouts(self) -> None:
        """Write all layouts again with the next snapshots: those in the slots may be damaged."""
        self._layouts = {}

    def prepare(self, stop: threading.Event) -> None:
        """Reserve all memory, fault it in and page-lock it, at a pace that training does not feel.

        A shortage raises KeeperError here, not SIGBUS in a snapshot. Returns early when `stop` is set.
        """
        memfd, size_bytes = self.arena.segment, self.arena.segment.size_bytes
        if memfd.allocated_bytes < size_bytes:
            memfd.reserve(cancelled=stop.is_set)
        for begin in range(0, size_bytes, PREFAULT_BYTES):
            if not stop.is_set():
                self.mapping.populate(PREFAULT_THREADS, begin, min(begin + PREFAULT_BYTES, size_bytes))
        if pinned.in_use():
            self._register(stop)

    def _register(self, stop: threading.Event) -> None:
        """Page-lock every slot for devices: copies then run at link speed beside the computation."""
        spans = [self.arena.payload_span(slot) for slot in range(self.arena.num_slots)]
        for span in spans:
            for begin, end in pinned.ranges(span.offset, span.offset + span.size_bytes):
                if self.mapping.address + begin in self._registered:  # by an earlier attempt
                    continue
                started = time.monotonic()
                failure = pinned.lock_pages(self.mapping.address + begin, end - begin)
                if failure:
                    log.warning("the arena could not be page-locked (CUDA error %d); copies will be slower", failure)
                    return
                self._registered.append(self.mapping.address + begin)
                if stop.wait((time.monotonic() - started) * (1 / REGISTER_SHARE - 1)):
                    return

    def close(self) -> None:
        if self._registered:
            pinned.unlock_pages(self._registered)
        del self.bytes
        self.mapping.close()
        self.arena.close()


class SlotTargets:
    """Target of each operation, in the order of the schedule."""

    def __init__(self, payload: torch.Tensor, schedule: CopySchedule) -> None:
        # Its lists, not the schedule: that is the weak key of the cache which holds this object.
        self.payload, self._eager, self._lazy_on_host = payload, schedule.eager, schedule.lazy_on_host

    @cached_property
    def eager(self) -> list[torch.Tensor]:
        return _places(self.payload, self._eager)

    @cached_property
    def lazy_on_host(self) -> list[torch.Tensor]:
        """For the copy thread: thousands of views take milliseconds to make."""
        return _places(self.payload, self._lazy_on_host)


class TargetCache:
    """Targets by schedule and slot, of one arena at a time; they are freed with the schedule."""

    def __init__(self) -> None:
        self._view: ArenaView | None = None
        self._targets: WeakKeyDictionary[CopySchedule, dict[int, SlotTargets]] = WeakKeyDictionary()

    def targets(self, view: ArenaView, slot: int, schedule: CopySchedule) -> SlotTargets:
        if view is not self._view:
            self.clear()
            self._view = view
        by_slot = self._targets.setdefault(schedule, {})
        if slot not in by_slot:
            by_slot[slot] = SlotTargets(view.payload(slot), schedule)
        return by_slot[slot]

    def clear(self) -> None:
        """Call it before the arena is closed: as long as a view of it exists, its memory stays mapped."""
        self._view = None
        self._targets.clear()


def _places(payload: torch.Tensor, ops: Sequence[CopyOp | ParityOp]) -> list[torch.Tensor]:
    return [payload[op.offset : op.offset + op.size_bytes] for op in ops]
