"""Triton kernels for parity and fingerprints: the bits of the native code, at the speed of the device's memory.

All work of a batch is described by tables on the device (addresses and lengths), so that thousands of chunks take a
handful of launches. Tables are made once and run any number of times: `run` queues on the current stream, allocates
nothing and waits for nothing. A table runs on one stream at a time, and must be kept until the work it queued there
is done.

A word of four bytes is four elements of the field; doubling it is a shift and a masked exclusive or. Bytes that are
not aligned to 16 are processed by the same kernels byte by byte, several times slower.

Only batches.py imports this file, and only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepstep.parity import galois
from keepstep.parity.code import coefficients
from keepstep.parity.fingerprint import FINGERPRINT_BYTES, FOLDS, fold_row

if TYPE_CHECKING:
    from keepstep.parity.gpu.batches import TensorBytes

VECTOR_BYTES = 16  # the widest load of a thread
STEPS = (VECTOR_BYTES, 1)  # alignments of a range that the kernels distinguish

# Fixed and not tuned at run time: a kernel compiled or timed in the middle of training is a stall.
# One load of 16 bytes per thread and source. With two, the assembler loads one source after the other to save
# registers, and 32 sources need more registers than there are.
ENCODE_LANES, ENCODE_WARPS = 1024, 8
ENCODE_BLOCKS = 16  # programs per row of a table: longer ranges are cut, so that few programs have no work
FOLD_LANES, FOLD_WARPS = 512, 4  # for the 488 words of a block of the second fold
TASK_BLOCKS = 32  # of the second fold: a chunk is four tasks, so that a sample of 64 chunks still fills the device
GROUPS, GROUP_BLOCKS = 16, 16  # how a program divides the 252 blocks of the third fold
FINISH_WARPS = 4

FIRST, SECOND, THIRD, FOURTH = FOLDS
assert [fold.num_rows for fold in FOLDS] == [2, 4, 8, FINGERPRINT_BYTES], "the kernels are written for these"
assert FIRST.block_bytes % VECTOR_BYTES == SECOND.block_bytes % VECTOR_BYTES == 0
assert THIRD.num_blocks <= GROUPS * GROUP_BLOCKS
# The two rows of the first fold follow each other without a gap: in the blocks of the second fold, the second row
# begins this much later than the first.
LATER_BLOCKS, LATER_BYTES = divmod(FIRST.block_bytes, SECOND.block_bytes)
FOLDED_WORDS = SECOND.num_rows * SECOND.block_bytes // 4
TASK_FIELDS = 9
COPY = (b"\x01",)  # a sum over one source

# Kernels can use only names of this file that are marked as constants for the compiler.
_FIRST_BLOCKS = tl.constexpr(FIRST.num_blocks)
_FIRST_BYTES = tl.constexpr(FIRST.block_bytes)
_SECOND_BYTES = tl.constexpr(SECOND.block_bytes)
_SECOND_ROWS = tl.constexpr(SECOND.num_rows)
_THIRD_BYTES = tl.constexpr(THIRD.block_bytes)
_LATER_BYTES = tl.constexpr(LATER_BYTES)
_TASK_FIELDS = tl.constexpr(TASK_FIELDS)
_GROUPS, _GROUP_BLOCKS = tl.constexpr(GROUPS), tl.constexpr(GROUP_BLOCKS)
_ENCODE_LANES, _ENCODE_BLOCKS = tl.constexpr(ENCODE_LANES), tl.constexpr(ENCODE_BLOCKS)
_FOLD_LANES = tl.constexpr(FOLD_LANES)
_ONES = tl.constexpr(0x01010101)
_LOW_BITS = tl.constexpr(0x7F7F7F7F)
_REDUCTION = tl.constexpr(galois.POLYNOMIAL & 0xFF)


class SumTables(NamedTuple):
    """Rows of coefficients over the same sources, and their results. A source may have any number of parts."""

    rows: tuple[bytes, ...]
    sources: Sequence[Sequence[TensorBytes]]
    outs: Sequence[Tensor]


class EncodeTables:
    """Many sums in few launches: one for each set of rows, one more for unaligned bytes."""

    def __init__(self, sums: Sequence[SumTables], device: torch.device) -> None:
        self._device = device
        self._held = sums  # the tables have addresses only
        ranges: dict[tuple[tuple[bytes, ...], int], list[list[int]]] = {}
        for table in sums:
            for step, byte_range in _ranges(table):
                ranges.setdefault((table.rows, step), []).append(byte_range)
        self._launches = []
        for (rows, step), some in ranges.items():
            _warm_up_encode(rows, step, device)
            longest = ENCODE_BLOCKS * ENCODE_LANES * _lane_bytes(step)
            self._launches.append((rows, step, _upload(_cut(torch.tensor(some), longest), device)))
        self._ready = _mark(device)

    def run(self) -> None:
        with _current(self._device):
            _follow(self._ready)
            for rows, step, table in self._launches:
                _launch_encode(rows, step, table)


class CopyTables:
    """Many copies on one device in two launches: aligned bytes, and the others."""

    def __init__(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self._device, self._held = outs[0].device, (sources, outs)  # the tables have addresses only
        both = zip(sources, outs, strict=True)
        places = torch.tensor([[source.numel(), source.data_ptr(), out.data_ptr()] for source, out in both])
        size, aligned = places[:, 0], ((places[:, 1] | places[:, 2]) % VECTOR_BYTES == 0)
        head = torch.where(aligned, size - size % VECTOR_BYTES, 0)
        tail = torch.stack([size - head, places[:, 1] + head, places[:, 2] + head], dim=1)
        places[:, 0] = head
        self._launches = []
        for step, table in ((VECTOR_BYTES, places), (1, tail)):
            longest = ENCODE_BLOCKS * ENCODE_LANES * _lane_bytes(step)
            some = table[table[:, 0] > 0]
            if len(some):
                _warm_up_encode(COPY, step, self._device)
                self._launches.append((step, _upload(_cut(some, longest), self._device)))
        self._ready = _mark(self._device)

    def run(self) -> None:
        with _current(self._device):
            _follow(self._ready)
            for step, table in self._launches:
                _launch_encode(COPY, step, table)


class FingerprintTables:
    """Fingerprints of many spans of up to 4 MiB, each read once. Takes 8 KB of device memory per span."""

    def __init__(self, extents: Tensor, num_spans: int, device: torch.device) -> None:
        _warm_up_fingerprints(device)
        self._device = device
        self._tasks = [(step, _upload(tasks, device)) for step, tasks in _tasks(extents)]
        self._folded = torch.zeros(num_spans, FOLDED_WORDS, dtype=torch.int32, device=device)
        self._out = torch.zeros(num_spans, FINGERPRINT_BYTES, dtype=torch.uint8, device=device)
        self._ready = _mark(device)

    def run(self) -> Tensor:
        """Queue the work. The result is the same tensor each time, overwritten by the next run."""
        if len(self._out):
            with _current(self._device):
                _follow(self._ready)
                self._folded.zero_()
                for step, tasks in self._tasks:
                    _launch_fold(step, tasks, self._folded)
                _launch_finish(self._folded, self._out)
        return self._out


def encode_rows(rows: Sequence[bytes], sources: Sequence[Sequence[TensorBytes]], outs: Sequence[Tensor]) -> None:
    """Set outs[r] to the sum of rows[r][i] times sources[i]. Sources are read once, by one launch where aligned."""
    EncodeTables([SumTables(tuple(rows), sources, outs)], outs[0].device).run()


def fingerprint_chunks(data: Tensor, chunk_bytes: int) -> Tensor:
    """Fingerprints of contiguous bytes, a row for each chunk."""
    starts = torch.arange(0, data.numel(), chunk_bytes)
    ends = (data.numel() - starts).clamp(max=chunk_bytes)
    rows = torch.stack((starts + data.data_ptr(), torch.zeros_like(starts), ends, torch.arange(len(starts))), 1)
    return FingerprintTables(rows, len(rows), data.device).run()


def extents(spans: Sequence[Sequence[TensorBytes]]) -> Tensor:
    """A row for each part: (address at which its span would begin, begin, end, index of its span)."""
    rows = [
        (part.source.data_ptr() - part.begin, part.begin, part.end, index)
        for index, parts in enumerate(spans)
        for part in parts
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def warm_up(device: torch.device, k: int, m: int) -> None:
    """Compile and load the kernels of a code of k + m: each row by itself, all rows together, and fingerprints."""
    rows = [coefficients(m, row, k) for row in range(m)]
    for some in dict.fromkeys([*((row,) for row in rows), tuple(rows)] if rows else []):
        for step in STEPS:
            _warm_up_encode(some, step, device)
    _warm_up_fingerprints(device)


@lru_cache(maxsize=1024)
def _warm_up_encode(rows: tuple[bytes, ...], step: int, device: torch.device) -> None:
    """Launch over no bytes: loading a compiled kernel stalls too, so compiling alone is not enough."""
    with _current(device):
        _launch_encode(rows, step, torch.zeros(1, 1 + len(rows[0]) + len(rows), dtype=torch.int64, device=device))


@lru_cache(maxsize=64)
def _warm_up_fingerprints(device: torch.device) -> None:
    with _current(device):
        folded = torch.zeros(1, FOLDED_WORDS, dtype=torch.int32, device=device)
        for step in STEPS:
            _launch_fold(step, torch.zeros(1, TASK_FIELDS, dtype=torch.int64, device=device), folded)
        _launch_finish(folded, torch.zeros(1, FINGERPRINT_BYTES, dtype=torch.uint8, device=device))


def _launch_encode(rows: tuple[bytes, ...], step: int, table: Tensor) -> None:
    _encode_kernel[(len(table) * ENCODE_BLOCKS,)](
        table,
        MATRIX=int.from_bytes(b"".join(rows), "little"),
        NUM_SOURCES=len(rows[0]),
        NUM_ROWS=len(rows),
        STEP=step,
        num_warps=ENCODE_WARPS,
    )


def _launch_fold(step: int, tasks: Tensor, folded: Tensor) -> None:
    tiles = -(-SECOND.block_bytes // (FOLD_LANES * _lane_bytes(step)))
    _fold_kernel[(len(tasks) * tiles,)](tasks, folded, STEP=step, TILES=tiles, num_warps=FOLD_WARPS)


def _launch_finish(folded: Tensor, out: Tensor) -> None:
    _finish_kernel[(len(out),)](folded.view(torch.uint8), _points(out.device), out, num_warps=FINISH_WARPS)


def _lane_bytes(step: int) -> int:
    return min(step, 4)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, not on that of its arguments. The CPU is used only by the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """An event in the current stream behind the upload of the tables."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _follow(ready: torch.cuda.Event | None) -> None:
    """Wait, on the device only, for the upload: tables may run on another stream than the one that uploaded them."""
    if ready is not None:
        ready.wait()


