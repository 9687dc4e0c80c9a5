"""`keepstep inspect`: the content of the shared memory, according to its headers.

Reads the arenas through duplicates of the keeper's descriptors, while training goes on. Nothing is
locked, so headers are compared after reading: a slot that was written meanwhile is read again.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keepstep import layout
from keepstep.arena import records as h
from keepstep.arena.slots import Arena
from keepstep.cli.keepers import BorrowedArenas, add_choice, borrow_arenas, choose_run, connect, settings
from keepstep.cli.tables import format_seconds, make_table, open_console
from keepstep.errors import IntegrityError, KeeperError, printable
from keepstep.layout import format_bytes

READ_TRIES = 5  # a slot is rewritten once per snapshot at most: after so many failures it is damaged


class SlotSummary(msgspec.Struct, frozen=True):
    """A slot according to its headers; its bytes are not verified here (`keepstep verify` does)."""

    index: int
    state: str  # free, writing, committed, sealed, or damaged: neither copy of its header is sound
    rank: int | None = None
    world_size: int | None = None
    step: int | None = None
    incarnation: int | None = None
    exact: bool | None = None
    layout_bytes: int = 0
    values_bytes: int = 0
    payload_bytes: int = 0
    written_at: float | None = None
    sealed_at: float | None = None
    num_chunks: int = 0


class ArenaSummary(msgspec.Struct, frozen=True):
    """An arena according to its records."""

    arena_id: str
    local_index: int
    generation: int
    size_bytes: int
    allocated_bytes: int
    progress: int | None
    granted_step: int | None
    granted_slot: int | None
    # The newest version that was ever complete, as the keeper wrote it down for its successor.
    complete_step: int | None
    slots: list[SlotSummary]


class LayoutSummary(msgspec.Struct, frozen=True):
    """The layout of one rank's snapshot."""

    rank: int
    step: int
    incarnation: int
    entries: list[dict[str, Any]]


class Inspection(msgspec.Struct, frozen=True):
    """`keepstep inspect --json`."""

    run_id: str
    node_id: str
    arenas: list[ArenaSummary]
    refused: dict[str, str]
    entries: LayoutSummary | None = None
    schema: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--entries", action="store_true", help="list the tensors of a snapshot: path, dtype, shape")
    parser.add_argument("--rank", type=int, metavar="N", help="with --entries: of this rank (default: the lowest)")
    parser.add_argument("--step", type=int, metavar="N", help="with --entries: of this step (default: the newest)")
    parser.add_argument("--json", action="store_true", help="the documented JSON")


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    identity = choose_run(config)
    with connect(identity, config) as link, borrow_arenas(link, config) as borrowed:
        entries = _find_entries(borrowed, rank=args.rank, step=args.step) if args.entries else None
        arenas = [_summarize(arena) for arena in borrowed.arenas]
        inspection = Inspection(identity.run_id, identity.node_id, arenas, borrowed.refused, entries)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(inspection), indent=2).decode())
    else:
        _print(inspection, open_console())
    return 0


# Reading


def _summarize(arena: Arena) -> ArenaSummary:
    progress, grant, ledger = arena.progress(), arena.grant(), arena.ledger()
    granted = grant is not None and grant.slot >= 0
    return ArenaSummary(
        arena_id=arena.arena_id, local_index=arena.header.local_index, generation=arena.header.generation,
        size_bytes=arena.segment.size_bytes, allocated_bytes=arena.segment.allocated_bytes,
        progress=progress.step if progress else None, granted_step=grant.step if grant and granted else None,
        granted_slot=grant.slot if grant and granted else None,
        complete_step=ledger.complete.step if ledger and ledger.complete else None,
        slots=[_summarize_slot(arena, index) for index in range(arena.num_slots)],
    )  # fmt: skip


def _summarize_slot(arena: Arena, index: int) -> SlotSummary:
    header, sealed = arena.trainer_header(index), arena.sealed(index)
    if header is None:
        untouched = not any(arena.segment.read(arena.slot_offset(index), 2 * h.RECORD_BYTES))
        return SlotSummary(index, "free" if untouched else "damaged")
    trainer = header[1]
    state = "sealed" if sealed else "committed" if trainer.state == h.COMMITTED else "writing"
    return SlotSummary(
        index, state, rank=trainer.rank, world_size=trainer.world_size, step=trainer.version.step,
        incarnation=trainer.version.incarnation.number, exact=not trainer.flags & h.INEXACT,
        layout_bytes=trainer.layout_bytes, values_bytes=trainer.values_bytes, payload_bytes=trainer.payload_bytes,
        written_at=trainer.written_at, sealed_at=sealed.keeper.sealed_at if sealed else None,
        num_chunks=sealed.keeper.num_chunks if sealed else 0,
    )  # fmt: skip


