"""Chunks that are checksummed before the commit: taken for that one writing of the slot, and for no other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from keepstep.arena import checksum
from keepstep.arena import records as h
from keepstep.arena.chunks import Chunk
from keepstep.arena.records import TrainerHeader
from keepstep.arena.slots import CHUNK_BYTES, Arena, plan_header
from keepstep.errors import IntegrityError
from keepstep.keeper.early import AT_ONCE, MOST_WAITING, Early
from keepstep.layout import Layout, SnapshotSize, digest
from keepstep.types import Incarnation, Version

PAYLOAD = 5 * CHUNK_BYTES + 1000
SHARED = 2 * CHUNK_BYTES + 64
LAYOUT = Layout((), ()).encode()
ALL = ((0, PAYLOAD),)


class Trainer:
    """What a trainer writes into its slot, and when."""

    def __init__(self) -> None:
        need = SnapshotSize(len(LAYOUT), 100, PAYLOAD)
        self.arena = Arena.create(
            plan_header(need, slots=2, local_index=0, run_id="r", node_id="n", instance=bytes(16))
        )
        self.read: list[int] = []
        """chunks by offset in the payload, as they were read"""

    def begin(self, step: int, slot: int = 0) -> Version:
        version = Version(Incarnation(1, 7), step)
        self.header = TrainerHeader(
            h.WRITING, 0, 1, 0, 1, 0, version, len(LAYOUT), 10, PAYLOAD, digest(LAYOUT), time.time(), SHARED
        )
        self.sequence = self.arena.write_trainer_header(slot, self.header)
        self.arena.segment.write(self.arena.layout_span(slot).offset, LAYOUT)
        self.arena.segment.write(self.arena.payload_span(slot).offset, os.urandom(PAYLOAD))
        return version

    def commit(self, slot: int = 0) -> None:
        self.arena.write_trainer_header(slot, replace(self.header, state=h.COMMITTED))

    def flip(self, at: int, slot: int = 0) -> None:
        where = self.arena.payload_span(slot).offset + at
        (byte,) = self.arena.segment.read(where, 1)
        self.arena.segment.write(where, bytes([byte ^ 1]))

    def digests(self, arena: Arena, slot: int, chunks: list[Chunk]) -> bytes:
        self.read += [chunk.span.offset - arena.payload_span(slot).offset for chunk in chunks]
        return checksum.read_digests(arena, slot, chunks)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.arena.close()


@pytest.fixture
def early(trainer: Trainer) -> Iterator[Early]:
    made = Early(trainer.digests)
    yield made
    made.close()


def until_read(early: Early) -> None:
    with early._changed:
        assert early._changed.wait_for(lambda: not early._words and early._reading is None, 10)


def seal(trainer: Trainer, early: Early, version: Version) -> list[int]:
    """Returns what was read for it, by offset in the payload."""
    before = len(trainer.read)
    checksum.seal(trainer.arena, 0, version, trainer.digests, lambda *at: early.known(*at).found)
    return [at for at in trainer.read[before:] if at >= 0]


def test_what_has_landed_is_not_read_again(trainer: Trainer, early: Early) -> None:
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ((0, CHUNK_BYTES), (SHARED, SHARED + 2 * CHUNK_BYTES)))
    until_read(early)
    trainer.commit()
    left = [CHUNK_BYTES, 2 * CHUNK_BYTES, SHARED + 2 * CHUNK_BYTES, SHARED + 3 * CHUNK_BYTES]
    assert seal(trainer, early, version)[-len(left) :] == left
    assert len(trainer.read) == len(set(trainer.read))
    checksum.verify(trainer.arena, 0)


def test_a_word_that_comes_after_the_commit_is_good_too(trainer: Trainer, early: Early) -> None:
    version = trainer.begin(1)
    trainer.commit()
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    until_read(early)
    checksum.seal(trainer.arena, 0, version, trainer.digests, lambda *at: early.known(*at).found)
    assert len([at for at in trainer.read if at >= 0]) == len({at for at in trainer.read if at >= 0})
    checksum.verify(trainer.arena, 0)


def test_the_same_version_written_again_is_read_again(trainer: Trainer, early: Early) -> None:
    """A snapshot that was void, and the same step in the same slot once more."""
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    assert trainer.begin(1) == version
    trainer.commit()
    seal(trainer, early, version)
    checksum.verify(trainer.arena, 0)


@pytest.mark.parametrize("ahead", [-2, -1, 1, 2])
def test_words_about_another_writing_are_not_taken(trainer: Trainer, early: Early, ahead: int) -> None:
    version = trainer.begin(2)
    early.landed(trainer.arena, 0, trainer.sequence + ahead, ALL)
    until_read(early)
    trainer.commit()
    assert len(seal(trainer, early, version)) >= 6
    checksum.verify(trainer.arena, 0)


def test_a_trainer_that_speaks_too_soon_is_found_out(trainer: Trainer, early: Early) -> None:
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    until_read(early)
    trainer.flip(SHARED + 5)
    trainer.commit()
    seal(trainer, early, version)
    with pytest.raises(IntegrityError, match="chunk 0 of the shared payload"):
        checksum.verify(trainer.arena, 0)


def test_a_sealed_slot_is_verified_from_its_bytes_and_not_from_what_was_known(trainer: Trainer, early: Early) -> None:
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    trainer.commit()
    seal(trainer, early, version)
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    until_read(early)
    trainer.flip(5)
    with pytest.raises(IntegrityError, match="chunk 0 of the payload"):
        checksum.seal(trainer.arena, 0, version, trainer.digests, lambda *at: early.known(*at).found)


@pytest.mark.parametrize(
    "ranges",
    [((-5, -1),), ((PAYLOAD, 2 * PAYLOAD),), ((0, 2**70),), ((5, 0),), ALL * 1000, ((1, CHUNK_BYTES),), ()],
    ids=["negative", "beyond", "huge", "backwards", "repeated", "unaligned", "none"],
)
def test_ranges_that_make_no_sense_do_no_harm(
    trainer: Trainer, early: Early, ranges: tuple[tuple[int, int], ...]
) -> None:
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ranges)
    until_read(early)
    trainer.commit()
    seal(trainer, early, version)
    assert len(trainer.read) <= 9
    checksum.verify(trainer.arena, 0)


def raising(error: Exception) -> Callable[[Arena, int, list[Chunk]], bytes | None]:
    def read(arena: Arena, slot: int, chunks: list[Chunk]) -> bytes | None:
        raise error

    return read


@pytest.mark.parametrize("read", [lambda *_: None, raising(OSError("gone")), raising(MemoryError())])
def test_when_it_cannot_be_read_early_the_seal_reads_it(
    trainer: Trainer, read: Callable[[Arena, int, list[Chunk]], bytes | None]
) -> None:
    early = Early(read)
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    trainer.commit()
    assert len(seal(trainer, early, version)) >= 6
    checksum.verify(trainer.arena, 0)
    early.close()


def test_a_flood_of_words_waits_nowhere(trainer: Trainer) -> None:
    def slowly(arena: Arena, slot: int, chunks: list[Chunk]) -> bytes | None:
        time.sleep(0.05)
        return None

    early = Early(slowly)
    trainer.begin(1)
    for _ in range(2 * MOST_WAITING):
        early.landed(trainer.arena, 0, trainer.sequence, ALL)
    assert len(early._words) <= MOST_WAITING
    early.close()


def test_a_seal_does_not_wait_for_what_has_landed_of_others(trainer: Trainer) -> None:
    """The next snapshot lands while this one is sealed; reading that takes as long as copying it."""
    let, began = threading.Event(), threading.Event()

    def slowly(arena: Arena, slot: int, chunks: list[Chunk]) -> bytes | None:
        began.set()
        let.wait(10)
        return trainer.digests(arena, slot, chunks)

    early = Early(slowly)
    trainer.begin(2, slot=1)
    early.landed(trainer.arena, 1, trainer.sequence, ALL)
    assert began.wait(10)
    version = trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ALL)
    trainer.commit()
    with early.standing_back():
        assert len(seal(trainer, early, version)) >= 6
        let.set()
    checksum.verify(trainer.arena, 0)
    early.close()


def counting(trainer: Trainer) -> tuple[Early, list[tuple[int, int]]]:
    """And what it is asked to read: (slot, chunks) of each call."""
    calls: list[tuple[int, int]] = []

    def read(arena: Arena, slot: int, chunks: list[Chunk]) -> bytes | None:
        calls.append((slot, len(chunks)))
        return trainer.digests(arena, slot, chunks)

    return Early(read), calls


def test_words_that_have_piled_up_are_heeded_together(trainer: Trainer) -> None:
    early, calls = counting(trainer)
    trainer.begin(2, slot=1)
    others, version = trainer.sequence, trainer.begin(1)
    with early.standing_back():
        for at in (0, 1):
            early.landed(trainer.arena, 0, trainer.sequence, ((at * CHUNK_BYTES, (at + 1) * CHUNK_BYTES),))
        early.landed(trainer.arena, 1, others, ((0, CHUNK_BYTES),))
        early.landed(trainer.arena, 0, trainer.sequence, ((SHARED, SHARED + CHUNK_BYTES),))
    until_read(early)
    assert calls == [(0, 2), (1, 1), (0, 1)], "what lies behind the word of another slot is not brought forward"
    trainer.commit()
    assert len([at for at in seal(trainer, early, version) if at >= 0]) == 4
    checksum.verify(trainer.arena, 0)
    with early.standing_back():
        for _ in range(AT_ONCE + 1):
            early.landed(trainer.arena, 1, others, ((0, CHUNK_BYTES),))
    until_read(early)
    assert calls[3:] == [(1, AT_ONCE), (1, 1)], "a seal waits for a call to end"
    early.close()


def test_words_are_heeded_one_by_one_while_another_slot_is_about_to_be_sealed(trainer: Trainer) -> None:
    early, calls = counting(trainer)
    trainer.begin(2, slot=1)
    later, version = trainer.sequence, trainer.begin(1)
    early.landed(trainer.arena, 0, trainer.sequence, ((0, CHUNK_BYTES),))
    until_read(early)
    with early.standing_back():
        for _ in range(2):
            early.landed(trainer.arena, 1, later, ((0, CHUNK_BYTES),))
    until_read(early)
    assert calls == [(0, 1), (1, 1), (1, 1)]
    trainer.commit()
    seal(trainer, early, version)
    with early.standing_back():
        for _ in range(2):
            early.landed(trainer.arena, 1, later, ((0, CHUNK_BYTES),))
    until_read(early)
    assert calls[3:] == [(1, 2)], "there is no other any more"
    early.landed(trainer.arena, 0, trainer.sequence, ((0, CHUNK_BYTES),))
    until_read(early)
    with early.standing_back():
        for _ in range(2):
            early.landed(trainer.arena, 1, later, ((0, CHUNK_BYTES),))
    until_read(early)
    assert calls[4:] == [(1, 2)], "a word that comes behind the seal is not heeded, and nobody waits for another seal"
    early.close()


def test_it_stands_back_while_a_slot_is_sealed(trainer: Trainer, early: Early) -> None:
    trainer.begin(1)
    with early.standing_back():
        early.landed(trainer.arena, 0, trainer.sequence, ALL)
        time.sleep(0.1)
        assert not trainer.read
    until_read(early)
    assert trainer.read
