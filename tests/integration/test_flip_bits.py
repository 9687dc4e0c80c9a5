"""A flipped bit anywhere in an arena: the version before, or a clear error. Never a wrong tensor, never None.

Both slots hold a complete version. A bit is flipped in one of them or in both, in every region in
turn; then the trainer comes back, either to the keeper that sealed them (it remembers their state) or
to a new one that knows only what it reads.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import keepstep
from keepstep.arena import records as h
from keepstep.arena.records import PAGE
from keepstep.arena.slots import DIGEST_BYTES, GRANT_PAGE, LEDGER_PAGE, PROGRESS_PAGE, Arena
from keepstep.config import ArenaConfig, Config
from keepstep.control.messages import Done, Release
from keepstep.launcher.keeper_supervisor import KeeperSupervisor
from keepstep.testing.run import LocalRun, wait_until

pytestmark = pytest.mark.computing

SIZES = (3, 1000, 70_001, 1_100_003)
"""elements: inlined with others, small, and more than one checksum chunk of 4 MiB"""
IN_SLOT = ("payload", "layout", "values", "table", "trainer header", "keeper header", "anywhere")
OUTSIDE = ("grant", "ledger", "progress")


class Training:
    """Every element is the step, so that a wrong byte anywhere is seen."""

    def __init__(self) -> None:
        self.tensors = [torch.full((size,), -1.0) for size in SIZES]
        self.values = {"step": -1, "text": "step -1"}
        self.state = {"plain": {"tensors": self.tensors, "values": self.values}}

    def become(self, step: int) -> None:
        for tensor in self.tensors:
            tensor.fill_(float(step))
        self.values.update(step=step, text=f"step {step}")

    def is_at(self, step: int) -> bool:
        whole = all(torch.equal(tensor, torch.full_like(tensor, float(step))) for tensor in self.tensors)
        return whole and self.values == {"step": step, "text": f"step {step}"}


class Case:
    """One run in this process: lives one after another, and a launcher's hand that outlives them."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.step = 0
        self.holder = KeeperSupervisor(run.identity, Config())
        self.holder.status(timeout_s=30.0, patient=True)

    @contextmanager
    def life(self, *, finished: bool = False) -> Iterator[tuple[Training, keepstep.Snapshotter]]:
        training = Training()
        snapshots = keepstep.Snapshotter(training.state, self.run.config(rng=False, arena=ArenaConfig(slots=2)))
        try:
            yield training, snapshots
        finally:
            snapshots.close(finished=finished)

    def fill_both_slots(self, training: Training, snapshots: keepstep.Snapshotter) -> None:
        """Two complete versions, one in each slot: `step - 1` and `step`."""
        for _ in range(2):
            self.step += 1
            training.become(self.step)
            taken = snapshots.take(self.step)
            assert taken.wait(timeout_s=20) == keepstep.Survives.PROCESS, taken

    def replace_keeper(self) -> None:
        """SIGKILL while no trainer is up; the launcher gives the memory to a new one."""
        before = self.run.kill_keeper()
        self.holder.status(timeout_s=30.0, patient=True)
        wait_until(lambda: self.run.keeper_pid() not in (0, before), what="a new keeper")
        wait_until(lambda: self.run.status().memory_bytes > 0, what="the memory to be adopted")

    def restore(self) -> tuple[Training, keepstep.Restored | None]:
        with self.life() as (training, snapshots):
            return training, snapshots.restore()


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    with LocalRun() as run:
        made = Case(run)
        try:
            yield made
        finally:
            made.holder.close()


def flip(arena: Arena, offset: int, bit: int) -> None:
    """Through the descriptor, as anybody's stray write would come."""
    byte = os.pread(arena.segment.fd, 1, offset)[0]
    os.pwrite(arena.segment.fd, bytes([byte ^ 1 << bit]), offset)


def slot_of(arena: Arena, step: int) -> int:
    (found,) = [i for i in range(arena.num_slots) if (s := arena.sealed(i)) and s.version.step == step]
    return found


def place(arena: Arena, slot: int, region: str, rng: random.Random, copy: int = 0) -> int:
    """A byte of the region: one that is used, except `anywhere`. Headers stand twice: `copy` 0 is the newer one."""
    start = arena.slot_offset(slot)
    if region == "anywhere":
        return start + rng.randrange(arena.header.slot_stride)
    if region.endswith("header"):
        kind, start = (h.TrainerHeader, start) if region == "trainer header" else (h.KeeperHeader, start + PAGE)
        sequences = [
            found[0] if (found := h.decode_copy(kind, arena.segment.read(start + at, h.RECORD_BYTES))) else -1
            for at in (0, h.RECORD_BYTES)
        ]
        newer = sequences.index(max(sequences))
        return start + (newer ^ copy) * h.RECORD_BYTES + rng.randrange(h.RECORD_BYTES)
    sealed = arena.sealed(slot)
    assert sealed is not None
    layout, values, payload = arena.used_spans(slot, sealed.trainer)
    if region == "table":
        return arena.table_span(slot).offset + rng.randrange(sealed.keeper.num_chunks * DIGEST_BYTES)
    span = {"layout": layout, "values": values, "payload": payload}[region]
    return span.offset + rng.randrange(span.size_bytes)


