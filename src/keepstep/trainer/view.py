"""The trainer's writable view of its arena: slots as byte tensors, with the places of a plan's units cached."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from keepstep.arena.segment import Mapping
from keepstep.arena.slots import Arena
from keepstep.trainer.coding import Coded
from keepstep.trainer.copies import CopyPlan, History
from keepstep.trainer.units import Unit

log = logging.getLogger("keepstep")


class ArenaView:
    """Owns the mapping and the arena."""

    def __init__(self, arena: Arena, mapping: Mapping) -> None:
        self.arena, self.mapping = arena, mapping
        # Through numpy: torch.frombuffer takes no reference to the map and crashes after close.
        self.bytes = torch.from_numpy(np.frombuffer(mapping.map, dtype=np.uint8))
        self._targets: dict[int, dict[tuple[int, int], torch.Tensor]] = {}
        self._layouts: dict[int, bytes] = {}
        self._history: History | None = None
        self._registered = False

    def payload(self, slot: int) -> torch.Tensor:
        span = self.arena.payload_span(slot)
        return self.bytes[span.offset : span.offset + span.size_bytes]

    def targets(self, slot: int, plan: CopyPlan, units: Sequence[Unit | Coded]) -> list[torch.Tensor]:
        """Where the units of a plan go in a slot; the views are made once."""
        if plan.history is not self._history:
            self._history = plan.history
            self._targets.clear()
        known = self._targets.setdefault(slot, {})
        places = [(unit.offset, unit.size_bytes) for unit in units]
        missing = [place for place in places if place not in known]
        if missing:
            payload = self.payload(slot)
            known.update(((offset, size), payload[offset : offset + size]) for offset, size in missing)
        return [known[place] for place in places]

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
        """Page-lock the arena for devices: copies then run at link speed beside the computation."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failure = int(runtime.cudaHostRegister(self.mapping.address, self.mapping.size_bytes, 1))
        self._registered = failure == 0
        if failure:
            log.warning("the arena could not be registered with CUDA (error %d); copies will be slower", failure)
            _clear_cuda_error()

    def close(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.mapping.address)  # type: ignore[no-untyped-call]
        self._targets.clear()
        self._history = None
        del self.bytes
        self.mapping.close()
        self.arena.close()


def _clear_cuda_error() -> None:
    """A failed registration leaves an error behind that the next, innocent call would report."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
