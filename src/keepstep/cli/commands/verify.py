"""`keepstep verify`: check every sealed snapshot against its checksums now.

Training goes on, so a slot may be rewritten while the keeper reads it. Only slots that the keeper still
reports as corrupt afterwards count; a replaced slot is listed as replaced. Exit code 0: all sound; 3: not.
"""

from __future__ import annotations

import argparse

import msgspec

from keepstep.cli.keepers import add_choice, choose_run, connect, settings
from keepstep.cli.tables import count, make_table, open_console
from keepstep.control.client import RESTORE_S
from keepstep.control.messages import Verified, VerifyResult, WantVerify
from keepstep.control.status import fetch_status
from keepstep.layout import format_bytes
from keepstep.types import SlotStatus, Status

UNSOUND = 3


class SnapshotVerdict(msgspec.Struct, frozen=True):
    """One snapshot of one rank."""

    rank: int
    slot: int
    step: int | None
    size_bytes: int
    verdict: str  # sound, corrupt, or replaced: a newer snapshot took its place while it was checked
    problem: str = ""


class Verification(msgspec.Struct, frozen=True):
    run_id: str
    node_id: str
    sound: bool
    results: list[SnapshotVerdict]
    schema: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--json", action="store_true", help="the documented JSON")


def run(args: argparse.Namespace) -> int:
    config = settings(args)
    identity = choose_run(config)
    with connect(identity, config) as link:
        verified, _ = link.request(WantVerify(), Verified, timeout_s=RESTORE_S)
    verification = judge(verified.results, fetch_status(identity))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(verification), indent=2).decode())
    else:
        _print(verification)
    return 0 if verification.sound else UNSOUND


def judge(results: list[VerifyResult], after: Status) -> Verification:
    """Verdicts from the results and the status afterwards. A node without snapshots is not sound."""
    slots = {(rank.rank, slot.index): slot for rank in after.ranks for slot in rank.slots}
    verdicts = [_judge_one(result, slots.get((result.rank, result.slot))) for result in results]
    judged = {(verdict.rank, verdict.slot) for verdict in verdicts}
    verdicts += [
        SnapshotVerdict(rank, index, slot.step, slot.size_bytes, "corrupt", "found before")
        for (rank, index), slot in slots.items()
        if slot.state == "corrupt" and (rank, index) not in judged
    ]
    sound = bool(verdicts) and all(verdict.verdict != "corrupt" for verdict in verdicts)
    return Verification(after.run_id, after.node_id, sound, sorted(verdicts, key=lambda v: (v.rank, v.slot)))


def _judge_one(result: VerifyResult, now: SlotStatus | None) -> SnapshotVerdict:
    verdict = "sound"
    if result.problem:
        same = now is None or (now.state in ("sealed", "corrupt") and now.step == result.step)
        verdict = "corrupt" if same else "replaced"
    problem = result.problem if verdict == "corrupt" else ""
    return SnapshotVerdict(result.rank, result.slot, result.step, result.size_bytes, verdict, problem)


def _print(verification: Verification) -> None:
    console = open_console()
    if not verification.results:
        console.print(f"no snapshot of run {verification.run_id} is sealed yet: nothing to check")
        return
    table = make_table(">rank", ">slot", ">step", ">size", "verdict", "problem")
    for item in verification.results:
        style = "red" if item.verdict == "corrupt" else ""
        size = format_bytes(item.size_bytes)
        table.add_row(str(item.rank), str(item.slot), str(item.step), size, item.verdict, item.problem, style=style)
    console.print(table)
    corrupt = sum(item.verdict == "corrupt" for item in verification.results)
    if corrupt:
        console.print(f"{count(corrupt, 'snapshot')} corrupt: a restore takes the newest version that is sound")
    else:
        console.print(f"{count(len(verification.results), 'snapshot')} checked, none corrupt")