@pytest.mark.parametrize("replaced", [False, True], ids=["same keeper", "new keeper"])
@pytest.mark.parametrize("region", IN_SLOT)
def test_a_flipped_bit_in_the_newest_version_gives_the_one_before(case: Case, region: str, replaced: bool) -> None:
    rng = random.Random(f"{region} {replaced}")
    seen: Counter[str] = Counter()
    for copy in range(6 if not replaced else 2 if region.endswith("header") else 1):
        with case.life() as (training, snapshots):
            snapshots.restore()
            case.fill_both_slots(training, snapshots)
        with case.run.arenas() as (arena,):
            slot = slot_of(arena, case.step)
            offset, bit = place(arena, slot, region, rng, copy % 2), rng.randrange(8)
            flip(arena, offset, bit)
            trusted = arena.sealed(slot) is not None
        if replaced:
            case.replace_keeper()
        training, restored = case.restore()
        assert restored is not None, f"bit {bit} of byte {offset} ({region}) made restore() return None"
        assert training.is_at(restored.step), f"wrong bytes after a flip of bit {bit} in byte {offset} ({region})"
        assert restored.step in (case.step, case.step - 1)
        if region in ("payload", "layout", "values", "table") or not trusted:
            assert restored.step == case.step - 1, f"a flip of bit {bit} in byte {offset} ({region}) was not seen"
        if restored.step < case.step:
            assert any(f"step {case.step} " in reason for reason in restored.plan), restored.plan
        seen["the one before" if restored.step < case.step else "not in use"] += 1
    print(f"{region}, {'new' if replaced else 'same'} keeper: {dict(seen)}")
    assert seen["the one before"] > 0 or region == "anywhere"


@pytest.mark.parametrize("replaced", [False, True], ids=["same keeper", "new keeper"])
def test_both_versions_damaged_is_an_error_that_names_them_and_never_none(case: Case, replaced: bool) -> None:
    rng = random.Random(replaced)
    for _ in range(1 if replaced else 2):
        with case.life() as (training, snapshots):
            snapshots.restore()
            case.fill_both_slots(training, snapshots)
        chosen = rng.choice(["payload", "table", "layout", "values"]), rng.choice(["payload", "table"])
        with case.run.arenas() as (arena,):
            for step, region in zip((case.step, case.step - 1), chosen, strict=True):
                flip(arena, place(arena, slot_of(arena, step), region, rng), rng.randrange(8))
        if replaced:
            case.replace_keeper()
        for _ in range(2):  # asking again does not make it go away
            with case.life() as (training, snapshots):
                with pytest.raises((keepstep.IntegrityError, keepstep.RecoveryError)) as caught:
                    snapshots.restore()
                assert training.is_at(-1), "a damaged version was written into the live tensors"
        assert f"step {case.step} " in str(caught.value), caught.value
        assert caught.value.hint
        _start_over(case)


def _start_over(case: Case) -> None:
    """What the hint says: give it up. The next life is a first start."""
    pid = case.run.keeper_pid()
    case.run.ask(Release(force=True), Done)
    wait_until(lambda: case.run.keeper_pid() != pid, what="the end of the released keeper")
    case.holder.status(timeout_s=30.0, patient=True)


def test_a_deleted_checksum_is_not_trusted(case: Case) -> None:
    """Zeroed, the table and both keeper headers must not read as a version without checksums."""
    with case.life() as (training, snapshots):
        snapshots.restore()
        case.fill_both_slots(training, snapshots)
    with case.run.arenas() as (arena,):
        slot = slot_of(arena, case.step)
        arena.segment.write(arena.table_span(slot).offset, bytes(arena.table_span(slot).size_bytes))
    training, restored = case.restore()
    assert restored is not None
    assert restored.step == case.step - 1
    assert training.is_at(case.step - 1)


