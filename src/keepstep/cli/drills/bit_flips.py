"""`drill flip-bits`: flip bits in the newest sealed snapshot of one rank."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from keepstep.arena import records as h
from keepstep.arena.records import PAGE, KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, SlotSpan
from keepstep.cli.drills.processes import NOT_CONFIRMED, confirmed
from keepstep.cli.keepers import BorrowedArenas, borrow_arenas, connect
from keepstep.cli.tables import count
from keepstep.config import Config
from keepstep.errors import IntegrityError, KeeperError
from keepstep.identity import Identity

REGIONS = ("payload", "layout", "values", "table", "trainer-header", "keeper-header")


@dataclass(frozen=True)
class Target:
    """The slot and the byte range whose bits are flipped."""

    arena: Arena
    sealed: SealedSlot
    region: str
    span: SlotSpan


def flip_bits(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    with connect(identity, config) as link, borrow_arenas(link, config) as borrowed:
        target = choose_target(borrowed, rank=args.rank, region=args.region)
        where = f"{_name(target)} of run {identity.run_id!r}"
        if not confirmed(f"flip {count(args.count, 'bit')} in {where}?", args):
            return NOT_CONFIRMED
        target = choose_target(borrowed, rank=args.rank, region=args.region)  # training has continued meanwhile
        bits = choose_bits(target.span, num_bits=args.count, seed=seed)
        flip(target, bits)
    print(f"flipped {count(len(bits), 'bit')} in {_name(target)} (--seed {seed})")
    print("now: keepstep verify finds it; a restore takes the newest version that is sound, or raises IntegrityError")
    return 0


def _name(target: Target) -> str:
    trainer = target.sealed.trainer
    return f"the {target.region} of rank {trainer.rank}, step {trainer.version.step}, slot {target.sealed.slot}"


def choose_target(borrowed: BorrowedArenas, *, rank: int | None, region: str) -> Target:
    """The newest sealed slot of a rank, by default of the lowest. It is not written until the next one is complete."""
    candidates = [
        (sealed, arena)
        for arena in borrowed.arenas
        for index in range(arena.num_slots)
        if (sealed := arena.sealed(index)) is not None and rank in (None, sealed.trainer.rank)
    ]
    if not candidates:
        raise KeeperError("no such sealed snapshot is held", hint="keepstep inspect lists the snapshots")
    lowest = min(sealed.trainer.rank for sealed, _ in candidates)
    of_rank = [pair for pair in candidates if pair[0].trainer.rank == lowest]
    sealed, arena = max(of_rank, key=lambda pair: pair[0].version)
    return Target(arena, sealed, region, find_span(arena, sealed, region))


def find_span(arena: Arena, sealed: SealedSlot, region: str) -> SlotSpan:
    """The used bytes of a region; of a header, the newer copy."""
    slot = sealed.slot
    used = dict(zip(("layout", "values", "payload"), arena.used_spans(slot, sealed.trainer), strict=True))
    if region in used:
        return used[region]
    if region == "table":
        return SlotSpan(arena.table_span(slot).offset, sealed.keeper.num_chunks * DIGEST_BYTES)
    if region == "trainer-header":
        return _newer_copy(arena, arena.slot_offset(slot), TrainerHeader)
    assert region == "keeper-header", region
    return _newer_copy(arena, arena.slot_offset(slot) + PAGE, KeeperHeader)


def _newer_copy(arena: Arena, offset: int, kind: type[TrainerHeader] | type[KeeperHeader]) -> SlotSpan:
    copies = [SlotSpan(offset + half * h.RECORD_BYTES, h.RECORD_BYTES) for half in (0, 1)]

    def sequence(copy: SlotSpan) -> int:
        decoded = h.decode_copy(kind, arena.segment.read(copy.offset, copy.size_bytes))
        return decoded[0] if decoded else -1

    return max(copies, key=sequence)


def choose_bits(span: SlotSpan, *, num_bits: int, seed: int) -> list[int]:
    """Distinct bits, counted from the start of the arena: flipping one twice would change nothing."""
    if num_bits > span.size_bytes * 8:
        raise KeeperError(f"{num_bits} bits cannot be flipped in {span.size_bytes} bytes", hint="another --region")
    return [span.offset * 8 + bit for bit in random.Random(seed).sample(range(span.size_bytes * 8), num_bits)]


def flip(target: Target, bits: list[int]) -> None:
    """Flip the bits. Raises when the slot was rewritten meanwhile: its next snapshot would have the fault."""
    segment, slot = target.arena.segment, target.sealed.slot
    before = target.arena.keeper_header(slot), target.arena.trainer_header(slot)
    for bit in bits:
        (byte,) = segment.read(bit // 8, 1)
        segment.write(bit // 8, bytes([byte ^ (1 << bit % 8)]))
    after = target.arena.keeper_header(slot), target.arena.trainer_header(slot)
    if before != after and not target.region.endswith("header"):
        raise IntegrityError(
            f"slot {slot} was rewritten while its bits were flipped: do not trust the next snapshot in it",
            hint="wait for two more versions (keepstep status), then repeat the drill",
        )
