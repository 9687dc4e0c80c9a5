"""The code and the fingerprints with torch: same bits as the native ones, on CPU and on CUDA tensors.

The trainer encodes replicated state where it lies and copies only the result. Work is queued on the current stream,
nothing waits for the device. Doubling in the field is a shift and a masked exclusive or on eight bytes at a time; a
row with any coefficients costs seven doublings, however many sources it has.

The only file of parity/ that knows torch. No other file of it imports this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity import field
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, FOLDS, fingerprint, fold_row

# Worked on at a time, so that the passes over a block find it in the cache: second level, or that of the device.
CPU_BLOCK_BYTES = 256 << 10
CUDA_BLOCK_BYTES = 16 << 20
CHUNKS_AT_ONCE = 16
"""for fingerprints: scratch is about 10 MiB for each"""
WORD_BYTES = 8
REDUCTION = field.POLYNOMIAL & 0xFF


def encode(row: int, k: int, m: int, sources: Sequence[Tensor | None], out: Tensor) -> None:
    """Fill `out` with parity row `row`; shorter and absent sources are zero beyond their end. uint8, one dimension.

    Where the tensors are on the CPU the native code does it, at several times the speed of torch.
    """
    _check(row, k, m, sources, out)
    if out.is_cpu:
        Code(k, m).encode(
            row, [None if source is None else source.numpy().data for source in sources], out.numpy().data
        )
    else:
        encode_words(row, k, m, sources, out)


def fingerprints(data: Tensor) -> Tensor:
    """One row of 16 bytes for each chunk of 4 MiB, on the device of `data` (uint8, one dimension)."""
    _check_bytes(data)
    if not data.is_cpu:
        return fingerprint_words(data)
    whole = data.numpy().data
    found = [fingerprint(whole[at : at + CHUNK_BYTES]) for at in range(0, data.numel(), CHUNK_BYTES)]
    return torch.tensor(list(b"".join(found)), dtype=torch.uint8).view(-1, FINGERPRINT_BYTES)


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


def _check(row: int, k: int, m: int, sources: Sequence[Tensor | None], out: Tensor) -> None:
    if not 0 <= row < m:
        raise ValueError(f"parity row {row} of {m}")
    if len(sources) != k:
        raise ValueError(f"{len(sources)} sources for a code of {k}")
    _check_bytes(out)
    for source in sources:
        if source is not None:
            _check_bytes(source)
            if source.device != out.device or source.numel() > out.numel():
                raise ValueError(f"{source.numel()} bytes on {source.device} for {out.numel()} on {out.device}")


def _check_bytes(tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{tensor.dtype} of shape {tuple(tensor.shape)}: not a row of bytes")


def _ranges(ends: Sequence[int], size: int, block: int) -> Iterator[tuple[int, int]]:
    """Stretches in which the same sources are there, on whole words but where a source ends inside one."""
    cuts = {size, size - size % WORD_BYTES, *range(0, size, block)}
    for end in ends:
        low = end - end % WORD_BYTES
        cuts |= {end, low, min(low + WORD_BYTES, size)}
    ordered = sorted(cuts)
    return pairwise(ordered)


def _sum(terms: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
    """out = the sum of coefficient times source, all of one length."""
    tensors = [out, *(source for _, source in terms)]
    if all(_has_words(tensor) for tensor in tensors):
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


def _has_words(tensor: Tensor) -> bool:
    return not (tensor.numel() % WORD_BYTES or tensor.data_ptr() % WORD_BYTES or tensor.storage_offset() % WORD_BYTES)


def _double(words: Tensor, carry: Tensor) -> None:
    """Each byte times the generator, in place; `carry` is scratch. int64 or uint8."""
    every = int.from_bytes(b"\x01" * words.element_size(), "little")
    torch.bitwise_right_shift(words, 7, out=carry)
    carry.bitwise_and_(every).mul_(REDUCTION)
    # ~every as a number of this type: signed for int64.
    words.bitwise_left_shift_(1).bitwise_and_(~every if words.dtype == torch.int64 else 0xFE)
    words.bitwise_xor_(carry)


def _fingerprints(chunks: Tensor) -> Tensor:
    """Of whole chunks, one per row."""
    if not _has_words(chunks.view(-1)):
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
    """By a table of products: this is a tenth of the chunk and less, and it saves thousands of small launches."""
    fold, (products, offsets) = FOLDS[level], _tables(level, str(data.device))
    num_blocks = offsets.shape[1]
    padded = data.new_zeros(len(data), num_blocks * fold.block_bytes)
    padded[:, : data.shape[1]] = data
    indices = padded.view(len(data), 1, num_blocks, fold.block_bytes).long()
    # The largest fold row by row, to save memory; the others all rows at once, to save launches.
    step, found = 1 if level == 1 else fold.num_rows, []
    for row in range(0, fold.num_rows, step):
        terms = products[indices + offsets[row : row + step, :, None]]
        while terms.shape[2] > 1:
            half = terms.shape[2] // 2
            terms = terms[:, :, :half] ^ terms[:, :, half:]
        found.append(terms.reshape(len(data), -1))
    return torch.cat(found, dim=1)


@lru_cache(maxsize=128)
def _tables(level: int, device: str) -> tuple[Tensor, Tensor]:
    """All products of two bytes, and for each row and block where the products with its coefficient begin."""
    products = bytearray(b"".join(field.products(a) for a in range(256)))
    fold = FOLDS[level]
    num_blocks = 1 << (fold.num_blocks - 1).bit_length()
    # Blocks up to a power of two, so that sums can be halved; those added are empty.
    rows = [[256 * c for c in fold_row(level, row).ljust(num_blocks, b"\x00")] for row in range(fold.num_rows)]
    return torch.frombuffer(products, dtype=torch.uint8).to(device), torch.tensor(rows, device=device)
