"""A snapshot read from the arena: tree, tensors as bytes of the payload or of replica sets, random states."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep.errors import IntegrityError
from keepstep.layout import CHUNK_BYTES, Entry, Layout, TensorView
from keepstep.trainer.connection.environment import Ranks
from keepstep.trainer.integrity.fingerprints import check_restored
from keepstep.trainer.plan.tensor_blocks import flat_bytes, is_dense
from keepstep.trainer.restore.device_upload import UploadQueue
from keepstep.trainer.restore.replica_chunks import Chunks
from keepstep.trainer.state import objects as s
from keepstep.trainer.state.loaders import loader_generators
from keepstep.trainer.state.rng import dtype_named, from_inline, set_generator, set_rng_state
from keepstep.values import InlineTensor, TensorRef, TorchDevice, TorchDtype, TorchSize

log = logging.getLogger("keepstep")


class RandomStates:
    """The random states of a snapshot and the generators they belong to. Holds values, no memory of the arena."""

    def __init__(self, tree: Mapping[str, Any], items: s.StateObjects) -> None:
        self._globals = tree.get("rng")
        loaders = tree.get("loaders", {})
        self._own = [(item.thing, tree["items"][item.path]) for item in items.of(s.GENERATOR)]
        for item in items.of(s.LOADER):
            here, saved = loader_generators(item.thing), loaders.get(item.path, [])
            if len(here) != len(saved) and item.path in loaders:
                log.warning(
                    "%s had %d random sources when it was saved and has %d now: make them before the Snapshotter",
                    item.path, len(saved), len(here),
                )  # fmt: skip
            self._own += list(zip(here, saved, strict=False))

    def set(self) -> None:
        """Set all random states. Do it last: building iterators and loading may draw from them."""
        if self._globals is not None:
            set_rng_state(self._globals)
        for generator, value in self._own:
            set_generator(generator, value)


class SavedSnapshot:
    """A verified snapshot: its tree, and the places of its tensors' bytes."""

    def __init__(
        self,
        tree: dict[str, Any],
        layout: Layout,
        payload: torch.Tensor,
        replica_chunks: Mapping[str, Chunks] | None = None,
        prints: bytes = b"",
        uploads: UploadQueue | None = None,
        *,
        values_bytes: int = 0,
    ) -> None:
        """`uploads` carries bytes to devices; without it they are copied straight from the arena."""
        self.tree, self.layout, self._payload = tree, layout, payload
        self.values_bytes = values_bytes
        self._entries = layout.all_entries()
        # For each entry after the rank's own: the chunks of its replica set.
        by_class = replica_chunks or {}
        self._chunks = [by_class[each.class_id] for each in layout.replica_sets for _ in each.entries]
        self._prints, self._uploads = prints, uploads
        # (offset in the payload, bytes, path) of each tensor that was written to a device in one piece.
        self._on_devices: list[tuple[int, torch.Tensor, str]] = []

    def piece(self, ref: TensorRef) -> TensorView:
        return self._find(ref)[1]

    def pieces(self) -> list[tuple[Entry, TensorView]]:
        """The entry and the view of each tensor, by its reference."""
        return [(self._entries[entry], self._entries[entry].pieces[piece]) for entry, piece in self.layout.refs]

    def holders(self, ref: TensorRef) -> Ranks | None:
        """The ranks that held the tensor's bytes when it was saved; None: this rank alone."""
        index = self.layout.refs[ref.index][0] - len(self.layout.entries)
        for replica_set in self.layout.replica_sets:
            if 0 <= index < len(replica_set.entries):
                return replica_set.ranks
            index -= len(replica_set.entries)
        return None

    def write(self, target: torch.Tensor, ref: TensorRef) -> torch.Tensor:
        """Copy a saved tensor over one of the same shape and dtype. `target` never aliases the snapshot.

        Bytes for a device have arrived after `finish_uploads`.
        """
        entry, piece, chunks = self._find(ref)
        uploads = self._uploads if self._uploads is not None and self._uploads.accepts(target) else None
        if chunks is None:
            view = self._view(entry, piece)
            if not (is_dense(target) and target.numel() and _same_order(target, view)):
                return copy_bits(target, view)
            start, flat = entry.offset + piece.start, flat_bytes(target.detach())
            if target.is_cuda:
                self._on_devices.append((start, flat, piece.path))
            if uploads is None:
                return copy_bits(target, view)
            uploads.add(start, flat)
            return target
        if not is_dense(target) or not target.is_contiguous():
            return copy_bits(target, self._gather(entry, piece, chunks))
        _check_contiguous(entry, piece, target.dtype)
        _fill(flat_bytes(target.detach()), entry.offset + piece.start, chunks, uploads)
        return target

    def finish_uploads(self) -> None:
        """Wait until all that was written so far has arrived on its device."""
        if self._uploads is not None:
            self._uploads.run()

    def check_devices(self) -> int:
        """Compare the bytes on the devices with the fingerprints of their source. Raises IntegrityError."""
        return check_restored(self._prints, self._on_devices) if self._prints and self._on_devices else 0

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """A new tensor of its own with the saved bytes and geometry."""
        entry, piece, chunks = self._find(ref)
        if chunks is not None:
            return self._gather(entry, piece, chunks)
        view = self._view(entry, piece)
        fresh = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype) if is_dense(view) else None
        return copy_bits(fresh if fresh is not None else torch.empty(view.shape, dtype=view.dtype), view)

    def _find(self, ref: TensorRef) -> tuple[Entry, TensorView, Chunks | None]:
        try:
            index, piece = self.layout.refs[ref.index]
        except IndexError:
            raise IntegrityError("the values refer to a tensor that the layout does not have") from None
        own = len(self.layout.entries)
        entry = self._entries[index]
        return entry, entry.pieces[piece], self._chunks[index - own] if index >= own else None

    def _view(self, entry: Entry, piece: TensorView) -> torch.Tensor:
        """The saved tensor inside the arena. Copy it, never hand it out."""
        dtype = dtype_named(piece.dtype)
        if 0 in piece.shape:
            return torch.empty_strided(piece.shape, piece.stride, dtype=dtype)
        begin, size = entry.offset + piece.start, _reach_bytes(entry, piece, dtype)
        flat = self._payload[begin : begin + size].view(dtype)
        return flat.as_strided(piece.shape, piece.stride)

    def _gather(self, entry: Entry, piece: TensorView, chunks: Chunks) -> torch.Tensor:
        """A tensor of a replica set in new memory: replica sets hold contiguous tensors only."""
        fresh = torch.empty(piece.shape, dtype=dtype_named(piece.dtype))
        _check_contiguous(entry, piece, fresh.dtype)
        _fill(flat_bytes(fresh), entry.offset + piece.start, chunks, None)
        return fresh

    def values(self, value: Any) -> Any:
        """Convert a part of the tree to the user's values: tensors and torch types instead of references."""
        kind = type(value)
        if kind is TensorRef:
            return self.tensor(value)
        if kind is InlineTensor:
            return from_inline(value)
        if kind is dict:
            return {key: self.values(item) for key, item in value.items()}
        if kind is OrderedDict:
            return OrderedDict((key, self.values(item)) for key, item in value.items())
        if kind in (list, tuple):
            return kind(self.values(item) for item in value)
        if kind is TorchSize:
            return torch.Size(value.dims)
        if kind is TorchDtype:
            return dtype_named(value.name)
        return torch.device(value.name) if kind is TorchDevice else value


