"""Samples of host tensors at `take`: windows of bytes, compared with the copy in the arena.

Tensor version counters do not count the writes that matter (optimizer_fence.py), so bytes are compared: other
operations and other windows each time, so that in time every byte is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from keepstep.layout import ALIGN, align
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.plan.parity_ops import ParityOp

# A lazily copied tensor is sampled at `take`: this share of its bytes, within these bounds.
SAMPLE_SHARE = 256
SAMPLE_MIN, SAMPLE_MAX = 64, 1 << 20
MAX_SAMPLES = 256


@dataclass(frozen=True)
class SampleWindow:
    """A range of the target of one operation, and the source bytes that it is computed from."""

    op: CopyOp | ParityOp
    offset: int  # in the operation
    size_bytes: int
    sources: list[torch.Tensor]
    parity: ParityOp | None = None  # of the window only

    @classmethod
    def choose(cls, op: CopyOp | ParityOp, rng: random.Random) -> SampleWindow:
        size = min(op.size_bytes, max(SAMPLE_MIN, min(SAMPLE_MAX, op.size_bytes // SAMPLE_SHARE)))
        offset = rng.randrange(op.size_bytes - size + 1)
        parity = op.window(offset, size) if isinstance(op, ParityOp) else None
        sources = (
            [part.source for part in parity.inputs()] if parity is not None else [op.source[offset : offset + size]]  # type: ignore[union-attr]
        )
        return cls(op, offset, size, sources, parity)

    def matches(self, payload: torch.Tensor, taken: list[torch.Tensor]) -> bool:
        """Whether the payload has the sampled bytes, or their parity."""
        begin = self.op.offset + self.offset
        copied = payload[begin : begin + self.size_bytes]
        return torch.equal(self.parity.compute_from(taken) if self.parity is not None else taken[0], copied)


class HostSamples:
    """The windows of one snapshot."""

    def __init__(self, windows: list[SampleWindow]) -> None:
        self.windows = windows
        self._sources = [source for window in windows for source in window.sources]
        self._starts, sizes = _pack(self._sources)
        # One buffer per device: to copy hundreds of windows one by one takes half a second beside the snapshot.
        self._taken = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}

    @classmethod
    def choose(cls, lazy: Sequence[CopyOp | ParityOp], rng: random.Random) -> HostSamples:
        ops = lazy if len(lazy) <= MAX_SAMPLES else rng.sample(lazy, MAX_SAMPLES)
        return cls([SampleWindow.choose(op, rng) for op in ops])

    def take(self) -> None:
        if self._sources:
            torch._foreach_copy_(self._parts(self._taken), self._sources)

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        """The first operation of these optimizers whose source has changed since `take`."""
        for window, taken in self._each(self._taken):
            if window.op.owners & owners and not all(map(torch.equal, taken, window.sources)):
                return window.op
        return None

    def changed_in_transit(self, payload: torch.Tensor) -> CopyOp | ParityOp | None:
        """The first operation whose copy differs from its source at `take`."""
        here = {device: buffer.to(payload.device) for device, buffer in self._taken.items()}
        return next((window.op for window, taken in self._each(here) if not window.matches(payload, taken)), None)

    def _each(self, buffers: dict[torch.device, torch.Tensor]) -> Iterator[tuple[SampleWindow, list[torch.Tensor]]]:
        parts = iter(self._parts(buffers))
        return ((window, [next(parts) for _ in window.sources]) for window in self.windows)

    def _parts(self, buffers: dict[torch.device, torch.Tensor]) -> list[torch.Tensor]:
        placed = zip(self._sources, self._starts, strict=True)
        return [buffers[source.device][start : start + source.numel()] for source, start in placed]


def _pack(sources: list[torch.Tensor]) -> tuple[list[int], dict[torch.device, int]]:
    """The offset of each source in the buffer of its device, and the sizes of the buffers."""
    starts, sizes = [], dict[torch.device, int]()
    for source in sources:
        starts.append(sizes.get(source.device, 0))
        sizes[source.device] = align(starts[-1] + source.numel(), ALIGN)
    return starts, sizes
