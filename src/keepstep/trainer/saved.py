"""A snapshot that was read back: its tree, its tensors as views of the arena, its random states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from keepstep.errors import IntegrityError
from keepstep.layout import Layout, Piece
from keepstep.trainer import items as s
from keepstep.trainer.blocks import is_dense
from keepstep.trainer.rng import dtype_named, from_inline, loader_generators, set_generator, set_rng_state
from keepstep.values import InlineTensor, TensorRef, TorchDevice, TorchDtype, TorchSize


class RandomStates:
    """The random states of a snapshot, and whose they are. Holds values only, nothing of the arena."""

    def __init__(self, tree: Mapping[str, Any], items: s.Items) -> None:
        self._globals = tree.get("rng")
        loaders = tree.get("loaders", {})
        self._own = [(item.thing, tree["items"][item.path]) for item in items.of(s.GENERATOR)]
        for item in items.of(s.LOADER):
            self._own += list(zip(loader_generators(item.thing), loaders.get(item.path, []), strict=False))

    def set(self) -> None:
        """Last of all: building iterators and loading may draw from them."""
        if self._globals is not None:
            set_rng_state(self._globals)
        for generator, value in self._own:
            set_generator(generator, value)


class Saved:
    """A verified snapshot: its tree, and its tensors as views of the arena."""

    def __init__(self, tree: dict[str, Any], layout: Layout, payload: torch.Tensor) -> None:
        self.tree, self._layout, self._payload = tree, layout, payload

    def piece(self, ref: TensorRef) -> Piece:
        try:
            entry, piece = self._layout.refs[ref.index]
        except IndexError:
            raise IntegrityError("the values refer to a tensor that the layout does not have") from None
        return self._layout.entries[entry].pieces[piece]

    def view(self, ref: TensorRef) -> torch.Tensor:
        """The saved tensor inside the arena. Copy it, never hand it out."""
        entry_index, _ = self._layout.refs[ref.index]
        entry, piece = self._layout.entries[entry_index], self.piece(ref)
        dtype = dtype_named(piece.dtype)
        if 0 in piece.shape:
            return torch.empty_strided(piece.shape, piece.stride, dtype=dtype)
        reach = 1 + sum((n - 1) * stride for n, stride in zip(piece.shape, piece.stride, strict=True))
        begin, size = entry.offset + piece.start, reach * dtype.itemsize
        if piece.start + size > entry.size_bytes or begin % dtype.itemsize:
            raise IntegrityError(f"{piece.path} reaches beyond its entry")
        flat = self._payload[begin : begin + size].view(dtype)
        return flat.as_strided(piece.shape, piece.stride)

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """A new tensor of its own with the saved bytes and geometry."""
        view = self.view(ref)
        fresh = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype) if is_dense(view) else None
        return copy_bits(fresh if fresh is not None else torch.empty(view.shape, dtype=view.dtype), view)

    def values(self, value: Any) -> Any:
        """A part of the tree as the user's objects know it: tensors and torch types instead of references."""
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


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy without converting: both have one dtype. Expanded targets are written once per element."""
    target = target.detach()
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return target