def _find_entries(borrowed: BorrowedArenas, *, rank: int | None, step: int | None) -> LayoutSummary:
    for _ in range(READ_TRIES):
        arena, slot = _choose_slot(borrowed, rank=rank, step=step)
        entries = _read_entries(arena, slot)
        if entries is not None:
            return entries
    raise IntegrityError(
        "the layout does not match its digest",
        hint="keepstep verify finds what is damaged; --step N reads another snapshot",
    )


def _choose_slot(borrowed: BorrowedArenas, *, rank: int | None, step: int | None) -> tuple[Arena, int]:
    candidates = [
        (sealed, arena)
        for arena in borrowed.arenas
        for index in range(arena.num_slots)
        if (sealed := arena.sealed(index)) is not None
        and rank in (None, sealed.trainer.rank)
        and step in (None, sealed.version.step)
    ]
    if not candidates:
        raise KeeperError("no such sealed snapshot is held", hint="keepstep inspect lists the snapshots")
    sealed, arena = min(candidates, key=lambda pair: (pair[0].trainer.rank, -pair[0].version.step))
    return arena, sealed.slot


def _read_entries(arena: Arena, slot: int) -> LayoutSummary | None:
    """None when the slot was written meanwhile, or is damaged."""
    sealed = arena.sealed(slot)
    if sealed is None:
        return None
    trainer = sealed.trainer
    span = arena.used_spans(slot, trainer)[0]
    encoded = arena.segment.read(span.offset, span.size_bytes)
    if layout.digest(encoded) != trainer.layout_digest or arena.sealed(slot) != sealed:
        return None
    rows = layout.describe(layout.decode(encoded, payload_bytes=trainer.payload_bytes))
    return LayoutSummary(trainer.rank, trainer.version.step, trainer.version.incarnation.number, rows)


# Printing


def _print(inspection: Inspection, console: Console) -> None:
    if inspection.entries is not None:
        console.print(_render_entries(inspection.entries))
        return
    console.print(f"run {inspection.run_id} · node {inspection.node_id}")
    if not inspection.arenas and not inspection.refused:
        console.print("nothing is held: no trainer has requested memory yet")
    for arena in inspection.arenas:
        console.print(_render_arena(arena))
    for arena_id, problem in inspection.refused.items():
        console.print(Text(printable(f"arena {arena_id}: {problem}"), style="red"))


def _render_arena(arena: ArenaSummary) -> Group:
    granted = "nothing" if arena.granted_slot is None else f"step {arena.granted_step} into slot {arena.granted_slot}"
    title = (
        f"\narena {arena.arena_id[:12]} · local rank {arena.local_index} · generation {arena.generation} · "
        f"{format_bytes(arena.size_bytes)} · granted: {granted}"
    )
    columns = (">slot", "state", ">step", ">incarnation", ">rank", ">layout", ">values", ">payload", ">age", "exact")
    table = make_table(*columns)
    for slot in arena.slots:
        table.add_row(*_slot_cells(slot))
    return Group(Text(printable(title)), table)


def _slot_cells(slot: SlotSummary) -> list[str]:
    if slot.step is None or slot.written_at is None:
        return [str(slot.index), slot.state]
    sizes = (slot.layout_bytes, slot.values_bytes, slot.payload_bytes)
    return [
        str(slot.index), slot.state, str(slot.step), str(slot.incarnation), str(slot.rank),
        *map(format_bytes, sizes), format_seconds(max(0.0, time.time() - slot.written_at)),
        "yes" if slot.exact else "no",
    ]  # fmt: skip


def _render_entries(entries: LayoutSummary) -> Table:
    title = f"rank {entries.rank}, step {entries.step}, incarnation {entries.incarnation}"
    table = make_table("path", "dtype", "shape", "global shape", ">offset", ">bytes", title=title)
    for row in entries.entries:
        shapes = ["x".join(map(str, row[name])) or "scalar" for name in ("shape", "global_shape")]
        table.add_row(row["path"], row["dtype"], *shapes, str(row["offset"]), str(row["bytes"]))
    return table
