"""Parity and fingerprints of tensors: same bits as the native code, on CPU and on CUDA.

The trainer encodes replicated state in place and copies only the result. Work is queued on the current stream,
nothing waits for the device. Implementations:

    CPU tensors     the native code
    CUDA tensors    Triton kernels (kernels.py) where Triton is installed, compiles, and passes a test on that device;
                    else torch operations. KEEPSTEP_TRITON=0 disables Triton.

Kernels take seconds to compile, so `warm_up` comes before training. Tables that are the same for thousands of
snapshots are made once, as an `EncodeBatch` or a `FingerprintBatch`; only their `run` is called during training.

With torch, doubling in the field is a shift and a masked exclusive or on eight bytes at a time; a row with any
coefficients costs seven doublings, however many sources it has.

Only this file and kernels.py import torch in `parity`; no other module of it imports either.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity import galois
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, FOLDS, fingerprint, fold_row

# Processed at a time, so that all passes over a block hit the cache: second level, or that of the device.
CPU_BLOCK_BYTES = 256 << 10
CUDA_BLOCK_BYTES = 16 << 20
CHUNKS_AT_ONCE = 16  # for fingerprints: scratch is about 10 MiB for each
WORD_BYTES = 8
REDUCTION = galois.POLYNOMIAL & 0xFF
TRITON_VARIABLE = "KEEPSTEP_TRITON"

log = logging.getLogger("keepstep")

_deciding = threading.Lock()


class TensorBytes(NamedTuple):
    """Bytes of one tensor inside a chunk."""

    begin: int  # in the chunk
    source: Tensor

    @property
    def end(self) -> int:
        return self.begin + self.source.numel()


# A chunk: one tensor, or parts of several in their order. Bytes between the parts, and beyond the end, are zero.
Source: TypeAlias = Tensor | Sequence[TensorBytes] | None


class Stripe(NamedTuple):
    """Rows of the code over the same k sources, and their results: of one size, and none is a source."""

    rows: Sequence[int]
    sources: Sequence[Source]
    outs: Sequence[Tensor]


def encode(row: int, k: int, m: int, sources: Sequence[Tensor | None], out: Tensor) -> None:
    """Fill `out` with parity row `row`; shorter and absent sources are zero beyond their end. uint8, one dimension."""
    _check(k, m, Stripe([row], sources, [out]))
    kernels = _kernels(out.device)
    if out.is_cpu:
        Code(k, m).encode(
            row, [None if source is None else source.numpy().data for source in sources], out.numpy().data
        )
    elif kernels is not None:
        kernels.encode_rows([Code(k, m).rows[row]], [_parts(source) for source in sources], [out])
    else:
        encode_words(row, k, m, sources, out)


class EncodeBatch:
    """Parity of many stripes on one device in a handful of launches; `run` may be called any number of times.

    The constructor checks the stripes, queues a copy of their addresses to the device, and compiles missing kernels.
    The tensors must not move while the batch is used. It runs on one stream at a time, and must be kept until the
    work that it queued there is done.
    """

    def __init__(self, k: int, m: int, stripes: Sequence[Stripe]) -> None:
        self._code, self._stripes = Code(k, m), stripes
        device = _device_of([out for stripe in stripes for out in stripe.outs])
        for stripe in stripes:
            _check(k, m, stripe)
            if stripe.outs[0].device != device:
                raise ValueError(f"a batch for {device} and {stripe.outs[0].device}")
        kernels = _kernels(device)
        self._tables = None
        if kernels is not None:
            sums = [
                kernels.SumTables(
                    tuple(self._code.rows[row] for row in rows), [_parts(source) for source in sources], outs
                )
                for rows, sources, outs in stripes
            ]
            self._tables = kernels.EncodeTables(sums, device)

    def run(self) -> None:
        """Queue the work on the current stream."""
        if self._tables is not None:
            self._tables.run()
            return
        for rows, sources, outs in self._stripes:
            whole = [one_piece(source, outs[0].device) for source in sources]
            for row, out in zip(rows, outs, strict=True):
                encode(row, self._code.k, self._code.m, whole, out)


class CopyBatch:
    """Many small copies on one device (rows of bytes) in a handful of launches. Reusable like `EncodeBatch`."""

    def __init__(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self._sources, self._outs = sources, outs
        device = _device_of(outs)
        for source, out in zip(sources, outs, strict=True):
            _check_parts([TensorBytes(0, source)], out.numel(), device)
        kernels = _kernels(device)
        self._tables = kernels.CopyTables(sources, outs) if kernels is not None and outs else None

    def run(self) -> None:
        """Queue the work on the current stream."""
        if self._tables is not None:
            self._tables.run()
        elif self._outs:
            torch._foreach_copy_(list(self._outs), list(self._sources))


def fingerprints(data: Tensor) -> Tensor:
    """One row of 16 bytes for each chunk of 4 MiB, on the device of `data` (uint8, one dimension)."""
    _check_bytes(data)
    kernels = _kernels(data.device)
    if kernels is not None:
        rows: Tensor = kernels.fingerprint_chunks(data, CHUNK_BYTES)
        return rows
    if not data.is_cpu:
        return fingerprint_words(data)
    whole = data.numpy().data
    native = [fingerprint(whole[at : at + CHUNK_BYTES]) for at in range(0, data.numel(), CHUNK_BYTES)]
    return torch.tensor(list(b"".join(native)), dtype=torch.uint8).view(-1, FINGERPRINT_BYTES)


class ByteRanges(NamedTuple):
    """Ranges of up to 4 MiB in tensors on one device, as arrays: thousands of them at little cost."""

    tensors: Sequence[Tensor]
    which: np.ndarray
    begin: np.ndarray
    size: np.ndarray

    def extents(self) -> Tensor:
        """The rows of `kernels.extents`."""
        addresses = np.array([tensor.data_ptr() for tensor in self.tensors], dtype=np.int64)[self.which] + self.begin
        columns = [addresses, np.zeros_like(addresses), self.size, np.arange(len(addresses))]
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.int64))

    def spans(self) -> list[Tensor]:
        rows = zip(self.which.tolist(), self.begin.tolist(), self.size.tolist(), strict=True)
        return [self.tensors[which][begin : begin + size] for which, begin, size in rows]


class FingerprintBatch:
    """Fingerprints of many spans of up to 4 MiB, on the device of the spans. Reusable like `EncodeBatch`."""

    def __init__(self, spans: Sequence[Source], cuts: ByteRanges | None = None) -> None:
        """Rows of `cuts` precede those of `spans`."""
        self._spans, self._cuts = [_parts(span) for span in spans], cuts
        tensors = [part.source for parts in self._spans for part in parts]
        cut = [cuts.tensors[index] for index in cuts.which[:1]] if cuts is not None else []
        self._device = _device_of([*tensors, *cut])
        for parts in self._spans:
            _check_parts(parts, CHUNK_BYTES, self._device)
        kernels = _kernels(self._device)
        self._tables = None
        if kernels is not None:
            extents = kernels.extents(self._spans)
            if cuts is not None:
                extents[:, 3] += len(cuts.which)
                extents = torch.cat([cuts.extents(), extents])
            count = len(spans) + (len(cuts.which) if cuts is not None else 0)
            self._tables = kernels.FingerprintTables(extents, count, self._device)

    def run(self) -> Tensor:
        """Queue the work on the current stream. The next run may overwrite the result."""
        if self._tables is not None:
            result: Tensor = self._tables.run()
            return result
        # An empty span has no chunk, and the fingerprint of zeros.
        zeros = torch.zeros(1, FINGERPRINT_BYTES, dtype=torch.uint8, device=self._device)
        whole = [
            *(self._cuts.spans() if self._cuts is not None else ()),
            *(one_piece(parts, self._device) for parts in self._spans),
        ]
        rows = [zeros if span is None or not span.numel() else fingerprints(span) for span in whole]
        return torch.cat([zeros[:0], *rows])


def warm_up(device: torch.device | str, k: int, m: int) -> None:
    """Compile and load the kernels for a code of k + m and for fingerprints: seconds, once per machine."""
    actual = torch.empty(0, device=device).device
    kernels = _kernels(actual)
    if kernels is not None:
        kernels.warm_up(actual, k, m)


def one_piece(source: Source, device: torch.device) -> Tensor | None:
    """A chunk in one piece of memory on `device`, up to its last byte; None for an absent one.

    A chunk that is one tensor there is not copied.
    """
    parts = _parts(source)
    if not parts:
        return None
    if len(parts) == 1 and parts[0].begin == 0 and parts[0].source.device == device:
        return parts[0].source
    chunk = torch.zeros(parts[-1].end, dtype=torch.uint8, device=device)
    for part in parts:
        chunk[part.begin : part.end].copy_(part.source, non_blocking=True)
    return chunk


def is_word_aligned(tensor: Tensor) -> bool:
    """Whether it can be viewed as int64, which devices copy several times as fast."""
    return not (tensor.numel() % WORD_BYTES or tensor.data_ptr() % WORD_BYTES or tensor.storage_offset() % WORD_BYTES)


def encode_words(row: int, k: int, m: int, sources: Sequence[Tensor | None], out: Tensor) -> None:
    """`encode` with torch, on any device."""
    coefficients = Code(k, m).rows[row]
    given = [(c, source) for c, source in zip(coefficients, sources, strict=True) if source is not None]
    block = CPU_BLOCK_BYTES if out.is_cpu else CUDA_BLOCK_BYTES
    for start, end in _ranges([source.numel() for _, source in given], out.numel(), block):
        terms = [(c, source[start:end]) for c, source in given if source.numel() >= end]
        _sum(terms, out[start:end])


def fingerprint_words(data: Tensor) -> Tensor:
    """`fingerprints` with torch, on any device."""
    batch = CHUNK_BYTES * (1 if data.is_cpu else CHUNKS_AT_ONCE)
    end = data.numel() - data.numel() % CHUNK_BYTES
    parts = [data[at : min(at + batch, end)].view(-1, CHUNK_BYTES) for at in range(0, end, batch)]
    if end < data.numel():
        rest = data.new_zeros(1, CHUNK_BYTES)
        rest[0, : data.numel() - end] = data[end:]
        parts.append(rest)
    return torch.cat([_fingerprints(part) for part in parts]) if parts else data.new_zeros(0, FINGERPRINT_BYTES)


def _kernels(device: torch.device) -> ModuleType | None:
    """The kernels, where they passed their test."""
    if device.type != "cuda":
        return None
    with _deciding:  # a second thread waits for the first instead of compiling everything again
        return _decide(device)


@lru_cache(maxsize=64)
def _decide(device: torch.device) -> ModuleType | None:
    """Decide once for each device, by a test that waits for it."""
    if os.environ.get(TRITON_VARIABLE, "") == "0":
        return None
    try:
        from keepstep.parity.gpu import kernels
    except ImportError as error:
        log.debug("no Triton: %s", error)
        return None
    try:
        problem = self_test(kernels, device)
    except Exception as error:  # a compiler may raise anything on an untested machine
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning("Triton is not used on %s, parity takes several times as long there: %s", device, problem)
    return None if problem else kernels


def self_test(kernels: ModuleType, device: torch.device) -> str:
    """The reason why kernels must not be used; empty when they are correct. Aligned and not, whole and short."""
    data = torch.frombuffer(bytearray(random.Random(0).randbytes(300_007)), dtype=torch.uint8)
    on_device, code, size = data.to(device), Code(3, 2), 50_001
    cuts = [(0, 50_001), (64_000, 104_000), (150_000, 150_007)]
    for shift in (0, 5):
        expected = [bytearray(size) for _ in code.rows]
        for row, out in enumerate(expected):
            code.encode(row, [data[a + shift : b].numpy().data for a, b in cuts], out)
        outs = [on_device.new_empty(size) for _ in code.rows]
        kernels.encode_rows(code.rows, [[TensorBytes(0, on_device[a + shift : b])] for a, b in cuts], outs)
        if [bytearray(out.cpu().numpy()) for out in outs] != expected:
            return "parity is wrong"
        rows = kernels.fingerprint_chunks(on_device[shift:], CHUNK_BYTES)
        if bytes(rows.cpu().numpy()) != fingerprint(data[shift:].numpy().data):
            return "fingerprints are wrong"
    return ""


def _parts(source: Source) -> Sequence[TensorBytes]:
    if source is None:
        return []
    return [TensorBytes(0, source)] if isinstance(source, Tensor) else source


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _check(k: int, m: int, stripe: Stripe) -> None:
    """Check shapes and devices. The caller must know that the outs do not overlap the sources."""
    rows, sources, outs = stripe
    for row in rows:
        if not 0 <= row < m:
            raise ValueError(f"parity row {row} of {m}")
    if len(sources) != k:
        raise ValueError(f"{len(sources)} sources for a code of {k}")
    if len(rows) != len(outs) or not rows:
        raise ValueError(f"{len(outs)} results for {len(rows)} rows")
    for out in outs:
        _check_parts([TensorBytes(0, out)], outs[0].numel(), outs[0].device)
        if out.numel() != outs[0].numel():
            raise ValueError(f"results of {out.numel()} and {outs[0].numel()} bytes")
    for source in sources:
        _check_parts(_parts(source), outs[0].numel(), outs[0].device)


def _check_parts(parts: Sequence[TensorBytes], size: int, device: torch.device) -> None:
    end = 0
    for part in parts:
        _check_bytes(part.source)
        if part.source.device != device or part.end > size:
            raise ValueError(f"{part.end} bytes on {part.source.device} for {size} on {device}")
        if part.begin < end:
            raise ValueError(f"a part begins at {part.begin}, before the end of the one before it at {end}")
        end = part.end


def _check_bytes(tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{tensor.dtype} of shape {tuple(tensor.shape)}: not a row of bytes")


def _ranges(ends: Sequence[int], size: int, block: int) -> Iterator[tuple[int, int]]:
    """Ranges in which the same sources are present, of whole words except where a source ends inside one."""
    cuts = {size, size - size % WORD_BYTES, *range(0, size, block)}
    for end in ends:
        low = end - end % WORD_BYTES
        cuts |= {end, low, min(low + WORD_BYTES, size)}
    ordered = sorted(cuts)
    return pairwise(ordered)


def _sum(terms: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
    """Fill `out` with the sum of coefficient times source, all of one length."""
    tensors = [out, *(source for _, source in terms)]
    if all(is_word_aligned(tensor) for tensor in tensors):
        tensors = [tensor.view(torch.int64) for tensor in tensors]
    total, sources = tensors[0], tensors[1:]
    total.zero_()
    carry = torch.empty_like(total)
    highest = max((c.bit_length() for c, _ in terms), default=0)
    for bit in range(highest - 1, -1, -1):
        if bit < highest - 1:
            _double(total, carry)
        for (coefficient, _), source in zip(terms, sources, strict=True):
            if coefficient >> bit & 1:
                total.bitwise_xor_(source)


def _double(words: Tensor, carry: Tensor) -> None:
    """Multiply each byte by the generator, in place; `carry` is scratch. int64 or uint8."""
    every = int.from_bytes(b"\x01" * words.element_size(), "little")
    torch.bitwise_right_shift(words, 7, out=carry)
    carry.bitwise_and_(every).mul_(REDUCTION)
    # ~every as a number of this type: signed for int64.
    words.bitwise_left_shift_(1).bitwise_and_(~every if words.dtype == torch.int64 else 0xFE)
    words.bitwise_xor_(carry)


def _fingerprints(chunks: Tensor) -> Tensor:
    """Fingerprints of whole chunks, one per row."""
    if not is_word_aligned(chunks.view(-1)):
        chunks = chunks.clone()
    first, words = FOLDS[0], chunks.view(torch.int64)
    width = first.block_bytes // WORD_BYTES
    rows = words.new_zeros(len(chunks), first.num_rows, width)
    plain, weighted, carry = rows[:, 0], rows[:, 1], words.new_empty(len(chunks), width)
    for index in reversed(range(first.num_blocks)):
        block = words[:, index * width : (index + 1) * width]
        _double(weighted, carry)
        plain[:, : block.shape[1]] ^= block
        weighted[:, : block.shape[1]] ^= block
    folded = rows.view(torch.uint8).view(len(chunks), -1)
    for level in range(1, len(FOLDS)):
        folded = _fold(folded, level)
    return folded


def _fold(data: Tensor, level: int) -> Tensor:
    """Fold with a table of products: the input is at most a tenth of the chunk, and thousands of launches are saved."""
    fold, (products, offsets) = FOLDS[level], _tables(level, str(data.device))
    num_blocks = offsets.shape[1]
    padded = data.new_zeros(len(data), num_blocks * fold.block_bytes)
    padded[:, : data.shape[1]] = data
    indices = padded.view(len(data), 1, num_blocks, fold.block_bytes).long()
    # The largest fold row by row, to save memory; the others all rows at once, to save launches.
    step, folded = 1 if level == 1 else fold.num_rows, []
    for row in range(0, fold.num_rows, step):
        terms = products[indices + offsets[row : row + step, :, None]]
        while terms.shape[2] > 1:
            half = terms.shape[2] // 2
            terms = terms[:, :, :half] ^ terms[:, :, half:]
        folded.append(terms.reshape(len(data), -1))
    return torch.cat(folded, dim=1)


@lru_cache(maxsize=128)
def _tables(level: int, device: str) -> tuple[Tensor, Tensor]:
    """All products of two bytes, and for each row and block the offset of the products with its coefficient."""
    products = bytearray(b"".join(galois.products(a) for a in range(256)))
    fold = FOLDS[level]
    num_blocks = 1 << (fold.num_blocks - 1).bit_length()
    # Blocks up to a power of two, so that sums can be halved; those added are empty.
    rows = [[256 * c for c in fold_row(level, row).ljust(num_blocks, b"\x00")] for row in range(fold.num_rows)]
    return torch.frombuffer(products, dtype=torch.uint8).to(device), torch.tensor(rows, device=device)
