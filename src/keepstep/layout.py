"""Layout of a snapshot: the ordered entries of its payload, and its share of replicated state. Pure.

An entry is a contiguous range of bytes and the tensors in it: usually one, several when tensors are
tied or are views of each other (their bytes are stored once). Offsets are multiples of 64, so that
any dtype is aligned and SIMD coding works on them. The digest binds everything but the values.

    payload = [entries that only this rank has][shared part: chunks of replica sets]

A *replica set* is entries that several ranks hold with the same bytes, concatenated to one logical
byte string and cut into chunks of 4 MiB. A slot stores some of its chunks, the slots of the other
holders store the rest, and in `share` mode some store parity of chunks instead.
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
MAX_REPLICA_SETS = 4096
MAX_HOLDERS = 1 << 20
MAX_NODES = 255  # a stripe of a code over GF(256) has no more units
FULL, SHARE = "full", "share"


class SnapshotSize(msgspec.Struct, frozen=True):
    """Bytes that one snapshot of a rank needs in its arena."""

    layout_bytes: int
    values_bytes: int
    payload_bytes: int

    def fits(self, capacity: SnapshotSize) -> bool:
        return (
            self.layout_bytes <= capacity.layout_bytes
            and self.values_bytes <= capacity.values_bytes
            and self.payload_bytes <= capacity.payload_bytes
        )


class TensorView(msgspec.Struct, frozen=True, array_like=True):
    """One tensor inside an entry: dtype, shape and stride in the entry's bytes, and its region of the global tensor."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # byte offset of its first element inside the entry
    global_shape: tuple[int, ...]
    region: tuple[int, ...]  # where this view begins in the global tensor, per dimension
    sharded: bool  # whether it was a DTensor: the state of an optimizer is created again as a DTensor then


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous range of the payload, or of a replica set, and the tensors in it."""

    offset: int
    size_bytes: int
    pieces: tuple[TensorView, ...]

    @property
    def path(self) -> str:
        return self.pieces[0].path


class StoredChunk(msgspec.Struct, frozen=True):
    """One chunk of a replica set in a slot: its place and its number."""

    offset: int  # in the payload
    size_bytes: int
    chunk: int = -1  # its number in the replica set; -1: it is parity
    row: int = -1  # of parity: the stripe row
    code_row: int = -1  # of parity: the row of the code


class ReplicaSet(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that several nodes hold alike, and the part of them that this slot stores."""

    class_id: str  # names the replica set: a digest of its ranks and entries
    ranks: tuple[int, ...]  # the ranks that hold the same bytes, ascending
    nodes: tuple[int, ...]  # for each of them, the node that it runs on
    size_bytes: int
    entries: tuple[Entry, ...]  # their offsets count from the start of the replica set
    mode: str  # full: the slots of one node hold all of it. share: those of `n` nodes do, with parity for `m` of them
    n: int
    m: int
    turn: int  # rotates the units over the nodes
    offset: int  # in the payload: where its first stored chunk begins
    chunks: tuple[int, ...]  # the chunks that this slot stores, ascending
    parity: tuple[tuple[int, int], ...]  # (stripe row, row of the code) of the parity that it stores behind them

    @property
    def num_chunks(self) -> int:
        return num_chunks(self.size_bytes)

    def chunk_bytes(self, chunk: int) -> int:
        """All chunks are full but the last of the replica set."""
        return min(CHUNK_BYTES, self.size_bytes - chunk * CHUNK_BYTES)

    @property
    def stored_bytes(self) -> int:
        if self.parity or not self.chunks:
            return (len(self.chunks) + len(self.parity)) * CHUNK_BYTES
        return (len(self.chunks) - 1) * CHUNK_BYTES + self.chunk_bytes(self.chunks[-1])

    def stored(self) -> tuple[StoredChunk, ...]:
        """The stored chunks in their order: the i-th begins i * 4 MiB behind `offset`.

        A short last chunk keeps its length where nothing follows; before parity it is padded with zeros to a
        full one, so that everything stays on the grid of the checksum table.
        """
        end = self.offset + self.stored_bytes
        places = [(at, min(CHUNK_BYTES, end - at)) for at in range(self.offset, end, CHUNK_BYTES)]
        data = [StoredChunk(*place, chunk=chunk) for place, chunk in zip(places, self.chunks, strict=False)]
        behind = places[len(self.chunks) :]
        coded = [StoredChunk(*at, row=row, code_row=code) for at, (row, code) in zip(behind, self.parity, strict=True)]
        return tuple(data + coded)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Entries and replica sets of a snapshot; `refs` maps a tensor of the value tree to (entry, view).

    Entries are numbered through: first the rank's own, then those of each replica set in turn.
    """

    entries: tuple[Entry, ...]
    refs: tuple[tuple[int, int], ...]
    replica_sets: tuple[ReplicaSet, ...] = ()

    @property
    def unique_bytes(self) -> int:
        """Bytes of the entries that only this rank has."""
        last = self.entries[-1] if self.entries else None
        return align(last.offset + last.size_bytes) if last else 0

    @property
    def payload_bytes(self) -> int:
        stored = [part.offset + part.stored_bytes for part in self.replica_sets if part.stored_bytes]
        return max([self.unique_bytes, *stored])

    @property
    def shared_offset(self) -> int:
        """Where the shared part begins; the end of the payload when there is none."""
        return self.unique_bytes

    def all_entries(self) -> list[Entry]:
        """All entries, numbered as in `refs`."""
        return [*self.entries, *(entry for replica_set in self.replica_sets for entry in replica_set.entries)]

    def encode(self) -> bytes:
        return _encoder.encode(self)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def format_bytes(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def gib(size_bytes: int) -> str:
    """A size with the digits that tell a need from what is free."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"


