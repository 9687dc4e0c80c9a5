"""Small tensors of a device that leave together: one call collects them, one copy takes them away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keepstep.layout import ALIGN
from keepstep.trainer.units import Unit

AT_ONCE = 2048
"""tensors per call: a call with more holds the interpreter for milliseconds"""


@dataclass
class Gathered:
    """Units that lie side by side in the payload, and a buffer on their device that looks the same."""

    offset: int
    buffer: torch.Tensor
    batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """(places in the buffer, sources)"""
    owners: frozenset[int]

    def collect(self) -> None:
        for places, sources in self.batches:
            torch._foreach_copy_(places, sources)

    def leave(self, payload: torch.Tensor) -> None:
        """On the current stream; its order keeps the buffer from being filled again too early."""
        self.collect()
        payload[self.offset : self.offset + self.buffer.numel()].copy_(self.buffer, non_blocking=True)


def gather(units: Sequence[Unit]) -> list[Gathered]:
    """All units are on one device. Those with a hole between them go apart."""
    found: list[Gathered] = []
    for run in _runs(sorted(units, key=lambda unit: unit.offset)):
        start, end = run[0].offset, run[-1].offset + run[-1].size_bytes
        buffer = torch.zeros(end - start, dtype=torch.uint8, device=run[0].device)
        places = [buffer[unit.offset - start : unit.offset - start + unit.size_bytes] for unit in run]
        owners = frozenset[int]().union(*(unit.owners for unit in run))
        batches = _batches(places, [unit.source for unit in run])
        found.append(Gathered(start, buffer, batches, owners))
    return found


def _runs(units: list[Unit]) -> list[list[Unit]]:
    runs: list[list[Unit]] = []
    end = -1
    for unit in units:
        if not runs or unit.offset - end >= ALIGN:
            runs.append([])
        runs[-1].append(unit)
        end = unit.offset + unit.size_bytes
    return runs


def _batches(
    places: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """By words where bytes allow it, which a device moves several times as fast."""
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
