"""Parity chunks of a device that lie side by side in the payload: computed by one call, taken away by one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepstep.parity.gpu.batches import EncodeBatch, Stripe, TensorBytes
from keepstep.trainer.plan.parity_ops import ParityOp

MOST = 16


class ParityRun:
    """Tables of addresses are made at first use, and for each place that the result goes to."""

    def __init__(self, units: Sequence[ParityOp]) -> None:
        self._units = units
        self._batches: dict[int, EncodeBatch] = {}
        self.offset = units[0].offset
        self.size_bytes = sum(unit.size_bytes for unit in units)
        self.owners = frozenset[int]().union(*(unit.owners for unit in units))

    def compute(self, out: torch.Tensor, aside: torch.cuda.Stream) -> torch.Tensor:
        """Queue it on the current stream; what must be waited for is done on `aside`."""
        batch = self._batches.get(out.data_ptr())
        if batch is None:
            with torch.cuda.stream(aside):
                batch = self._batches[out.data_ptr()] = self._batch(out)
        batch.run()
        return out

    def _batch(self, out: torch.Tensor) -> EncodeBatch:
        stripes, start = [], 0
        for unit in self._units:
            sources = [[TensorBytes(part.begin, part.source) for part in parts] for parts in unit.chunks]
            absent = [None] * (unit.k - len(sources))
            stripes.append(Stripe([unit.row], [*sources, *absent], [out[start : start + unit.size_bytes]]))
            start += unit.size_bytes
        return EncodeBatch(self._units[0].k, self._units[0].m, stripes)


def coded_runs(units: Sequence[ParityOp]) -> list[ParityRun]:
    runs: list[list[ParityOp]] = []
    for unit in sorted(units, key=lambda unit: unit.offset):
        last = runs[-1][-1] if runs else None
        follows = last is not None and last.offset + last.size_bytes == unit.offset
        if not (follows and last is not None and (last.k, last.m) == (unit.k, unit.m) and len(runs[-1]) < MOST):
            runs.append([])
        runs[-1].append(unit)
    return [ParityRun(run) for run in runs]