def _upload(table: Tensor, device: torch.device) -> Tensor:
    """Copy from pinned memory, because a copy from pageable memory waits for the device."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _ranges(table: SumTables) -> Iterator[tuple[int, list[int]]]:
    """(step, [bytes, address of each source, address of each out]); the address of a source without bytes here is 0."""
    outs = [out.data_ptr() for out in table.outs]
    sources = [
        [(part.begin, part.end, part.source.data_ptr() - part.begin) for part in parts] for parts in table.sources
    ]
    cuts = {0, table.outs[0].numel()}.union(at for parts in sources for begin, end, _ in parts for at in (begin, end))
    for begin, end in pairwise(sorted(cuts)):
        present = [next((at for first, last, at in parts if first <= begin < last), None) for parts in sources]
        for step, low, high in _aligned(begin, end, {at % VECTOR_BYTES for at in (*present, *outs) if at is not None}):
            addresses = [0 if at is None else at + low for at in present]
            yield step, [high - low, *addresses, *(at + low for at in outs)]


def _aligned(begin: int, end: int, origins: set[int]) -> list[tuple[int, int, int]]:
    """(step, begin, end): the unaligned head, the aligned middle, the unaligned tail. `origins`: see `extents`."""
    if len(origins) > 1:
        return [(1, begin, end)]
    (origin,) = origins
    low, high = begin + -(origin + begin) % VECTOR_BYTES, end - (origin + end) % VECTOR_BYTES
    if low >= high:
        return [(1, begin, end)]
    cut = [(1, begin, low), (VECTOR_BYTES, low, high), (1, high, end)]
    return [(step, first, last) for step, first, last in cut if first < last]


def _cut(table: Tensor, longest: int) -> Tensor:
    """The same ranges, none longer than this."""
    rows, index = _repeat(table, -(-table[:, 0] // longest))
    offsets = index * longest
    rows[:, 1:] += torch.where(rows[:, 1:] == 0, 0, offsets[:, None])
    rows[:, 0] = (rows[:, 0] - offsets).clamp(max=longest)
    return rows


def _repeat(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Each row repeated by its count, and the number of the repetition."""
    repeated = rows.repeat_interleave(counts, dim=0)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return repeated, torch.arange(len(repeated)) - starts


