"""Parity that a rank computes from its own replica, where the replica lies (`parity.replicated = share`).

A parity chunk is a sum over the k chunks of its stripe row, and those are bytes of several tensors. Where a chunk lies
in one tensor it is read in place, otherwise its pieces are gathered first. All of it must be read before an optimizer
that owns any of them writes: to fences and gates a parity chunk is a copy with several sources.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keepstep.layout import CHUNK_BYTES, ReplicaSet
from keepstep.parity.gpu.batches import encode
from keepstep.trainer.plan.ranges import cut


@dataclass(frozen=True)
class ParityInput:
    """Bytes of one tensor inside a chunk."""

    source: torch.Tensor
    begin: int
    """in the chunk"""

    @property
    def end(self) -> int:
        return self.begin + self.source.numel()


@dataclass(frozen=True)
class ParityOp:
    """One parity chunk: how it is made and where it goes."""

    chunks: tuple[tuple[ParityInput, ...], ...]
    """the sources, by index in the code; fewer than k at the end of the stream"""
    k: int
    m: int
    row: int
    """of the code"""
    offset: int
    path: str
    """the first tensor in it, for messages"""
    owners: frozenset[int]
    """all optimizers that write any of it"""
    fenced: bool
    """whether each byte of it has an owner"""
    size_bytes: int = CHUNK_BYTES

    @property
    def device(self) -> torch.device:
        return self.chunks[0][0].source.device

    @property
    def read_bytes(self) -> int:
        return sum(part.source.numel() for parts in self.chunks for part in parts)

    def parts(self) -> list[ParityInput]:
        return [part for parts in self.chunks for part in parts]

    def compute(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out`, on the device of the tensors, with the parity."""
        sources = [_in_one(parts, out.device) for parts in self.chunks]
        return self._mix(sources, out)

    def window(self, begin: int, size_bytes: int) -> ParityOp:
        """The same for a stretch of the chunk only; parts begin where they begin in the stretch."""
        end = begin + size_bytes
        chunks = tuple(
            tuple(
                ParityInput(part.source[max(begin - part.begin, 0) : end - part.begin], max(part.begin, begin) - begin)
                for part in parts
                if part.begin < end and part.end > begin
            )
            for parts in self.chunks
        )
        return ParityOp(
            chunks, self.k, self.m, self.row, self.offset + begin, self.path, self.owners, self.fenced, size_bytes
        )

    def compute_from(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """The parity on the CPU of these bytes, in the order of `parts()`, in place of what stands there now."""
        left = iter(taken)
        sources: list[torch.Tensor] = []
        for parts in self.chunks:
            whole = torch.zeros(self.size_bytes, dtype=torch.uint8)
            for part in parts:
                whole[part.begin : part.end] = next(left)
            sources.append(whole)
        return self._mix(list(sources), torch.empty(self.size_bytes, dtype=torch.uint8))

    def _mix(self, sources: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        encode(self.row, self.k, self.m, [*sources, *[None] * (self.k - len(sources))], out)
        return out


def _in_one(parts: tuple[ParityInput, ...], device: torch.device) -> torch.Tensor:
    """A chunk in one piece of memory, as far as it reaches; gaps between tensors are zero."""
    if len(parts) == 1 and parts[0].begin == 0 and parts[0].source.device == device:
        return parts[0].source
    gathered = torch.zeros(max(part.end for part in parts), dtype=torch.uint8, device=device)
    for part in parts:
        gathered[part.begin : part.end].copy_(part.source, non_blocking=True)
    return gathered


def coded_units(stream: ReplicaSet, sources: list[torch.Tensor], owners: list[frozenset[int]]) -> list[ParityOp]:
    """The parity of a stream that this rank stores; `sources` and `owners` by entry."""
    k = stream.n - stream.m
    found: list[ParityOp] = []
    for stored in stream.stored():
        if stored.chunk >= 0:
            continue
        chunks: list[tuple[ParityInput, ...]] = []
        entries: list[int] = []
        for chunk in range(stored.row * k, min((stored.row + 1) * k, stream.num_chunks)):
            start = chunk * CHUNK_BYTES
            ranges = list(cut(stream.entries, start, start + CHUNK_BYTES))
            chunks.append(
                tuple(ParityInput(sources[i][a:b], stream.entries[i].offset + a - start) for i, a, b in ranges)
            )
            entries += [index for index, _, _ in ranges]
        writers = [owners[index] for index in entries]
        path = stream.entries[entries[0]].path
        every = frozenset[int]().union(*writers)
        found.append(ParityOp(tuple(chunks), k, stream.m, stored.code_row, stored.offset, path, every, all(writers)))
    return found
