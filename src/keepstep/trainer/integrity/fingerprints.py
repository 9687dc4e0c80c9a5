"""Fingerprints of device memory at `take`, compared with the copy in the arena and with what is restored.

They are computed on the device, so they cover the whole path: link, host memory, network, decoding, and back. A device
needs a few milliseconds to read all of a state, so that is done for the first snapshots of a layout only; after that
other chunks are drawn each time.

The copy is read in sums of many chunks: the fingerprint of a sum is the sum of fingerprints. A call per chunk would
take the interpreter from the training thread thousands of times.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch

from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES
from keepstep.parity.code import coefficients, weighted_sum
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, combine, fingerprint
from keepstep.parity.gpu.batches import ByteRanges, FingerprintBatch
from keepstep.trainer.plan.copy_plan import CopyOp
from keepstep.trainer.plan.parity_ops import ParityOp

SHARE = 64  # One chunk of this many is drawn.
# Chunks in a sum. With fewer, more threads share the work, but wait longer for the interpreter than that saves.
CHUNKS_PER_SUM = 16
LENGTH = struct.Struct("<Q")
ROW = np.dtype([("offset", "<u8"), ("size", "<u4"), ("print", f"V{FINGERPRINT_BYTES}")])


@dataclass(frozen=True)
class ChunkSample:
    """Some chunks of the targets of operations."""

    ops: Sequence[CopyOp | ParityOp]
    index: np.ndarray  # of the operation, by chunk
    offset: np.ndarray  # in the payload
    size: np.ndarray

    @classmethod
    def of(cls, ops: Sequence[CopyOp | ParityOp], chosen: random.Random | None) -> ChunkSample:
        """All chunks, or those that are drawn."""
        sizes = np.array([op.size_bytes for op in ops], dtype=np.int64)
        counts = -(-sizes // CHUNK_BYTES)
        index = np.repeat(np.arange(len(ops)), counts)
        inside = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
        if chosen is not None:
            drawn = sorted(chosen.sample(range(len(index)), -(-len(index) // SHARE)))
            index, inside = index[drawn], inside[drawn]
        offset = np.array([op.offset for op in ops], dtype=np.int64)[index] + inside
        return cls(ops, index, offset, np.minimum(sizes[index] - inside, CHUNK_BYTES))

    def __len__(self) -> int:
        return len(self.index)


class DeviceFingerprints:
    """Of one snapshot on one device. Made after the previous snapshot, because making it waits for the device."""

    def __init__(self, ops: Sequence[CopyOp | ParityOp], rng: random.Random, *, whole: bool) -> None:
        plain = [op for op in ops if isinstance(op, CopyOp)]
        parity = [op for op in ops if isinstance(op, ParityOp)]
        self.device = ops[0].device
        self._rng, chosen = rng, None if whole else rng
        self._plain, self._parity = ChunkSample.of(plain, chosen), ChunkSample.of(parity, chosen)
        sources = [parts for op in self._drawn() for parts in op.chunks]
        begin = self._plain.offset - np.array([op.offset for op in plain], dtype=np.int64)[self._plain.index]
        cuts = ByteRanges([op.source for op in plain], self._plain.index, begin, self._plain.size)
        self._batch = FingerprintBatch(sources, cuts)
        self._rows: torch.Tensor | None = None
        self._read: np.ndarray | None = None
        num_rows = len(self._plain) + len(sources)
        self._host_rows = torch.empty(
            num_rows, FINGERPRINT_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        self._copied: torch.cuda.Event | None = None
        self.is_queued = False  # The copy to the host is queued, or done.

    def _drawn(self) -> list[ParityOp]:
        ops = [self._parity.ops[index] for index in self._parity.index]
        return [op for op in ops if isinstance(op, ParityOp)]

    def compute(self) -> None:
        """Queue them on the current stream. Once."""
        self._rows = self._batch.run()

    def copy_to_host(self) -> None:
        """Queue their copy to the host on the current stream, which waits for `compute`.

        It should be the stream of the large copies: all copies to the host use one engine of the device. On another
        stream these would wait for a whole snapshot, and slow it down by a twelfth meanwhile.
        """
        assert self._rows is not None
        self._host_rows.copy_(self._rows, non_blocking=True)
        if self._rows.is_cuda:
            self._copied = torch.cuda.current_stream(self.device).record_event()
        self.is_queued = True

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        """The first operation of these optimizers whose source has changed since `take`. Waits for the device.

        The fingerprints of `take` stay: other optimizers may rightly have written since, and the copy is compared with
        the fingerprints later.
        """
        before = self._expected()
        differs = (before != self._with_parity(self._batch.run().cpu().numpy())).any(axis=1)
        return next((op for op in self._ops_at(differs) if op.owners & owners), None)

    def changed_in_transit(self, payload: torch.Tensor, readers: Executor | None = None) -> CopyOp | ParityOp | None:
        """The first operation whose copy differs from its source at `take`. Waits for the device, reads the copy.

        `readers`: threads that compare; without them the calling thread does.
        """
        expected, landed = self._expected(), payload.numpy()
        offsets = np.concatenate([self._plain.offset, self._parity.offset])
        sizes = np.concatenate([self._plain.size, self._parity.size])

        def compare(start: int) -> np.ndarray | None:
            """Which chunks of one sum are wrong, if any is."""
            some = slice(start, start + CHUNKS_PER_SUM)
            chunks = [landed[at : at + size].data for at, size in zip(offsets[some], sizes[some], strict=True)]
            rows = [row.tobytes() for row in expected[some]]
            weights = bytes(self._rng.randrange(1, 256) for _ in chunks)
            total = np.empty(CHUNK_BYTES, dtype=np.uint8)
            weighted_sum(weights, chunks, total.data)
            if fingerprint(total.data) == combine(weights, rows):
                return None
            wrong = np.zeros(len(expected), dtype=bool)
            wrong[some] = [fingerprint(chunk) != row for chunk, row in zip(chunks, rows, strict=True)]
            return wrong

        results = _map(readers, compare, range(0, len(offsets), CHUNKS_PER_SUM))
        wrong = next((marked for marked in results if marked is not None), None)
        return next(iter(self._ops_at(wrong))) if wrong is not None else None

    def encode(self) -> bytes:
        """Stored with the snapshot. Without parity: of its sources the snapshot does not hold every byte."""
        kept = np.zeros(len(self._plain), dtype=ROW)
        kept["offset"], kept["size"] = self._plain.offset, self._plain.size
        kept["print"] = self._expected()[: len(kept)].view(f"V{FINGERPRINT_BYTES}").reshape(-1)
        return kept.tobytes()

    def _expected(self) -> np.ndarray:
        """A row per chunk, at `take`. Waits for the device, once. From any thread."""
        read = self._read
        if read is None:
            assert self.is_queued
            if self._copied is not None:
                self._copied.synchronize()
            read = self._read = self._with_parity(self._host_rows.numpy().copy())
        return read

    def _with_parity(self, rows: np.ndarray) -> np.ndarray:
        """A row per chunk: that of parity follows from those of its sources."""
        at, made = len(self._plain), [rows[: len(self._plain)]]
        for op in self._drawn():
            factors = coefficients(op.m, op.row, op.k)[: len(op.chunks)]
            row = combine(factors, [one.tobytes() for one in rows[at : at + len(factors)]])
            made.append(np.frombuffer(row, dtype=np.uint8)[None])
            at += len(factors)
        return np.concatenate(made)

    def _ops_at(self, marked: np.ndarray) -> list[CopyOp | ParityOp]:
        both = [(self._plain, marked[: len(self._plain)]), (self._parity, marked[len(self._plain) :])]
        return [sample.ops[index] for sample, chosen in both for index in sample.index[chosen]]


def _map(
    readers: Executor | None, compare: Callable[[int], np.ndarray | None], starts: Iterable[int]
) -> Iterable[np.ndarray | None]:
    if readers is not None:
        try:
            return readers.map(compare, starts)
        except RuntimeError:  # The interpreter ends and starts no threads: the last snapshot is compared here.
            pass
    return map(compare, starts)


def frame(encoded: bytes, room: int) -> bytes:
    """As many fingerprints as fit, with their length, to be appended to other bytes."""
    fits = max(0, room - LENGTH.size) // ROW.itemsize * ROW.itemsize
    kept = encoded[:fits]
    return kept + LENGTH.pack(len(kept)) if kept else b""


def unframe(data: bytes) -> tuple[bytes, bytes]:
    """(the other bytes, the fingerprints)"""
    if len(data) < LENGTH.size:
        raise IntegrityError("the fingerprints of the snapshot are cut off")
    (size,) = LENGTH.unpack(data[-LENGTH.size :])
    begin = len(data) - LENGTH.size - size
    if begin < 0 or size % ROW.itemsize:
        raise IntegrityError("the fingerprints of the snapshot are cut off")
    return data[:begin], data[begin : begin + size]


def check_restored(encoded: bytes, written: Sequence[tuple[int, torch.Tensor, str]]) -> int:
    """Compare kept fingerprints with tensors on devices. Returns how many were; raises IntegrityError by path.

    `written`: (offset in the payload, flat bytes on a device, path).
    """
    ordered = sorted(written, key=lambda one: one[0])
    if not ordered:
        return 0
    rows = np.frombuffer(encoded, dtype=ROW)
    starts = np.array([start for start, _, _ in ordered], dtype=np.int64)
    sizes = np.array([flat.numel() for _, flat, _ in ordered], dtype=np.int64)
    which = np.searchsorted(starts, rows["offset"].astype(np.int64), side="right") - 1
    begin = rows["offset"].astype(np.int64) - starts[which]
    inside = (which >= 0) & (begin + rows["size"] <= sizes[which])
    for device in {flat.device for _, flat, _ in ordered}:
        there = np.array([flat.device == device for _, flat, _ in ordered])
        own = np.flatnonzero(inside & there[which])
        if not len(own):
            continue
        cuts = ByteRanges([flat for _, flat, _ in ordered], which[own], begin[own], rows["size"][own].astype(np.int64))
        expected = rows["print"][own].copy().view(np.uint8).reshape(-1, FINGERPRINT_BYTES)
        wrong = np.flatnonzero((FingerprintBatch([], cuts).run().cpu().numpy() != expected).any(axis=1))
        if len(wrong):
            path = ordered[which[own[wrong[0]]]][2]
            raise IntegrityError(f"{path} on {device} is not what was captured: its fingerprint differs")
    return int(inside.sum())
