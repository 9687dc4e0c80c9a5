"""Memory blocks behind the tensors of a state: each byte once, however many tensors share it.

Dense tensors are stored in memory order with their strides, so that a copy is one memcpy and a restored tensor has the
same geometry. Tensors that share memory without being the same view are stored as the range of storage under all of
them. A tensor that is not dense (gaps, expanded, conjugated) is stored as its contiguous values, and must be
materialised at `take`.

Replicated tensors go into replica sets: one per set of ranks that hold them (and kind of device, so that parity can be
computed where the tensors are).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from keepstep.layout import CHUNK_BYTES, Entry, Layout, ReplicaSet, TensorView, align
from keepstep.trainer.connection.environment import Ranks
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.state.dtensors import is_dtensor, local_tensor
from keepstep.trainer.state.reader import local_part
from keepstep.trainer.state.structure import Check, spread

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SPAN_ALIGN = 16  # A range of storage begins at a multiple, so that every dtype in it stays aligned.


@dataclass(frozen=True)
class Block:
    """The source of one entry."""

    entry: Entry
    tensors: tuple[torch.Tensor, ...]  # local parts, kept alive until their copy ends
    materialise: bool

    def source(self) -> torch.Tensor:
        """The block's bytes as a flat uint8 tensor; aliases the live memory unless it must be materialised."""
        first = self.tensors[0]
        if self.materialise:
            first = first.resolve_conj().resolve_neg().contiguous()
            return flat_bytes(first)
        if len({_geometry(t) for t in self.tensors}) == 1:
            return flat_bytes(first)
        start = min(_first_byte(t) for t in self.tensors)
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        flat.set_(first.untyped_storage(), start - start % SPAN_ALIGN, (self.entry.size_bytes,), (1,))
        return flat


@dataclass(frozen=True)
class SharedBlocks:
    """A replica set and the sources of its bytes; the entries of these blocks count in the set."""

    replica_set: ReplicaSet
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Blocks:
    """A layout and where its bytes come from."""

    layout: Layout
    blocks: tuple[Block, ...]
    shared: tuple[SharedBlocks, ...] = ()


RanksOf = Callable[[torch.Tensor, str], Ranks | None]
ReplicaKey = tuple[Ranks, str]


def build(
    tensors: list[torch.Tensor],
    paths: dict[int, str],
    *,
    sharing: ReplicaShares | None = None,
    ranks_of: RanksOf = lambda tensor, path: None,
    small_bytes: int = 0,
) -> Blocks:
    """Lay the tensors out. Raises CaptureError, by path, for what has no plain bytes.

    Small tensors of a device are adjacent, so that they can be copied together.

    `ranks_of` returns the ranks that hold a tensor's bytes, None for this rank alone; ignored without `sharing`.
    """
    locals_ = [local_part(tensor, paths[index]) for index, tensor in enumerate(tensors)]
    own: list[list[int]] = []
    replicated: dict[ReplicaKey, list[list[int]]] = {}
    for members in _group(locals_):
        key = _replica_key_of(members, tensors, locals_, paths, ranks_of) if sharing is not None else None
        (own if key is None else replicated.setdefault(key, [])).append(members)
    own.sort(key=lambda members: _together(locals_[members[0]], small_bytes))
    order: list[list[int]] = []
    blocks = _lay_out(own, order, tensors, locals_, paths)
    sources = [(key[0], _lay_out(groups, order, tensors, locals_, paths)) for key, groups in sorted(replicated.items())]
    places = {member: (entry, piece) for entry, members in enumerate(order) for piece, member in enumerate(members)}
    refs = tuple(places[index] for index in range(len(tensors)))
    own_layout = Layout(tuple(block.entry for block in blocks), refs)
    return _with_replica_sets(Blocks(own_layout, tuple(blocks)), sources, sharing, turn=0)


def turned(blocks: Blocks, sharing: ReplicaShares, turn: int) -> Blocks:
    """The same state with the parts of its replica sets assigned to other holders."""
    return _with_replica_sets(
        blocks, [(part.replica_set.ranks, list(part.blocks)) for part in blocks.shared], sharing, turn
    )


