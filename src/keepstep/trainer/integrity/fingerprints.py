"""Fingerprints of device memory as it was at `take`, to be compared with what lands and with what is restored.

They are computed where the tensors are, so they cover the whole way: link, host memory, wire, decoding, and back. All
of a state takes a device a few milliseconds to read, so that is done for the first snapshots of a layout only; after
that other chunks are chosen each time.

What landed is read in sums of many chunks: the fingerprint of a sum is the sum of fingerprints. A call per chunk would
take the interpreter from the training thread thousands of times.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Sequence
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

SHARE = 64
AT_ONCE = 16
"""chunks in a sum. With fewer, more threads share them, and wait for the interpreter longer than that saves"""
LENGTH = struct.Struct("<Q")
Over = Callable[[Callable[[int], "np.ndarray | None"], Iterable[int]], "Iterable[np.ndarray | None]"]
ROW = np.dtype([("offset", "<u8"), ("size", "<u4"), ("print", f"V{FINGERPRINT_BYTES}")])


@dataclass(frozen=True)
class ChunkSample:
    """Chunks of what units write: where each lies in the payload, and whose it is."""

    units: Sequence[CopyOp | ParityOp]
    unit: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, units: Sequence[CopyOp | ParityOp], chosen: random.Random | None) -> ChunkSample:
        """All chunks, or those that are drawn."""
        sizes = np.array([unit.size_bytes for unit in units], dtype=np.int64)
        counts = -(-sizes // CHUNK_BYTES)
        unit = np.repeat(np.arange(len(units)), counts)
        inside = (np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
        if chosen is not None:
            drawn = sorted(chosen.sample(range(len(unit)), -(-len(unit) // SHARE)))
            unit, inside = unit[drawn], inside[drawn]
        offset = np.array([one.offset for one in units], dtype=np.int64)[unit] + inside
        return cls(units, unit, offset, np.minimum(sizes[unit] - inside, CHUNK_BYTES))

    def __len__(self) -> int:
        return len(self.unit)


class DeviceFingerprints:
    """Of one snapshot on one device. Made behind the snapshot before: making it waits for the device."""

    def __init__(self, units: Sequence[CopyOp | ParityOp], rng: random.Random, *, whole: bool) -> None:
        plain = [unit for unit in units if isinstance(unit, CopyOp)]
        coded = [unit for unit in units if isinstance(unit, ParityOp)]
        self.device = units[0].device
        self._rng, chosen = rng, None if whole else rng
        self._plain, self._coded = ChunkSample.of(plain, chosen), ChunkSample.of(coded, chosen)
        sources = [parts for unit in self._drawn() for parts in unit.chunks]
        begin = self._plain.offset - np.array([unit.offset for unit in plain], dtype=np.int64)[self._plain.unit]
        cuts = ByteRanges([unit.source for unit in plain], self._plain.unit, begin, self._plain.size)
        self._batch = FingerprintBatch(sources, cuts)
        self._rows: torch.Tensor | None = None
        self._read: np.ndarray | None = None
        num_rows = len(self._plain) + len(sources)
        self._landing = torch.empty(
            num_rows, FINGERPRINT_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        self._landed: torch.cuda.Event | None = None
        self.has_left = False
        """they are on their way to the host, or there"""

    def _drawn(self) -> list[ParityOp]:
        units = [self._coded.units[index] for index in self._coded.unit]
        return [unit for unit in units if isinstance(unit, ParityOp)]

    def compute(self) -> None:
        """Queue them on the current stream. Once."""
        self._rows = self._batch.run()

    def leave(self) -> None:
        """Queue their way to the host on the current stream, which is behind `compute`.

        It should be the stream of the large copies: all that leaves a device uses one engine. From another stream rows
        would wait there for a whole snapshot, and slow it down by a twelfth meanwhile.
        """
        assert self._rows is not None
        self._landing.copy_(self._rows, non_blocking=True)
        if self._rows.is_cuda:
            self._landed = torch.cuda.current_stream(self.device).record_event()
        self.has_left = True

    def changed_at_source(self, owners: set[int]) -> CopyOp | ParityOp | None:
        """The first unit of these optimizers that is not what it was. Waits for the device.

        What was seen at `take` stays what it is: others of these units may rightly have changed since, and it will be
        compared with what lands.
        """
        before = self._expected()
        differs = (before != self._with_parity(self._batch.run().cpu().numpy())).any(axis=1)
        return next((unit for unit in self._units_at(differs) if unit.owners & owners), None)

    def changed_on_the_way(self, payload: torch.Tensor, over: Over = map) -> CopyOp | ParityOp | None:
        """The first unit that did not land as it was taken. Waits for the device, and reads what landed.

        `over`: `map`, or that of a pool of threads.
        """
        expected, landed = self._expected(), payload.numpy()
        offsets = np.concatenate([self._plain.offset, self._coded.offset])
        sizes = np.concatenate([self._plain.size, self._coded.size])

        def look(start: int) -> np.ndarray | None:
            """Which of some spots are wrong, if any is."""
            some = slice(start, start + AT_ONCE)
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

        wrong = next((found for found in over(look, range(0, len(offsets), AT_ONCE)) if found is not None), None)
        return next(iter(self._units_at(wrong))) if wrong is not None else None

    def encode(self) -> bytes:
        """To be kept with the snapshot: of tensors of which it holds every byte, which parity is not."""
        kept = np.zeros(len(self._plain), dtype=ROW)
        kept["offset"], kept["size"] = self._plain.offset, self._plain.size
        kept["print"] = self._expected()[: len(kept)].view(f"V{FINGERPRINT_BYTES}").reshape(-1)
        return kept.tobytes()

    def _expected(self) -> np.ndarray:
        """A row for each spot, as it was at `take`. Waits for the device, once. For any thread."""
        read = self._read
        if read is None:
            assert self.has_left
            if self._landed is not None:
                self._landed.synchronize()
            read = self._read = self._with_parity(self._landing.numpy().copy())
        return read

    def _with_parity(self, rows: np.ndarray) -> np.ndarray:
        """A row for each spot: that of parity follows from those of its sources."""
        at, made = len(self._plain), [rows[: len(self._plain)]]
        for unit in self._drawn():
            factors = coefficients(unit.m, unit.row, unit.k)[: len(unit.chunks)]
            row = combine(factors, [one.tobytes() for one in rows[at : at + len(factors)]])
            made.append(np.frombuffer(row, dtype=np.uint8)[None])
            at += len(factors)
        return np.concatenate(made)

    def _units_at(self, marked: np.ndarray) -> list[CopyOp | ParityOp]:
        both = [(self._plain, marked[: len(self._plain)]), (self._coded, marked[len(self._plain) :])]
        return [spots.units[index] for spots, there in both for index in spots.unit[there]]


def frame(encoded: bytes, room: int) -> bytes:
    """As many as fit, with their length, to be put behind other bytes."""
    fits = max(0, room - LENGTH.size) // ROW.itemsize * ROW.itemsize
    kept = encoded[:fits]
    return kept + LENGTH.pack(len(kept)) if kept else b""


def unframe(data: bytes) -> tuple[bytes, bytes]:
    """(what was there before, the fingerprints)"""
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
