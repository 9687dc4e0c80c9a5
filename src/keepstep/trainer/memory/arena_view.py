"""The trainer's writable view of its arena: slots as byte tensors, their layouts, page-locking for CUDA."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from keepstep.arena.memfd import Mapping
from keepstep.arena.slots import Arena, SlotSpan
from keepstep.trainer.memory import pinned
from keepstep.trainer.plan.copy_plan import CopyPlan

log = logging.getLogger("keepstep")


class ArenaView:
    """Owns the mapping and the arena."""

    def __init__(self, arena: Arena, mapping: Mapping) -> None:
        self.arena, self.mapping = arena, mapping
        # Through numpy: torch.frombuffer takes no reference to the map and crashes after close.
        self.bytes = torch.from_numpy(np.frombuffer(mapping.map, dtype=np.uint8))
        self._layouts: dict[int, bytes] = {}
        self._registered: dict[int, int] = {}
        """addresses by offset"""

    def payload(self, slot: int) -> torch.Tensor:
        span = self.arena.payload_span(slot)
        return self.bytes[span.offset : span.offset + span.size_bytes]

    def write_layout(self, slot: int, plan: CopyPlan) -> None:
        """Only when the slot holds another one: it is the same for thousands of snapshots."""
        if self._layouts.get(slot) != plan.layout_digest:
            self._layouts.pop(slot, None)
            self.arena.segment.write(self.arena.layout_span(slot).offset, plan.encoded)
            self._clear_gaps(slot, plan)
            self._layouts[slot] = plan.layout_digest

    def _clear_gaps(self, slot: int, plan: CopyPlan) -> None:
        """Once per layout: what no copy writes stays zero, so that equal chunks are equal on all nodes."""
        payload = self.payload(slot)
        for offset, size in plan.gaps:
            payload[offset : offset + size].zero_()

    def forget_layouts(self) -> None:
        """Write them again: what stands there may be damaged."""
        self._layouts = {}

    def register_with_cuda(self) -> None:
        """Page-lock every slot for devices: copies then run at link speed beside the computation."""
        if not pinned.in_use():
            return
        # One range per slot: no copy may cross the border between two.
        spans = [self.arena.payload_span(slot) for slot in range(self.arena.num_slots)]
        spans = [span for span in spans if span.offset not in self._registered]
        if not spans:
            return
        with ThreadPoolExecutor(max_workers=len(spans), thread_name_prefix="keepstep-register") as pool:
            failures = list(pool.map(self._register, spans))
        if any(failures):
            log.warning("the arena could not be registered with CUDA (error %d); copies will be slower", max(failures))

    def _register(self, span: SlotSpan) -> int:
        address = self.mapping.address + span.offset
        failure = pinned.lock_pages(address, span.size_bytes)
        if not failure:
            self._registered[span.offset] = address
        return failure

    def close(self) -> None:
        if self._registered:
            pinned.unlock_pages(self._registered.values())
        del self.bytes
        self.mapping.close()
        self.arena.close()
