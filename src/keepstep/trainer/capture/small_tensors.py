"""Small tensors of a device that leave together: one call collects them, one copy takes them away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keepstep.layout import ALIGN
from keepstep.parity.gpu.batches import CopyBatch
from keepstep.trainer.plan.units import CopyOp

AT_ONCE = 2048
"""tensors per call: a call with more holds the interpreter for milliseconds"""


@dataclass
class SmallTensorBatch:
    """Units that lie side by side in the payload, and a buffer on their device that looks the same."""

    offset: int
    buffer: torch.Tensor
    units: Sequence[CopyOp]
    batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """(places in the buffer, sources)"""
    owners: frozenset[int]
    prepared: CopyBatch | None = None

    def prepare(self) -> None:
        """Have all addresses on the device, which then collects by itself: without, thousands of tensors take the
        host tens of milliseconds each time. Waits for the device at first use."""
        if self.prepared is None and self.buffer.is_cuda:
            starts = [unit.offset - self.offset for unit in self.units]
            places = [self.buffer[at : at + unit.size_bytes] for at, unit in zip(starts, self.units, strict=True)]
            self.prepared = CopyBatch([unit.source for unit in self.units], places)

    def collect(self) -> None:
        if self.prepared is not None:
            self.prepared.run()
            return
        for places, sources in self.batches:
            torch._foreach_copy_(places, sources)

    def leave(self, payload: torch.Tensor) -> None:
        """What was collected, on the current stream."""
        payload[self.offset : self.offset + self.buffer.numel()].copy_(self.buffer, non_blocking=True)


def gather(units: Sequence[CopyOp]) -> list[SmallTensorBatch]:
    """All units are on one device. Those with a hole between them go apart."""
    found: list[SmallTensorBatch] = []
    for run in runs_of(units):
        start, end = run[0].offset, run[-1].offset + run[-1].size_bytes
        buffer = torch.zeros(end - start, dtype=torch.uint8, device=run[0].device)
        places = [buffer[unit.offset - start : unit.offset - start + unit.size_bytes] for unit in run]
        owners = frozenset[int]().union(*(unit.owners for unit in run))
        batches = in_batches(places, [unit.source for unit in run])
        found.append(SmallTensorBatch(start, buffer, run, batches, owners))
    return found


def runs_of(units: Sequence[CopyOp]) -> list[list[CopyOp]]:
    """Side by side in the payload: nothing but padding is between them."""
    runs: list[list[CopyOp]] = []
    end = -1
    for unit in sorted(units, key=lambda unit: unit.offset):
        if not runs or unit.offset - end >= ALIGN:
            runs.append([])
        runs[-1].append(unit)
        end = unit.offset + unit.size_bytes
    return runs


def in_batches(
    places: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """For `torch._foreach_copy_`. By words where bytes allow it, which a device moves several times as fast."""
    words: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    rest: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for place, source in zip(places, sources, strict=True):
        whole = _has_words(place) and _has_words(source)
        into, out = words if whole else rest
        into.append(place.view(torch.int64) if whole else place)
        out.append(source.view(torch.int64) if whole else source)
    return [
        (into[at : at + AT_ONCE], out[at : at + AT_ONCE])
        for into, out in (words, rest)
        for at in range(0, len(into), AT_ONCE)
    ]


def _has_words(part: torch.Tensor) -> bool:
    return not (part.numel() % 8 or part.data_ptr() % 8 or part.storage_offset() % 8)