def test_a_seal_that_vanished_is_not_made_again_over_damaged_bytes(case: Case) -> None:
    """Both keeper headers zeroed and a bit flipped: sealing what is there now would bless it."""
    with case.life() as (training, snapshots):
        snapshots.restore()
        case.fill_both_slots(training, snapshots)
    with case.run.arenas() as (arena,):
        slot = slot_of(arena, case.step)
        flip(arena, place(arena, slot, "payload", random.Random(1)), 3)
        arena.segment.write(arena.slot_offset(slot) + PAGE, bytes(2 * h.RECORD_BYTES))
    case.replace_keeper()
    training, restored = case.restore()
    assert restored is not None
    assert restored.step == case.step - 1
    assert training.is_at(case.step - 1)


@pytest.mark.parametrize("replaced", [False, True], ids=["same keeper", "new keeper"])
@pytest.mark.parametrize("page", OUTSIDE)
def test_a_flip_in_the_shared_pages_costs_no_version_and_stops_no_snapshot(
    case: Case, page: str, replaced: bool
) -> None:
    rng = random.Random(f"{page} {replaced}")
    start = {"grant": GRANT_PAGE, "ledger": LEDGER_PAGE, "progress": PROGRESS_PAGE}[page]
    for copy in range(2):
        with case.life() as (training, snapshots):
            snapshots.restore()
            case.fill_both_slots(training, snapshots)
            with case.run.arenas() as (arena,):
                flip(arena, start + copy * h.RECORD_BYTES + rng.randrange(h.RECORD_BYTES), rng.randrange(8))
            if not replaced:  # the trainer goes on, and is granted again
                case.step += 1
                training.become(case.step)
                _take_until_complete(case, training, snapshots)
        if replaced:
            case.replace_keeper()
        training, restored = case.restore()
        assert restored is not None
        assert restored.step == case.step
        assert training.is_at(case.step)


def test_a_damaged_layout_in_a_slot_that_is_written_next_does_not_stop_the_snapshots(case: Case) -> None:
    """The trainer writes a layout once per slot: when the keeper finds it damaged, it is written again."""
    with case.life() as (training, snapshots):
        snapshots.restore()
        case.fill_both_slots(training, snapshots)
        with case.run.arenas() as (arena,):
            for slot in range(arena.num_slots):
                if slot != slot_of(arena, case.step):
                    flip(arena, arena.layout_span(slot).offset + 5, 2)
        case.step += 1
        _take_until_complete(case, training, snapshots)
    training, restored = case.restore()
    assert restored is not None
    assert training.is_at(restored.step)
    assert restored.step == case.step


def test_a_flip_in_the_arena_header_is_repaired_by_the_keeper_that_made_it(case: Case) -> None:
    with case.life() as (training, snapshots):
        snapshots.restore()
        case.fill_both_slots(training, snapshots)
    with case.run.arenas() as (arena,):
        flip(arena, 17, 1)
        wait_until(lambda: arena.segment.read(0, 1024) == arena.header.encode(), what="the repair")
    training, restored = case.restore()
    assert restored is not None
    assert restored.step == case.step
    assert training.is_at(case.step)


def test_an_arena_whose_header_is_damaged_is_a_clear_error_for_a_new_keeper_and_never_none(case: Case) -> None:
    with case.life() as (training, snapshots):
        snapshots.restore()
        case.fill_both_slots(training, snapshots)
    with case.run.arenas() as (arena,):
        os.kill(case.run.keeper_pid(), signal.SIGSTOP)  # it would repair it
        flip(arena, 17, 1)
    before = case.run.kill_keeper()
    case.holder.status(timeout_s=30.0, patient=True)
    wait_until(lambda: case.run.keeper_pid() not in (0, before), what="a new keeper")
    with case.life() as (training, snapshots), pytest.raises(keepstep.IntegrityError, match="arena header"):
        snapshots.restore()
    assert training.is_at(-1)
    _start_over(case)


def test_a_trainer_whose_arena_is_refused_by_a_new_keeper_gets_another_one(case: Case) -> None:
    with case.life() as (training, snapshots):
        snapshots.restore()
        case.fill_both_slots(training, snapshots)
        with case.run.arenas() as (arena,):
            os.kill(case.run.keeper_pid(), signal.SIGSTOP)  # it would repair it
            flip(arena, 17, 1)
        case.run.kill_keeper()
        case.step += 1
        _take_until_complete(case, training, snapshots)
    training, restored = case.restore()
    assert restored is not None
    assert restored.step == case.step
    assert training.is_at(case.step)


def _take_until_complete(case: Case, training: Training, snapshots: keepstep.Snapshotter) -> None:
    for _ in range(100):
        training.become(case.step)
        taken = snapshots.take(case.step)
        if taken.wait(timeout_s=5) == keepstep.Survives.PROCESS:
            return
        time.sleep(0.05)
        case.step += 1
    raise AssertionError(f"no version is complete any more: {taken}")