def _tasks(extents: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Tasks for the programs of _fold_kernel, by step.

    A row is (origin, begin, end, blocks of the second fold from, to, span, powers for the first fold's first row, for
    its second row, and for the part of that beyond the end of a block).
    """
    origin, begin, end, span = extents.unbind(1)
    low, high = -(-begin // VECTOR_BYTES) * VECTOR_BYTES, end // VECTOR_BYTES * VECTOR_BYTES
    # Without an aligned middle everything is head.
    low = torch.where((origin % VECTOR_BYTES == 0) & (low < high), low, end)
    high = torch.maximum(low, high)
    before, middle = torch.stack((origin, begin, low, span), 1), torch.stack((origin, low, high, span), 1)
    after = torch.stack((origin, high, end, span), 1)
    for step, parts in ((VECTOR_BYTES, middle), (1, torch.cat((before, after)))):
        parts = parts[parts[:, 1] < parts[:, 2]]
        if len(parts):
            yield step, _tasks_of(_cut_at_blocks(parts))


def _cut_at_blocks(parts: Tensor) -> Tensor:
    """Cut short parts at blocks of the first fold: each then touches few blocks of the second."""
    begin, last = parts[:, 1], parts[:, 2] - 1
    border = last // FIRST.block_bytes * FIRST.block_bytes
    across = (begin < border) & (last - begin < FIRST.block_bytes)
    heads, tails = parts[across], parts[across]
    heads[:, 2] = tails[:, 1] = border[across]
    return torch.cat((parts[~across], heads, tails))


def _tasks_of(parts: Tensor) -> Tensor:
    begin, last = parts[:, 1], parts[:, 2] - 1
    inside = begin // FIRST.block_bytes == last // FIRST.block_bytes
    lowest = torch.where(inside, begin % FIRST.block_bytes // SECOND.block_bytes, 0)
    highest = torch.where(inside, last % FIRST.block_bytes // SECOND.block_bytes, LATER_BLOCKS)
    with_blocks = torch.cat((parts, lowest[:, None], highest[:, None]), 1)
    rows, index = _repeat(with_blocks, (highest - lowest) // TASK_BLOCKS + 1)
    origin, begin, end, span, lowest, highest = rows.unbind(1)
    first = lowest + index * TASK_BLOCKS
    stop = torch.minimum(first + TASK_BLOCKS, highest + 1)
    scales = [_packed_powers(first + later) for later in (0, LATER_BLOCKS, LATER_BLOCKS + 1)]
    return torch.stack((origin, begin, end, first, stop, span, *scales), 1)


def _packed_powers(block: Tensor) -> Tensor:
    """g^(r block) for the rows r of the second fold, one byte each."""
    table = torch.tensor(list(galois.EXP), dtype=torch.int64)
    packed = torch.zeros_like(block)
    for row in range(SECOND.num_rows):
        packed |= table[row * block % galois.ORDER] << 8 * row
    return packed


@lru_cache(maxsize=64)
def _points(device: torch.device) -> Tensor:
    """Coefficients for _finish_kernel, four to a word: of groups in the third fold, of rows and columns in the fourth.

    The third fold has eight rows, which are two words, so there are two of each table, one after the other.
    """
    words, halves = [], (range(4), range(4, 8))
    for rows in halves:
        words += [bytes(galois.power(row * group * GROUP_BLOCKS) for row in rows) for group in range(GROUPS)]
    for rows in halves:
        for target in range(FOURTH.num_rows):
            # The kernel's lanes are a power of two: the surplus lane has coefficient zero.
            points = [fold_row(3, target)[row * THIRD.block_bytes :][: THIRD.block_bytes] + b"\0" for row in rows]
            words += [bytes(column) for column in zip(*points, strict=True)]
    return _upload(torch.frombuffer(bytearray(b"".join(words)), dtype=torch.int32), device)


@triton.jit
def _double(words: tl.tensor) -> tl.tensor:
    """Multiply each byte by the generator."""
    return ((words & _LOW_BITS) << 1) ^ (((words >> 7) & _ONES) * _REDUCTION)


@triton.jit
def _times(words: tl.tensor, factors: tl.tensor) -> tl.tensor:
    """Multiply each byte by the byte at the same place."""
    total = words & ((factors >> 7 & _ONES) * 0xFF)
    for bit in tl.static_range(6, -1, -1):
        total = _double(total) ^ (words & ((factors >> bit & _ONES) * 0xFF))
    return total


@triton.jit
def _pointer(address: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """A pointer to words where aligned, else to bytes."""
    if STEP == 1:
        return address.to(tl.pointer_type(tl.uint8))
    else:  # noqa: RET505  the compiler requires both branches
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), STEP)


@triton.jit
def _encode_kernel(
    table: tl.tensor,
    MATRIX: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """One block of one row of the table. All sources are loaded before any is used, so that the loads overlap.

    A row of the code is summed bit by bit of its coefficients, highest first, doubling in between: with ones that is
    exclusive or, with powers of two it is Horner's rule, and with any others it takes seven doublings.
    """
    row = table + (tl.program_id(0) // _ENCODE_BLOCKS).to(tl.int64) * (1 + NUM_SOURCES + NUM_ROWS)
    # In a form from which the compiler infers the alignment of the number of lanes: else it drops wide loads.
    lanes = (tl.load(row) // STEP * (STEP // 4 if STEP > 1 else 1)).to(tl.int32)
    at = tl.program_id(0) % _ENCODE_BLOCKS * _ENCODE_LANES + tl.arange(0, _ENCODE_LANES)
    words: tl.tuple = ()
    for source in tl.static_range(NUM_SOURCES):
        address = tl.load(row + 1 + source)
        here = at < tl.where(address != 0, lanes, 0)
        loaded = tl.load(_pointer(address, STEP) + at, mask=here, other=0, eviction_policy="evict_first")
        words = words + (loaded.to(tl.uint32),)  # noqa: RUF005  the compiler supports no other form
    for target in tl.static_range(NUM_ROWS):
        total = tl.zeros([_ENCODE_LANES], tl.uint32)
        for bit in tl.static_range(7, -1, -1):
            total = _double(total)
            for source in tl.static_range(NUM_SOURCES):
                if MATRIX >> (8 * (target * NUM_SOURCES + source) + bit) & 1:
                    total ^= words[source]
        out = _pointer(tl.load(row + 1 + NUM_SOURCES + target), STEP)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < lanes)


@triton.jit
def _fold_kernel(tasks: tl.tensor, folded: tl.tensor, STEP: tl.constexpr, TILES: tl.constexpr) -> None:
    """The first two folds of part of a span, added to `folded`. The first stays in registers, both by Horner's rule.

    Lanes are columns of the second fold. Its sums begin at the task's first block, so they are multiplied with the
    powers of that block; the first fold's second row begins later, and continues in the next block.
    """
    LANE_BYTES: tl.constexpr = 4 if STEP > 1 else 1
    WIDTH: tl.constexpr = _SECOND_BYTES // LANE_BYTES
    FIRST_WIDTH: tl.constexpr = _FIRST_BYTES // LANE_BYTES
    task = tasks + (tl.program_id(0) // TILES).to(tl.int64) * _TASK_FIELDS
    origin = _pointer(tl.load(task), STEP)
    begin = (tl.load(task + 1) // STEP * (STEP // LANE_BYTES)).to(tl.int32)
    end = (tl.load(task + 2) // STEP * (STEP // LANE_BYTES)).to(tl.int32)
    first, stop = tl.load(task + 3).to(tl.int32), tl.load(task + 4).to(tl.int32)
    lane = tl.program_id(0) % TILES * _FOLD_LANES + tl.arange(0, _FOLD_LANES)
    none = tl.zeros([_FOLD_LANES], tl.uint32)
    a0, a1, a2, a3 = none, none, none, none
    b0, b1, b2, b3 = none, none, none, none
    for left in range(first, stop):
        column = (first + stop - 1 - left) * WIDTH + lane
        inside = (lane < WIDTH) & (column < FIRST_WIDTH)
        plain, weighted = none, none
        for block in tl.static_range(_FIRST_BLOCKS - 1, -1, -1):
            place = column + block * FIRST_WIDTH
            here = inside & (place >= begin) & (place < end)
            loaded = tl.load(origin + column + block * FIRST_WIDTH, mask=here, other=0, eviction_policy="evict_first")
            plain ^= loaded.to(tl.uint32)
            weighted = _double(weighted) ^ loaded.to(tl.uint32)
        a0 ^= plain
        a1 = _double(a1) ^ plain
        a2 = _double(_double(a2)) ^ plain
        a3 = _double(_double(_double(a3))) ^ plain
        b0 ^= weighted
        b1 = _double(b1) ^ weighted
        b2 = _double(_double(b2)) ^ weighted
        b3 = _double(_double(_double(b3))) ^ weighted
    folded += tl.load(task + 5) * (_SECOND_ROWS * _SECOND_BYTES // 4)
    _add_rows(folded, lane, (a0, a1, a2, a3), tl.load(task + 6).to(tl.uint32), lane < WIDTH, LANE_BYTES)
    later = lane + _LATER_BYTES // LANE_BYTES
    powers = tl.where(later < WIDTH, tl.load(task + 7), tl.load(task + 8)).to(tl.uint32)
    _add_rows(folded, later % WIDTH, (b0, b1, b2, b3), powers, lane < WIDTH, LANE_BYTES)


@triton.jit
def _add_rows(
    folded: tl.tensor, lane: tl.tensor, rows: tl.tensor, powers: tl.tensor, here: tl.tensor, LANE_BYTES: tl.constexpr
) -> None:
    """Exclusive or into memory: the order does not matter, so the bits are the same in every run."""
    word, shift = lane * LANE_BYTES // 4, lane * LANE_BYTES % 4 * 8
    for row in tl.static_range(_SECOND_ROWS):
        scaled = _times(rows[row], (powers >> (8 * row) & 0xFF) * _ONES) << shift
        target = folded + row * (_SECOND_BYTES // 4) + word
        tl.atomic_xor(target, scaled.to(tl.int32, bitcast=True), mask=here, sem="relaxed")


@triton.jit
def _finish_kernel(folded: tl.tensor, points: tl.tensor, out: tl.tensor) -> None:
    """The last two folds of one span.

    The third one's eight rows are the bytes of two words, so each byte of a word is multiplied with another power: g^0
    to g^3, and g^4 to g^7. Horner's rule processes the blocks of all groups together, then the groups are summed.
    """
    folded += tl.program_id(0).to(tl.int64) * (_SECOND_ROWS * _SECOND_BYTES)
    group, column = tl.arange(0, _GROUPS), tl.arange(0, 32)
    low = tl.zeros([_GROUPS, 32], tl.uint32)
    high = tl.zeros([_GROUPS, 32], tl.uint32)
    for left in range(_GROUP_BLOCKS):
        block = group * _GROUP_BLOCKS + (_GROUP_BLOCKS - 1 - left)
        at = block[:, None] * _THIRD_BYTES + column[None, :]
        here = (column[None, :] < _THIRD_BYTES) & (at < _SECOND_ROWS * _SECOND_BYTES)
        value = tl.load(folded + at, mask=here, other=0).to(tl.uint32) * _ONES
        low = _raise(low) ^ value
        high = _double(_double(_double(_double(_raise(high))))) ^ value
    low = tl.xor_sum(_times(low, tl.load(points + group).to(tl.uint32)[:, None]), 0)
    high = tl.xor_sum(_times(high, tl.load(points + _GROUPS + group).to(tl.uint32)[:, None]), 0)
    target = tl.arange(0, 16)
    points += 2 * _GROUPS + target[:, None] * 32 + column[None, :]
    terms = _times(low[None, :], tl.load(points).to(tl.uint32))
    terms ^= _times(high[None, :], tl.load(points + 16 * 32).to(tl.uint32))
    total = tl.xor_sum(terms, 1)
    total ^= total >> 16
    total ^= total >> 8
    tl.store(out + tl.program_id(0) * 16 + target, total.to(tl.uint8))


@triton.jit
def _raise(words: tl.tensor) -> tl.tensor:
    """Multiply byte r of each word by g^r."""
    words ^= (words ^ _double(words)) & 0xFF00FF00
    return words ^ ((words ^ _double(_double(words))) & 0xFFFF0000)