def _with_replica_sets(
    blocks: Blocks, sources: list[tuple[Ranks, list[Block]]], sharing: ReplicaShares | None, turn: int
) -> Blocks:
    offset = blocks.layout.shared_offset
    shared: list[SharedBlocks] = []
    for ranks, members in sources:
        assert sharing is not None
        replica_set = sharing.replica_set(ranks, tuple(block.entry for block in members), offset=offset, turn=turn)
        shared.append(SharedBlocks(replica_set, tuple(members)))
        offset += align(replica_set.stored_bytes, CHUNK_BYTES)
    layout = Layout(blocks.layout.entries, blocks.layout.refs, tuple(part.replica_set for part in shared))
    return Blocks(layout, blocks.blocks, tuple(shared))


def _lay_out(
    groups: list[list[int]],
    order: list[list[int]],
    tensors: list[torch.Tensor],
    locals_: list[torch.Tensor],
    paths: dict[int, str],
) -> list[Block]:
    """Place one block after the other; `order` collects their members, in the order of the layout's entries."""
    blocks: list[Block] = []
    offset = 0
    for members in groups:
        blocks.append(_block(members, offset, tensors, locals_, paths))
        offset = align(offset + blocks[-1].entry.size_bytes)
    order += groups
    return blocks


def _replica_key_of(
    members: list[int],
    tensors: list[torch.Tensor],
    locals_: list[torch.Tensor],
    paths: dict[int, str],
    ranks_of: RanksOf,
) -> ReplicaKey | None:
    """The replica set of a group of tensors; None: this rank's own. All must be views of the same, whole bytes."""
    if len({_geometry(locals_[index]) for index in members}) > 1 or not locals_[members[0]].is_contiguous():
        return None
    holders = {ranks_of(tensors[index], paths[index]) for index in members}
    ranks = holders.pop() if len(holders) == 1 else None
    return None if ranks is None else (ranks, locals_[members[0]].device.type)


_shape: Callable[[torch.Tensor], torch.Size] = operator.attrgetter("shape")
_dtype: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype")
_inner: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


class TensorAddresses:
    """Addresses and geometry of the tensors of a layout: it and its sources are valid while they are unchanged.

    Keeps the tensors alive, and so their storages: no other tensor can get one of their addresses.
    """

    def __init__(self, tensors: list[torch.Tensor], runs: list[list[torch.Tensor]]) -> None:
        """`runs`: the same tensors, as the reader returned them."""
        self._runs = runs
        self._geometry = [_address_and_geometry(local_tensor(tensor)) for tensor in tensors]
        self._subsets = [_Addresses(subset) for subset in spread(tensors)]

    def unchanged(self, runs: list[list[torch.Tensor]], subset: int | None = None) -> bool:
        """Whether the objects, addresses and shapes are the same, or other objects show the same bytes.

        With a subset, addresses and shapes of that one only. Of the same objects, strides and dtypes are not checked.
        """
        if len(runs) == len(self._runs) and all(map(_same_objects, runs, self._runs)):
            subsets = self._subsets if subset is None else [self._subsets[subset % len(self._subsets)]]
            return all(addresses.unchanged() for addresses in subsets)
        tensors = [tensor for run in runs for tensor in run]
        if len(tensors) != len(self._geometry):
            return False
        if [_address_and_geometry(local_tensor(tensor)) for tensor in tensors] != self._geometry:
            return False
        self._runs = runs  # the same objects the next time
        self._subsets = [_Addresses(subset) for subset in spread(tensors)]
        return True

    def checks(self) -> list[Check]:
        """All addresses and shapes, in short calls."""
        return [addresses.unchanged for addresses in self._subsets]

    def geometry_checks(self) -> list[Check]:
        """Strides, dtypes and flags of all tensors, in short calls."""
        return [addresses.same_geometry for addresses in self._subsets]


