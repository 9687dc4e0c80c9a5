"""`keepstep drill`: a failure caused on purpose, to see that the job comes through it.

Says what will be hit and asks, unless --yes. Processes are hit by pidfd, opened before the keeper is asked
once more who they are, so that nobody's next owner of a pid dies. Bits are flipped in the newest sealed
snapshot of one rank, which nobody writes: it is kept until the next version is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from keepstep.arena import header as h
from keepstep.arena.header import PAGE, KeeperHeader, TrainerHeader
from keepstep.arena.slots import DIGEST_BYTES, Arena, SealedSlot, Span
from keepstep.cli.client import (
    Borrowed,
    add_choice,
    borrow_arenas,
    choose_run,
    connect,
    fetch_status,
    peer_pid,
    settings,
)
from keepstep.cli.tables import count
from keepstep.client import KeeperClient
from keepstep.config import Config
from keepstep.errors import IntegrityError, KeeperError
from keepstep.identity import Identity
from keepstep.protocol import StatusIs, WantStatus
from keepstep.types import RankStatus, Status

REGIONS = ("payload", "layout", "values", "table", "trainer-header", "keeper-header")
DIE_S = 10.0
"""From SIGKILL to the end of a process: longer only while it is stuck in the kernel."""
NOT_CONFIRMED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    drills = parser.add_subparsers(dest="drill", metavar="DRILL", required=True)
    trainer = _add_drill(drills, "kill-trainer", "SIGKILL one trainer, or all of this node at once")
    which = trainer.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="this rank's (default: the lowest that lives)")
    which.add_argument("--all", action="store_true", help="all trainers of this node")
    _add_drill(drills, "kill-keeper", "SIGKILL the keeper of this node")
    flip = _add_drill(drills, "flip-bits", "flip bits in the newest sealed snapshot of a rank")
    flip.add_argument("--rank", type=int, metavar="N", help="of this rank (default: the lowest)")
    flip.add_argument("--region", choices=REGIONS, default="payload", help="where (default: payload)")
    flip.add_argument("--count", type=_positive, default=1, metavar="N", help="how many bits (default: 1)")
    flip.add_argument("--seed", type=int, metavar="N", help="choose the same bits again")


def _add_drill(
    drills: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = drills.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_choice(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    return _DRILLS[args.drill](args, choose_run(config), config)


def _confirmed(question: str, args: argparse.Namespace) -> bool:
    if args.yes:
        return True
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        raise KeeperError("nobody is there to confirm it", hint="--yes") from None
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was done", file=sys.stderr)
    return False


# Processes


def _kill_trainer(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    targets = choose_trainers(fetch_status(identity), rank=args.rank, every=args.all)
    named = ", ".join(f"rank {target.rank} (pid {target.pid})" for target in targets)
    if not _confirmed(f"SIGKILL {named} of run {identity.run_id!r}?", args):
        return NOT_CONFIRMED
    with connect(identity, config) as link:
        _check_same_namespace(link)
        status = kill(link, {target.pid: target.rank for target in targets}, config)
    print(f"killed {named}")
    print(_after_trainers(status))
    return 0


def choose_trainers(status: Status, *, rank: int | None, every: bool) -> list[RankStatus]:
    living = [found for found in status.ranks if found.alive and found.pid > 0]
    chosen = living if every else [found for found in living if rank in (None, found.rank)][:1]
    if not chosen:
        what = "no trainer" if rank is None else f"no trainer of rank {rank}"
        raise KeeperError(f"{what} lives on this node", hint="keepstep status shows who does")
    return chosen


def kill(link: KeeperClient, ranks: dict[int, int], config: Config) -> Status:
    """SIGKILL trainers by pid, all or none. Returns the status from just before."""
    with contextlib.ExitStack() as stack:
        pidfds = {pid: _open_pidfd(pid, stack) for pid in ranks}
        status = _ask_status(link, config)
        living = {found.pid: found.rank for found in status.ranks if found.alive}
        for pid, rank in ranks.items():
            # The keeper follows its trainers by pidfd: alive now means that ours is the same process.
            if living.get(pid) != rank:
                raise KeeperError(f"process {pid} is not the trainer of rank {rank} any more", hint="keepstep status")
        for pidfd in pidfds.values():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid, pidfd in pidfds.items():
            _wait_until_dead(pid, pidfd)
    return status


def _open_pidfd(pid: int, stack: contextlib.ExitStack) -> int:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise KeeperError(f"process {pid} is gone already", hint="keepstep status") from None
    stack.callback(os.close, pidfd)
    return pidfd


def _wait_until_dead(pid: int, pidfd: int) -> None:
    if not select.select([pidfd], [], [], DIE_S)[0]:
        raise KeeperError(f"process {pid} is still there {DIE_S:g} s after SIGKILL", hint="it is stuck in the kernel")


def _ask_status(link: KeeperClient, config: Config) -> Status:
    answer, _ = link.request(WantStatus(), StatusIs, timeout_s=config.keeper.request_s)
    return msgspec.json.decode(answer.json, type=Status)


def _check_same_namespace(link: KeeperClient) -> None:
    """A pid means the same process here as it does to the keeper, or nothing is killed."""
    try:
        same = os.readlink(f"/proc/{peer_pid(link)}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        same = False
    if not same:
        raise KeeperError("the keeper lives in another PID namespace", hint="run the drill inside its container")


def _after_trainers(status: Status) -> str:
    back = "the run begins again: no version was complete"
    if status.step is not None:
        back = f"restore() gives step {status.step} or a later one back"
    if status.keeper.launcher_alive:
        return f"now: the launcher starts the trainers again, and {back}"
    return f"now: start the job again with the run id {status.run_id!r}, and {back}"


def _kill_keeper(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    with connect(identity, config) as link, contextlib.ExitStack() as stack:
        pid = peer_pid(link)
        if not pid:
            raise KeeperError("the keeper lives in another PID namespace", hint="run the drill inside its container")
        pidfd = _open_pidfd(pid, stack)
        status = _ask_status(link, config)  # it answers on this connection: the pidfd is its own
        risk = "" if status.keeper.holders else " NOBODY ELSE HOLDS THE MEMORY: what it holds will be lost."
        if not _confirmed(f"SIGKILL the keeper (pid {pid}) of run {identity.run_id!r}?{risk}", args):
            return NOT_CONFIRMED
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait_until_dead(pid, pidfd)
    print(f"killed the keeper (pid {pid})")
    if status.keeper.holders:
        print("now: whoever holds the memory starts a new keeper, which adopts it; training does not stop")
    else:
        print("now: nothing is held any more; the next trainer starts a new keeper")
    return 0


# Bits


@dataclass(frozen=True)
class Target:
    """The slot that is hit, and the stretch of it."""

    arena: Arena
    sealed: SealedSlot
    region: str
    span: Span


def _flip_bits(args: argparse.Namespace, identity: Identity, config: Config) -> int:
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    with connect(identity, config) as link, borrow_arenas(link, config) as borrowed:
        target = choose_target(borrowed, rank=args.rank, region=args.region)
        where = f"{_name(target)} of run {identity.run_id!r}"
        if not _confirmed(f"flip {count(args.count, 'bit')} in {where}?", args):
            return NOT_CONFIRMED
        target = choose_target(borrowed, rank=args.rank, region=args.region)  # training went on meanwhile
        bits = choose_bits(target.span, num_bits=args.count, seed=seed)
        flip(target, bits)
    print(f"flipped {count(len(bits), 'bit')} in {_name(target)} (--seed {seed})")
    print("now: keepstep verify finds it; a restore takes the newest version that is sound, or raises IntegrityError")
    return 0


def _name(target: Target) -> str:
    trainer = target.sealed.trainer
    return f"the {target.region} of rank {trainer.rank}, step {trainer.version.step}, slot {target.sealed.slot}"


def choose_target(borrowed: Borrowed, *, rank: int | None, region: str) -> Target:
    """The newest sealed slot of a rank, the lowest rank unless told."""
    found = [
        (sealed, arena)
        for arena in borrowed.arenas
        for index in range(arena.num_slots)
        if (sealed := arena.sealed(index)) is not None and rank in (None, sealed.trainer.rank)
    ]
    if not found:
        raise KeeperError("no sealed snapshot like that is held", hint="keepstep inspect lists what is held")
    lowest = min(sealed.trainer.rank for sealed, _ in found)
    mine = [pair for pair in found if pair[0].trainer.rank == lowest]
    sealed, arena = max(mine, key=lambda pair: pair[0].version)
    return Target(arena, sealed, region, find_span(arena, sealed, region))


def find_span(arena: Arena, sealed: SealedSlot, region: str) -> Span:
    """The bytes of a region that mean something: the used ones, and of a header the newer copy."""
    slot = sealed.slot
    used = dict(zip(("layout", "values", "payload"), arena.used_spans(slot, sealed.trainer), strict=True))
    if region in used:
        return used[region]
    if region == "table":
        return Span(arena.table_span(slot).offset, sealed.keeper.num_chunks * DIGEST_BYTES)
    if region == "trainer-header":
        return _newer_copy(arena, arena.slot_offset(slot), TrainerHeader)
    assert region == "keeper-header", region
    return _newer_copy(arena, arena.slot_offset(slot) + PAGE, KeeperHeader)


def _newer_copy(arena: Arena, offset: int, kind: type[TrainerHeader] | type[KeeperHeader]) -> Span:
    copies = [Span(offset + half * h.RECORD_BYTES, h.RECORD_BYTES) for half in (0, 1)]

    def sequence(copy: Span) -> int:
        found = h.decode_copy(kind, arena.segment.read(copy.offset, copy.size_bytes))
        return found[0] if found else -1

    return max(copies, key=sequence)


def choose_bits(span: Span, *, num_bits: int, seed: int) -> list[int]:
    """Different bits, counted from the start of the arena: the same one twice would be no fault at all."""
    if num_bits > span.size_bytes * 8:
        raise KeeperError(f"{num_bits} bits cannot be flipped in {span.size_bytes} bytes", hint="another --region")
    return [span.offset * 8 + bit for bit in random.Random(seed).sample(range(span.size_bytes * 8), num_bits)]


def flip(target: Target, bits: list[int]) -> None:
    """Flip, and make sure that nobody took the slot up meanwhile: its next snapshot would carry the fault."""
    segment, slot = target.arena.segment, target.sealed.slot
    before = target.arena.keeper_header(slot), target.arena.trainer_header(slot)
    for bit in bits:
        (byte,) = segment.read(bit // 8, 1)
        segment.write(bit // 8, bytes([byte ^ (1 << bit % 8)]))
    after = target.arena.keeper_header(slot), target.arena.trainer_header(slot)
    if before != after and not target.region.endswith("header"):
        raise IntegrityError(
            f"slot {slot} was taken up again while its bits were flipped: do not trust the next snapshot in it",
            hint="wait for two more versions (keepstep status), then repeat the drill",
        )


_DRILLS: dict[str, Callable[[argparse.Namespace, Identity, Config], int]] = {
    "kill-trainer": _kill_trainer,
    "kill-keeper": _kill_keeper,
    "flip-bits": _flip_bits,
}
