"""What one snapshot copies, and in which order: worked out once per layout, used at every `take`.

eager   inside `take`: small tensors together, and everything whose writer is not fenced
lazy    behind it, by the copy thread, in pieces; the optimizer that owns it waits at the gate

Of a stream only the stored chunks are copied, each from the tensors that it is made of; parity of others
is computed on the way (coding.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.layout import Layout, digest
from keepstep.trainer.blocks import Block, Blocks, Shared
from keepstep.trainer.coding import Coded, coded_units
from keepstep.trainer.fence import Watched
from keepstep.trainer.ranges import cut, gaps, runs
from keepstep.trainer.units import Unit

PIECE_BYTES = 64 << 20


@dataclass
class History:
    """What the plans of one layout have in common, however its streams are turned."""

    snapshots: int = 0


@dataclass
class CopyPlan:
    """All units of a layout. Valid while the tensors' addresses and shapes are."""

    layout: Layout
    encoded: bytes
    layout_digest: bytes
    small: list[Unit] = field(default_factory=list)
    loose: list[Unit | Coded] = field(default_factory=list)
    """unfenced, or to be materialised"""
    fenced: list[Unit | Coded] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(offset, size) of what no unit writes in the chunks of streams: zero on all ranks that store them"""
    history: History = field(default_factory=History)

    @property
    def payload_bytes(self) -> int:
        return self.layout.payload_bytes

    def split(self, watched: list[Watched]) -> tuple[list[Unit | Coded], list[Unit | Coded]]:
        """(what to copy inside take beyond the small ones, what may be copied behind it) at this moment."""
        trusted = {index for index, w in enumerate(watched) if w.trusted}
        eager = list(self.loose)
        lazy: list[Unit | Coded] = []
        for unit in self.fenced:
            (lazy if unit.owners <= trusted else eager).append(unit)
        return eager, lazy


def plan_copies(blocks: Blocks, watched: list[Watched], small_bytes: int) -> CopyPlan:
    """Classify every block by size and by who writes it."""
    encoded = blocks.layout.encode()
    plan = CopyPlan(blocks.layout, encoded, digest(encoded))
    owned = [w.storages() for w in watched]
    for block in blocks.blocks:
        if block.entry.size_bytes == 0:
            continue
        owners = _owners(block, owned)
        unit = Unit(block.source(), block.entry.offset, block.entry.size_bytes, block.entry.path, owners, block)
        _classify(plan, unit, small_bytes)
    for shared in blocks.shared:
        _plan_shared(plan, shared, owned, small_bytes)
    # Where one optimizer's tensors are copied together, it can step while the next one's are still copied.
    plan.fenced.sort(key=lambda unit: (sorted(unit.owners), unit.offset))
    return plan


def _classify(plan: CopyPlan, unit: Unit, small_bytes: int) -> None:
    """By the block's size: a small end of a large tensor is fenced like the rest of it."""
    size = unit.block.entry.size_bytes
    if unit.block.materialise or not (unit.owners or size <= small_bytes):
        plan.loose.append(unit)
    elif size <= small_bytes:
        plan.small.append(unit)
    else:
        plan.fenced.append(unit)


def _plan_shared(plan: CopyPlan, shared: Shared, owned: list[set[int]], small_bytes: int) -> None:
    """The parts of a stream's tensors that this rank stores, and the parity that it computes."""
    blocks, stream = shared.blocks, shared.stream
    sources = [block.source() for block in blocks]
    owners = [_owners(block, owned) for block in blocks]
    for run in runs(stream):
        for index, begin, end in cut(stream.entries, run.start, run.start + run.size_bytes):
            place, block = run.offset + blocks[index].entry.offset + begin - run.start, blocks[index]
            unit = Unit(sources[index][begin:end], place, end - begin, block.entry.path, owners[index], block)
            _classify(plan, unit, small_bytes)
    for coded in coded_units(stream, sources, owners):
        (plan.fenced if coded.fenced else plan.loose).append(coded)
    plan.gaps += gaps(stream)


def _owners(block: Block, owned: list[set[int]]) -> frozenset[int]:
    storage = block.tensors[0].untyped_storage().data_ptr()
    return frozenset(index for index, storages in enumerate(owned) if storage in storages)
