"""Parity that a rank computes from its own replica, on the device that holds it (`parity.replicated = share`).

A parity chunk is a sum over the k chunks of its stripe row, whose bytes belong to several tensors. A chunk that is part
of one tensor is read in place; other chunks are assembled first. All of it must be read before an optimizer that owns
any of it writes: for fences and gates a parity chunk is a copy with several sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keepstep.layout import CHUNK_BYTES, ReplicaSet
from keepstep.parity.gpu.batches import EncodeBatch, Stripe, TensorBytes, encode, one_piece
from keepstep.trainer.plan.replica_shares import entry_ranges

MAX_RUN_CHUNKS = 16  # 64 MiB: the result of a run is one copy to the host.


@dataclass(frozen=True)
class ParityOp:
    """One parity chunk: what it is computed from, and its place in the payload."""

    chunks: tuple[tuple[TensorBytes, ...], ...]  # by index in the code; fewer than k at the end of the replica set
    k: int
    m: int
    row: int  # of the code
    offset: int
    path: str  # of the first tensor in it, for messages
    owners: frozenset[int]  # all optimizers that write any of it
    fenced: bool  # every byte of it has an owner
    size_bytes: int = CHUNK_BYTES

    @property
    def device(self) -> torch.device:
        return self.chunks[0][0].source.device

    @property
    def read_bytes(self) -> int:
        return sum(part.source.numel() for part in self.inputs())

    def inputs(self) -> list[TensorBytes]:
        return [part for parts in self.chunks for part in parts]

    def compute(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out`, on the device of the tensors, with the parity."""
        return self._encode([one_piece(parts, out.device) for parts in self.chunks], out)

    def window(self, begin: int, size_bytes: int) -> ParityOp:
        """The same for a range of the chunk; inputs count from the begin of the range."""
        end = begin + size_bytes
        chunks = tuple(
            tuple(
                TensorBytes(max(part.begin, begin) - begin, part.source[max(begin - part.begin, 0) : end - part.begin])
                for part in parts
                if part.begin < end and part.end > begin
            )
            for parts in self.chunks
        )
        return ParityOp(
            chunks, self.k, self.m, self.row, self.offset + begin, self.path, self.owners, self.fenced, size_bytes
        )

    def compute_from(self, sampled: list[torch.Tensor]) -> torch.Tensor:
        """The parity, on the CPU, of these bytes in place of the current ones; in the order of `inputs()`."""
        remaining = iter(sampled)
        sources: list[torch.Tensor | None] = []
        for parts in self.chunks:
            chunk = torch.zeros(self.size_bytes, dtype=torch.uint8)
            for part in parts:
                chunk[part.begin : part.end] = next(remaining)
            sources.append(chunk)
        return self._encode(sources, torch.empty(self.size_bytes, dtype=torch.uint8))

    def _encode(self, sources: list[torch.Tensor | None], out: torch.Tensor) -> torch.Tensor:
        encode(self.row, self.k, self.m, [*sources, *[None] * (self.k - len(sources))], out)
        return out


class ParityRun:
    """Parity chunks of a device that are adjacent in the payload: computed by one call, copied to the host by one copy.

    Tables of addresses are made at first use, once for each buffer that the result is written to.
    """

    def __init__(self, ops: Sequence[ParityOp]) -> None:
        self._ops = ops
        self._batches: dict[int, EncodeBatch] = {}
        self.offset = ops[0].offset
        self.size_bytes = sum(op.size_bytes for op in ops)
        self.owners = frozenset[int]().union(*(op.owners for op in ops))

    def compute(self, out: torch.Tensor, setup: torch.cuda.Stream) -> torch.Tensor:
        """Queue it on the current stream; what the host must wait for runs on `setup`."""
        batch = self._batches.get(out.data_ptr())
        if batch is None:
            with torch.cuda.stream(setup):
                batch = self._batches[out.data_ptr()] = self._batch(out)
        batch.run()
        return out

    def _batch(self, out: torch.Tensor) -> EncodeBatch:
        stripes, start = [], 0
        for op in self._ops:
            absent = [None] * (op.k - len(op.chunks))
            stripes.append(Stripe([op.row], [*op.chunks, *absent], [out[start : start + op.size_bytes]]))
            start += op.size_bytes
        return EncodeBatch(self._ops[0].k, self._ops[0].m, stripes)


def parity_runs(ops: Sequence[ParityOp]) -> list[ParityRun]:
    runs: list[list[ParityOp]] = []
    for op in sorted(ops, key=lambda op: op.offset):
        last = runs[-1][-1] if runs else None
        follows = last is not None and last.offset + last.size_bytes == op.offset
        if not (follows and last is not None and (last.k, last.m) == (op.k, op.m) and len(runs[-1]) < MAX_RUN_CHUNKS):
            runs.append([])
        runs[-1].append(op)
    return [ParityRun(run) for run in runs]


def parity_ops(replica_set: ReplicaSet, sources: list[torch.Tensor], owners: list[frozenset[int]]) -> list[ParityOp]:
    """The parity of a replica set that this rank stores; `sources` and `owners` by entry."""
    k, entries = replica_set.n - replica_set.m, replica_set.entries
    ops: list[ParityOp] = []
    for stored in replica_set.stored():
        if stored.chunk >= 0:
            continue
        chunks: list[tuple[TensorBytes, ...]] = []
        used: list[int] = []
        for chunk in range(stored.row * k, min((stored.row + 1) * k, replica_set.num_chunks)):
            start = chunk * CHUNK_BYTES
            ranges = list(entry_ranges(entries, start, start + CHUNK_BYTES))
            chunks.append(tuple(TensorBytes(entries[i].offset + a - start, sources[i][a:b]) for i, a, b in ranges))
            used += [index for index, _, _ in ranges]
        writers = [owners[index] for index in used]
        all_writers = frozenset[int]().union(*writers)
        path = entries[used[0]].path
        ops.append(
            ParityOp(tuple(chunks), k, replica_set.m, stored.code_row, stored.offset, path, all_writers, all(writers))
        )
    return ops
