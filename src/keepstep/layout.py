"""What is in a snapshot: the ordered entries of its payload. Pure; knows no torch.

An entry is one stretch of bytes and the tensors that live in it: usually one, several when tensors
are tied or are views of each other (their bytes are stored once). Offsets are multiples of 64, so
that any dtype is aligned and SIMD coding works on them. The digest binds everything but the values.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from keepstep.errors import IntegrityError

ALIGN = 64
MAX_ENTRIES = 10_000_000


class Piece(msgspec.Struct, frozen=True, array_like=True):
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
    """A stretch of the payload and the tensors in it."""

    offset: int
    size_bytes: int
    pieces: tuple[Piece, ...]

    @property
    def path(self) -> str:
        return self.pieces[0].path


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The entries of a snapshot in payload order; `refs` maps a tensor of the value tree to (entry, piece)."""

    entries: tuple[Entry, ...]
    refs: tuple[tuple[int, int], ...]

    @property
    def payload_bytes(self) -> int:
        last = self.entries[-1] if self.entries else None
        return align(last.offset + last.size_bytes) if last else 0

    def encode(self) -> bytes:
        return _encoder.encode(self)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def align(size_bytes: int, to: int = ALIGN) -> int:
    return -(-size_bytes // to) * to


def digest(encoded: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(encoded)


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
    if len(layout.entries) > MAX_ENTRIES or len(layout.refs) > MAX_ENTRIES:
        return "too many entries"
    end = 0
    for entry in layout.entries:
        if entry.offset < end or entry.offset % ALIGN or entry.size_bytes < 0 or not entry.pieces:
            return f"entry at {entry.offset} overlaps, is unaligned or is empty"
        end = entry.offset + entry.size_bytes
        for piece in entry.pieces:
            if problem := _piece_problem(piece, entry.size_bytes):
                return f"{piece.path}: {problem}"
    if end > payload_bytes:
        return f"entries end at {end}, beyond the payload of {payload_bytes}"
    for entry_index, piece_index in layout.refs:
        if not 0 <= entry_index < len(layout.entries):
            return "reference to an entry that does not exist"
        if not 0 <= piece_index < len(layout.entries[entry_index].pieces):
            return "reference to a piece that does not exist"
    return ""


def _piece_problem(piece: Piece, entry_bytes: int) -> str:
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


def describe(layout: Layout) -> list[dict[str, Any]]:
    """Rows for `keepstep inspect`."""
    return [
        {
            "path": piece.path,
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "global_shape": list(piece.global_shape),
            "region": list(piece.region),
            "offset": entry.offset + piece.start,
            "bytes": entry.size_bytes,
        }
        for entry in layout.entries
        for piece in entry.pieces
    ]