def _same_objects(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return these is those or (len(these) == len(those) and all(map(operator.is_, these, those)))


class _Addresses:
    """Addresses and geometry of a subset. Read through `map`, because every `take` reads some."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._locals = list(map(local_tensor, tensors))
        self._complex = [tensor for tensor in self._locals if tensor.is_complex()]
        self._outer = list(filter(is_dtensor, tensors))
        self._inner = [tensor._local_tensor for tensor in self._outer]
        self._addresses, self._geometry = self._read_addresses(), self._read_geometry()

    def unchanged(self) -> bool:
        same_inner = all(map(operator.is_, map(_inner, self._outer), self._inner))
        return same_inner and self._read_addresses() == self._addresses

    def same_geometry(self) -> bool:
        return self._read_geometry() == self._geometry

    def _read_addresses(self) -> tuple[list[Any], ...]:
        return list(map(torch.Tensor.data_ptr, self._locals)), list(map(_shape, self._locals))

    def _read_geometry(self) -> tuple[list[Any], ...]:
        """What can change at the same address: the order of the bytes, and their meaning."""
        tensors = self._locals
        flags = [*map(torch.Tensor.is_conj, self._complex), *map(torch.Tensor.is_neg, tensors)]
        return list(map(torch.Tensor.stride, tensors)), list(map(_dtype, tensors)), flags


def _address_and_geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        place = tensor.data_ptr(), tensor.stride()
    except RuntimeError:  # no plain bytes: refused by path when the layout is made
        return (type(tensor), tensor.layout)
    return place, tensor.dtype, tensor.shape, tensor.is_conj(), tensor.is_neg()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory, in memory order, as uint8."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their range of memory, each once."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _group(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors that share memory, in order of their first member; some stand alone."""
    by_storage: dict[tuple[int, int], list[int]] = {}
    groups: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        # Conjugated and negated views are stored as their values, not as the bytes below them.
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            groups.append([index])
        else:
            key = (tensor.untyped_storage().data_ptr(), tensor.device.index or -1)
            by_storage.setdefault(key, []).append(index)
    for members in by_storage.values():
        groups += [members] if len(members) == 1 else _overlapping(members, tensors)
    return sorted(groups, key=lambda members: members[0])


def _together(tensor: torch.Tensor, small_bytes: int) -> str:
    """A sort key that puts small tensors of a device together; the order of all others stays."""
    return str(tensor.device) if tensor.device.type != "cpu" and 0 < tensor.nbytes <= small_bytes else ""


def _overlapping(members: list[int], tensors: list[torch.Tensor]) -> list[list[int]]:
    groups: list[list[int]] = []
    end = -1
    for index in sorted(members, key=lambda i: (_first_byte(tensors[i]), i)):
        if _first_byte(tensors[index]) < end:
            groups[-1].append(index)
        else:
            groups.append([index])
        end = max(end, _last_byte(tensors[index]))
    return [sorted(group) for group in groups]


def _block(
    members: list[int], offset: int, tensors: list[torch.Tensor], locals_: list[torch.Tensor], paths: dict[int, str]
) -> Block:
    parts = [locals_[i] for i in members]
    alone = len({_geometry(part) for part in parts}) == 1
    materialise = alone and not is_dense(parts[0]) and parts[0].numel() > 0
    start = min(_first_byte(part) for part in parts)
    start -= start % SPAN_ALIGN
    size = parts[0].nbytes if alone else max(_last_byte(part) for part in parts) - start
    pieces = []
    for index, part in zip(members, parts, strict=True):
        stride = tuple(torch.empty(part.shape, device="meta").stride()) if materialise else tuple(part.stride())
        begin = 0 if alone else _first_byte(part) - start
        pieces.append(_piece(paths[index], tensors[index], part, stride, begin))
    return Block(Entry(offset, size, tuple(pieces)), tuple(parts), materialise)


def _piece(path: str, tensor: torch.Tensor, part: torch.Tensor, stride: tuple[int, ...], begin: int) -> TensorView:
    sharded = tensor if is_dtensor(tensor) else getattr(tensor, "data", None)
    is_sharded = is_dtensor(sharded)
    global_shape = tuple(tensor.shape)
    region = region_of(sharded) if is_dtensor(sharded) else (0,) * part.dim()
    name = str(part.dtype).removeprefix("torch.")
    return TensorView(path, name, tuple(part.shape), stride, begin, global_shape, region, is_sharded)


def region_of(tensor: DTensor) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _last_byte(tensor: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _first_byte(tensor) + (reach + 1) * tensor.element_size()


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