def align(size_bytes: int, to: int = ALIGN) -> int:
    return -(-size_bytes // to) * to


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def digest(encoded: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(encoded)


def class_id(ranks: tuple[int, ...], entries: tuple[Entry, ...]) -> str:
    """Digest of a replica set's structure (never its bytes): the same on every rank that holds it, and on no other."""
    return digest(_encoder.encode((ranks, entries))).hex()


def decode(encoded: bytes | memoryview, *, payload_bytes: int) -> Layout:
    """Decode a layout from bytes that may be hostile: every offset, size and index is checked."""
    try:
        layout = _decoder.decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise IntegrityError(f"the layout cannot be read: {error}") from error
    problem = _problem(layout, payload_bytes)
    if problem:
        raise IntegrityError(f"the layout contradicts itself: {problem}")
    return layout


def _problem(layout: Layout, payload_bytes: int) -> str:
    counts = [len(layout.entries), len(layout.refs), *(len(part.entries) for part in layout.replica_sets)]
    if max(counts) > MAX_ENTRIES:
        return "too many entries"
    if problem := _entries_problem(layout.entries, payload_bytes, "the payload"):
        return problem
    if len(layout.replica_sets) > MAX_REPLICA_SETS:
        return "too many replica sets"
    end = layout.shared_offset
    for replica_set in layout.replica_sets:
        if problem := _replica_set_problem(replica_set):
            return f"replica set {replica_set.class_id}: {problem}"
        if replica_set.offset < end or (replica_set.offset - layout.shared_offset) % CHUNK_BYTES:
            return f"replica set at {replica_set.offset} overlaps or is unaligned"
        end = replica_set.offset + replica_set.stored_bytes
        if end > payload_bytes:
            return f"replica set ends at {end}, beyond the payload of {payload_bytes}"
    if len({replica_set.class_id for replica_set in layout.replica_sets}) < len(layout.replica_sets):
        return "a replica set is listed twice"
    entries = layout.all_entries()
    for entry_index, view_index in layout.refs:
        if not 0 <= entry_index < len(entries):
            return "reference to an entry that does not exist"
        if not 0 <= view_index < len(entries[entry_index].pieces):
            return "reference to a view that does not exist"
    return ""


def _entries_problem(entries: tuple[Entry, ...], size_bytes: int, where: str) -> str:
    end = 0
    for entry in entries:
        if entry.offset < end or entry.offset % ALIGN or entry.size_bytes < 0 or not entry.pieces:
            return f"entry at {entry.offset} overlaps, is unaligned or is empty"
        end = entry.offset + entry.size_bytes
        for view in entry.pieces:
            if problem := _view_problem(view, entry.size_bytes):
                return f"{view.path}: {problem}"
    return f"entries end at {end}, beyond {where} of {size_bytes}" if end > size_bytes else ""


def _view_problem(view: TensorView, entry_bytes: int) -> str:
    lengths = {len(view.shape), len(view.stride), len(view.global_shape), len(view.region)}
    if len(lengths) != 1 or max(lengths) > 64:
        return "shape, stride, global shape and region differ in length"
    if any(n < 0 for n in (*view.shape, *view.stride, view.start, *view.global_shape, *view.region)):
        return "negative size"
    if 0 in view.shape:
        return ""
    # One byte per element is the least that any dtype has; the trainer checks again with the true element size.
    last = view.start + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    return "reaches beyond its entry" if last >= entry_bytes else ""


def _replica_set_problem(replica_set: ReplicaSet) -> str:
    ranks, nodes, entries = replica_set.ranks, replica_set.nodes, replica_set.entries
    if not 1 <= len(ranks) <= MAX_HOLDERS or len(nodes) != len(ranks):
        return "no holders, too many, or some without a node"
    if not _ascends(ranks) or min(nodes) < 0:
        return "its holders are not in order"
    if problem := _entries_problem(entries, replica_set.size_bytes, "the replica set"):
        return problem
    if not entries or not 0 < entries[-1].offset + entries[-1].size_bytes == replica_set.size_bytes:
        return "its entries do not fill it"
    if problem := _stored_problem(replica_set):
        return problem
    return "" if replica_set.class_id == class_id(ranks, entries) else "class_id does not match its ranks and entries"


def _stored_problem(replica_set: ReplicaSet) -> str:
    mode, n, m, chunks, parity = replica_set.mode, replica_set.n, replica_set.m, replica_set.chunks, replica_set.parity
    if mode not in (FULL, SHARE) or not 0 <= m < n <= (MAX_NODES if mode == SHARE else MAX_HOLDERS):
        return "its code does not exist"
    if replica_set.turn < 0:
        return "its turn is negative"
    if not _ascends(chunks) or (chunks and chunks[-1] >= replica_set.num_chunks):
        return "chunks that it does not have"
    if len(set(parity)) != len(parity) or (parity and mode != SHARE):
        return "parity that it does not have"
    if any(not (0 <= row < replica_set.num_chunks and 0 <= code_row < m) for row, code_row in parity):
        return "parity that it does not have"
    return ""


def _ascends(numbers: tuple[int, ...]) -> bool:
    return all(lower < higher for lower, higher in pairwise((-1, *numbers)))


def describe(layout: Layout) -> list[dict[str, Any]]:
    """Rows for `keepstep inspect`. The offset of a shared tensor counts from its replica set, which `stream` names."""
    shared = [replica_set.class_id for replica_set in layout.replica_sets for _ in replica_set.entries]
    return [
        {
            "path": view.path,
            "dtype": view.dtype,
            "shape": list(view.shape),
            "global_shape": list(view.global_shape),
            "region": list(view.region),
            "offset": entry.offset + view.start,
            "bytes": entry.size_bytes,
            **({"stream": set_id} if set_id else {}),
        }
        for entry, set_id in zip(layout.all_entries(), [""] * len(layout.entries) + shared, strict=True)
        for view in entry.pieces
    ]
