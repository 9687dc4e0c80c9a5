"""What is in a snapshot: the ordered entries of its payload, and its share of what other ranks hold too. Pure.

An entry is one stretch of bytes and the tensors that live in it: usually one, several when tensors
are tied or are views of each other (their bytes are stored once). Offsets are multiples of 64, so
that any dtype is aligned and SIMD coding works on them. The digest binds everything but the values.

    payload = [entries that only this rank has][shared part: chunks of streams]

A *stream* is one replica class: entries that several ranks hold with the same bytes, strung together
to one logical byte string and cut into chunks of 4 MiB. A slot stores some of its chunks, the slots
of the other holders store the rest, and in `share` mode some store parity of chunks instead.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import xxhash

from keepstep.errors import IntegrityError

ALIGN = 64
CHUNK_BYTES = 4 << 20
MAX_ENTRIES = 10_000_000
MAX_STREAMS = 4096
MAX_HOLDERS = 1 << 20
MAX_NODES = 255
"""a stripe of a code over GF(256) has no more units"""
FULL, SHARE = "full", "share"


class SnapshotSize(msgspec.Struct, frozen=True):
    """Bytes that one snapshot of a rank needs in its arena."""

    layout_bytes: int
    values_bytes: int
    payload_bytes: int


class TensorView(msgspec.Struct, frozen=True, array_like=True):
    """One tensor inside an entry: how to see it in the entry's bytes, and which part of the world's tensor it is."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """byte offset of its first element inside the entry"""
    global_shape: tuple[int, ...]
    region: tuple[int, ...]
    """where this piece begins in the global tensor, per dimension"""
    sharded: bool
    """whether it was a DTensor: an optimizer's state is created again as what it was"""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of the payload, or of a stream, and the tensors in it."""

    offset: int
    size_bytes: int
    pieces: tuple[TensorView, ...]

    @property
    def path(self) -> str:
        return self.pieces[0].path


class StoredChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream in a slot: where, and what."""

    offset: int
    """in the payload"""
    size_bytes: int
    chunk: int = -1
    """the chunk of the stream; -1: it is parity"""
    row: int = -1
    code_row: int = -1
    """of parity: the stripe row and the row of the code"""


class ReplicaSet(msgspec.Struct, frozen=True, array_like=True):
    """One replica class, and what this slot stores of it."""

    class_id: str
    """names the class: who holds it, and what it is made of"""
    ranks: tuple[int, ...]
    """the ranks that hold the same bytes, ascending"""
    nodes: tuple[int, ...]
    """for each of them, the node that it runs on"""
    size_bytes: int
    entries: tuple[Entry, ...]
    """their offsets count from the start of the stream"""
    mode: str
    """full: the slots of one node hold all of it. share: those of `n` nodes do, with parity for `m` of them"""
    n: int
    m: int
    turn: int
    """by how much the units are rotated over the nodes"""
    offset: int
    """in the payload: where its first stored chunk begins"""
    chunks: tuple[int, ...]
    """the chunks of the stream that this slot stores, ascending"""
    parity: tuple[tuple[int, int], ...]
    """(stripe row, row of the code) of the parity that it stores behind them"""

    @property
    def num_chunks(self) -> int:
        return num_chunks(self.size_bytes)

    def chunk_bytes(self, chunk: int) -> int:
        """All chunks are full but the last of the stream."""
        return min(CHUNK_BYTES, self.size_bytes - chunk * CHUNK_BYTES)

    @property
    def stored_bytes(self) -> int:
        if self.parity or not self.chunks:
            return (len(self.chunks) + len(self.parity)) * CHUNK_BYTES
        return (len(self.chunks) - 1) * CHUNK_BYTES + self.chunk_bytes(self.chunks[-1])

    def stored(self) -> tuple[StoredChunk, ...]:
        """What lies in the payload, in order: the i-th begins i * 4 MiB behind `offset`.

        The stream's short last chunk is as long as it is where nothing follows; before parity it is padded
        with zeros to a full one, so that everything stays on the grid of the checksum table.
        """
        end = self.offset + self.stored_bytes
        places = [(at, min(CHUNK_BYTES, end - at)) for at in range(self.offset, end, CHUNK_BYTES)]
        data = [StoredChunk(*place, chunk=chunk) for place, chunk in zip(places, self.chunks, strict=False)]
        behind = places[len(self.chunks) :]
        coded = [StoredChunk(*at, row=row, code_row=code) for at, (row, code) in zip(behind, self.parity, strict=True)]
        return tuple(data + coded)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot holds; `refs` maps a tensor of the value tree to (entry, piece).

    Entries are counted through: first the rank's own, then those of each stream in turn.
    """

    entries: tuple[Entry, ...]
    refs: tuple[tuple[int, int], ...]
    streams: tuple[ReplicaSet, ...] = ()

    @property
    def unique_bytes(self) -> int:
        """What the entries take that only this rank has."""
        last = self.entries[-1] if self.entries else None
        return align(last.offset + last.size_bytes) if last else 0

    @property
    def payload_bytes(self) -> int:
        stored = [stream.offset + stream.stored_bytes for stream in self.streams if stream.stored_bytes]
        return max([self.unique_bytes, *stored])

    @property
    def shared_offset(self) -> int:
        """Where the shared part begins; the end of the payload when there is none."""
        return self.unique_bytes

    def all_entries(self) -> list[Entry]:
        """As `refs` counts them."""
        return [*self.entries, *(entry for stream in self.streams for entry in stream.entries)]

    def encode(self) -> bytes:
        return _encoder.encode(self)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def align(size_bytes: int, to: int = ALIGN) -> int:
    return -(-size_bytes // to) * to


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def digest(encoded: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(encoded)


def class_id(ranks: tuple[int, ...], entries: tuple[Entry, ...]) -> str:
    """The same on every rank that holds the class, and on no other: by structure, never by bytes."""
    return digest(_encoder.encode((ranks, entries))).hex()


def decode(encoded: bytes | memoryview, *, payload_bytes: int) -> Layout:
    """Read a layout from bytes that may be hostile: every offset, size and index is checked."""
    try:
        layout = _decoder.decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise IntegrityError(f"the layout cannot be read: {error}") from error
    problem = _problem(layout, payload_bytes)
    if problem:
        raise IntegrityError(f"the layout contradicts itself: {problem}")
    return layout


def _problem(layout: Layout, payload_bytes: int) -> str:
    if max(len(layout.entries), len(layout.refs), *(len(stream.entries) for stream in layout.streams), 0) > MAX_ENTRIES:
        return "too many entries"
    if problem := _entries_problem(layout.entries, payload_bytes, "the payload"):
        return problem
    if len(layout.streams) > MAX_STREAMS:
        return "too many streams"
    end = layout.shared_offset
    for stream in layout.streams:
        if problem := _stream_problem(stream):
            return f"stream {stream.class_id}: {problem}"
        if stream.offset < end or (stream.offset - layout.shared_offset) % CHUNK_BYTES:
            return f"stream at {stream.offset} overlaps or is unaligned"
        end = stream.offset + stream.stored_bytes
        if end > payload_bytes:
            return f"stream ends at {end}, beyond the payload of {payload_bytes}"
    if len({stream.class_id for stream in layout.streams}) < len(layout.streams):
        return "a replica class is there twice"
    entries = layout.all_entries()
    for entry_index, piece_index in layout.refs:
        if not 0 <= entry_index < len(entries):
            return "reference to an entry that does not exist"
        if not 0 <= piece_index < len(entries[entry_index].pieces):
            return "reference to a piece that does not exist"
    return ""


def _entries_problem(entries: tuple[Entry, ...], size_bytes: int, where: str) -> str:
    end = 0
    for entry in entries:
        if entry.offset < end or entry.offset % ALIGN or entry.size_bytes < 0 or not entry.pieces:
            return f"entry at {entry.offset} overlaps, is unaligned or is empty"
        end = entry.offset + entry.size_bytes
        for piece in entry.pieces:
            if problem := _piece_problem(piece, entry.size_bytes):
                return f"{piece.path}: {problem}"
    return f"entries end at {end}, beyond {where} of {size_bytes}" if end > size_bytes else ""


def _piece_problem(piece: TensorView, entry_bytes: int) -> str:
    lengths = {len(piece.shape), len(piece.stride), len(piece.global_shape), len(piece.region)}
    if len(lengths) != 1 or max(lengths) > 64:
        return "shape, stride, global shape and region differ in length"
    if any(n < 0 for n in (*piece.shape, *piece.stride, piece.start, *piece.global_shape, *piece.region)):
        return "negative size"
    if 0 in piece.shape:
        return ""
    # One byte per element is the least that any dtype has; the trainer checks again with the true size.
    last = piece.start + sum((n - 1) * s for n, s in zip(piece.shape, piece.stride, strict=True))
    return "reaches beyond its entry" if last >= entry_bytes else ""


def _stream_problem(stream: ReplicaSet) -> str:
    if not 1 <= len(stream.ranks) <= MAX_HOLDERS or len(stream.nodes) != len(stream.ranks):
        return "no holders, too many, or some without a node"
    if not _ascends(stream.ranks) or min(stream.nodes) < 0:
        return "its holders are not in order"
    if problem := _entries_problem(stream.entries, stream.size_bytes, "the stream"):
        return problem
    last = stream.entries[-1] if stream.entries else None
    if last is None or not 0 < last.offset + last.size_bytes == stream.size_bytes:
        return "its entries do not fill it"
    most = MAX_NODES if stream.mode == SHARE else MAX_HOLDERS
    if stream.mode not in (FULL, SHARE) or not 0 <= stream.m < stream.n <= most or stream.turn < 0:
        return "a code that does not exist"
    if not _ascends(stream.chunks) or (stream.chunks and stream.chunks[-1] >= stream.num_chunks):
        return "chunks that it does not have"
    if len(set(stream.parity)) != len(stream.parity) or (stream.parity and stream.mode != SHARE):
        return "parity that it does not have"
    if any(not (0 <= row < stream.num_chunks and 0 <= code_row < stream.m) for row, code_row in stream.parity):
        return "parity that it does not have"
    return "" if stream.class_id == class_id(stream.ranks, stream.entries) else "its name is not its own"


def _ascends(numbers: tuple[int, ...]) -> bool:
    return all(one < other for one, other in pairwise((-1, *numbers)))


def describe(layout: Layout) -> list[dict[str, Any]]:
    """Rows for `keepstep inspect`. The offset of a shared tensor counts in its stream, which `stream` names."""
    streams = [""] * len(layout.entries) + [stream.class_id for stream in layout.streams for _ in stream.entries]
    return [
        {
            "path": piece.path,
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "global_shape": list(piece.global_shape),
            "region": list(piece.region),
            "offset": entry.offset + piece.start,
            "bytes": entry.size_bytes,
            **({"stream": stream} if stream else {}),
        }
        for entry, stream in zip(layout.all_entries(), streams, strict=True)
        for piece in entry.pieces
    ]