def _reach_bytes(entry: Entry, piece: TensorView, dtype: torch.dtype) -> int:
    """The bytes from a tensor's first element to its last. Raises when they are not inside its entry."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(piece.shape, piece.stride, strict=True))
    size = reach * dtype.itemsize
    if piece.start + size > entry.size_bytes or (entry.offset + piece.start) % dtype.itemsize:
        raise IntegrityError(f"{piece.path} reaches beyond its entry")
    return size


def _same_order(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether elements of the same index have the same offset; the shapes are equal."""
    strides = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(size == 1 or first == second for size, first, second in strides)


def _check_contiguous(entry: Entry, piece: TensorView, dtype: torch.dtype) -> None:
    _reach_bytes(entry, piece, dtype)
    expected = 1
    for size, stride in zip(reversed(piece.shape), reversed(piece.stride), strict=True):
        if size != 1 and stride != expected:
            raise IntegrityError(f"{piece.path} is in a replica set and not contiguous")
        expected *= size


def _fill(target: torch.Tensor, start: int, chunks: Chunks, uploads: UploadQueue | None) -> None:
    """Fill a flat tensor with the bytes of a replica set from `start` on."""
    for begin, part in _parts(start, target.numel(), chunks):
        place = target[begin : begin + part.numel()]
        if uploads is not None:
            uploads.add(part, place)
        else:
            place.copy_(part, non_blocking=True)


def _parts(start: int, size_bytes: int, chunks: Chunks) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (offset in the target, bytes) for each chunk that [start, start + size) of a replica set touches."""
    at = start
    while at < start + size_bytes:
        chunk, inside = divmod(at, CHUNK_BYTES)
        part = chunks[chunk][inside : inside + start + size_bytes - at]
        if not part.numel():
            raise IntegrityError(f"chunk {chunk} of a replica set is too short")
        yield at - start, part
        at += part.numel()


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy without converting: both have one dtype. Expanded targets are written once per element.

    A copy to a device is only queued: wait for it before the snapshot's memory is freed.
    """
    target = target.detach()
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source, non_blocking=True)
    return target
