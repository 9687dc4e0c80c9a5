"""The trainer's writable view of its arena: slots as byte tensors, with the places of a plan's units cached."""

from __future__ import annotations

import logging
from contextlib import suppress

import numpy as np
import torch

from keepstep.arena.segment import Mapping
from keepstep.arena.slots import Arena
from keepstep.trainer.copies import CopyPlan, Unit

log = logging.getLogger("keepstep")


class ArenaView:
    """Owns the mapping and the arena."""

    def __init__(self, arena: Arena, mapping: Mapping) -> None:
        self.arena, self.mapping = arena, mapping
        # Through numpy: torch.frombuffer takes no reference to the map and crashes after close.
        self.bytes = torch.from_numpy(np.frombuffer(mapping.map, dtype=np.uint8))
        self._targets: dict[int, dict[int, torch.Tensor]] = {}
        self._layouts: dict[int, bytes] = {}
        self._plan: CopyPlan | None = None
        self._registered = False

    def payload(self, slot: int) -> torch.Tensor:
        span = self.arena.payload_span(slot)
        return self.bytes[span.offset : span.offset + span.size_bytes]

    def targets(self, slot: int, plan: CopyPlan, units: list[Unit]) -> list[torch.Tensor]:
        """Where the units of a plan go in a slot; the views are made once."""
        if plan is not self._plan:
            self._plan = plan
            self._targets.clear()
        known = self._targets.setdefault(slot, {})
        missing = [unit for unit in units if unit.offset not in known]
        if missing:
            payload = self.payload(slot)
            known.update((u.offset, payload[u.offset : u.offset + u.size_bytes]) for u in missing)
        return [known[unit.offset] for unit in units]

    def write_layout(self, slot: int, plan: CopyPlan) -> None:
        """Only when the slot holds another one: it is the same for thousands of snapshots."""
        if self._layouts.get(slot) != plan.layout_digest:
            self._layouts.pop(slot, None)
            self.arena.segment.write(self.arena.layout_span(slot).offset, plan.encoded)
            self._layouts[slot] = plan.layout_digest

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
        self._plan = None
        del self.bytes
        self.mapping.close()
        self.arena.close()


def _clear_cuda_error() -> None:
    """A failed registration leaves an error behind that the next, innocent call would report."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
