"""What the keeper does outside its loop: seal, verify, allocate. Each job answers with one event."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

from keepstep.arena import checksum, memory_limits
from keepstep.arena.chunks import Chunk
from keepstep.arena.manifest import RankManifest
from keepstep.arena.records import COMMITTED
from keepstep.arena.slots import Arena, SealedSlot, plan_header, total_bytes
from keepstep.config import KeeperConfig
from keepstep.errors import Error, IntegrityError, KeeperError
from keepstep.identity import Identity
from keepstep.keeper.coordinator.messages import ReplicaAuditAnswer, ReplicaSetDigest
from keepstep.keeper.node.effects import CreateArena, FetchSnapshot, ReadReplicaDigests, SealSlot, VerifySlot
from keepstep.keeper.node.events import ArenaAdded, Event, ReplicaDigestsRead, SlotFound, SlotSealed, SlotVerified
from keepstep.keeper.transfer.chunk_store import open_book
from keepstep.keeper.workers.checksum_client import LEAST_BYTES, ChecksumClient
from keepstep.keeper.workers.checksum_worker import NICENESS
from keepstep.keeper.workers.replica_digests import answer, class_digests
from keepstep.layout import SnapshotSize

log = logging.getLogger("keepstep.keeper")

JOBS = 4
MOST_THREADS = 32
RETRY_PAUSES_S = (0.01, 0.1, 1.0)
VALUES_SLACK = 1 << 20


class WorkerPool:
    """A few threads for bytes. `answer` is called from them and must be thread-safe."""

    def __init__(
        self, identity: Identity, instance: bytes, config: KeeperConfig, answer: Callable[[Event], None]
    ) -> None:
        self._identity, self._instance, self._answer = identity, instance, answer
        threads = config.seal_threads or _threads()
        self._pool = ThreadPoolExecutor(max_workers=JOBS, thread_name_prefix="keepstep-work")
        self._hands = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="keepstep-hand", initializer=_be_nice)
        """read and checksum for all jobs together"""
        self._reading = ChecksumClient(threads, LEAST_BYTES)
        self._ending = threading.Event()
        self._allocating = threading.Lock()
        """one arena at a time: two that each fit may not fit together"""

    def seal(self, arena: Arena, effect: SealSlot) -> None:
        self._pool.submit(lambda: self._answer(self._seal(arena, effect)))

    def verify(self, arena: Arena, effect: VerifySlot) -> None:
        self._pool.submit(lambda: self._answer(self._verify(arena, effect)))

    def create(self, effect: CreateArena, done: Callable[[Arena | Error], None]) -> None:
        self._pool.submit(lambda: done(self._create(effect)))

    def read_shares(self, arenas: list[Arena], effect: ReadReplicaDigests) -> None:
        """What this node holds of a replica class, for the coordinator's comparison."""

        def read() -> ReplicaDigestsRead:
            found: list[ReplicaAuditAnswer] = []
            for arena in arenas:
                for slot in range(arena.num_slots):
                    sealed = arena.sealed(slot)
                    if sealed is not None and sealed.version == effect.audit.version:
                        said = answer(open_book(arena, slot), effect.audit)
                        found += [said] if said is not None else []
            return ReplicaDigestsRead(effect.audit, _together(found))

        self._pool.submit(lambda: self._answer(read()))

    def check(self, jobs: list[tuple[Arena, int]], done: Callable[[list[str]], None]) -> None:
        """Verify slots for `keepstep verify`: one problem text per job, empty when sound."""
        self._pool.submit(lambda: done([self._problem(arena, slot) for arena, slot in jobs]))

    def forget(self, arena_id: str) -> None:
        """Nothing may hold the memory of an arena that is given up. Not at once: the loop waits for nobody."""
        self._reading.drop(arena_id)
        self._pool.submit(self._reading.forget, arena_id)

    def tend(self) -> None:
        self._reading.tend()

    def close(self) -> None:
        self._ending.set()
        self._reading.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._hands.shutdown(wait=True, cancel_futures=True)

    def _seal(self, arena: Arena, effect: SealSlot) -> SlotSealed:
        started = time.monotonic()
        try:
            sealed = arena.sealed(effect.slot)
            if sealed is None or effect.version not in (None, sealed.version):
                version = effect.version
                if version is None:
                    found = arena.committed(effect.slot)
                    if found is None:
                        raise IntegrityError("half written: its trainer ended first")
                    version = found[1].version
                if effect.newer_than is not None and version <= effect.newer_than:
                    raise IntegrityError(f"{version} was sealed once and its seal is gone")
                wanted = version
                sealed = self._again(lambda: checksum.seal(arena, effect.slot, wanted, self._digests))
        except Exception as error:
            return SlotSealed(arena.arena_id, effect.slot, effect.version, problem=str(error) or repr(error))
        info, shares = sealed.trainer.info, self._shares(arena, effect.slot)
        took_s = time.monotonic() - started
        return SlotSealed(arena.arena_id, effect.slot, info.version, info, shares=shares, took_s=took_s)

    def _verify(self, arena: Arena, effect: VerifySlot) -> SlotVerified:
        return SlotVerified(arena.arena_id, effect.slot, effect.version, self._problem(arena, effect.slot))

    def _digests(self, arena: Arena, slot: int, chunks: list[Chunk]) -> bytes:
        found = self._reading.digests(arena, slot, chunks)
        if found is None:
            found = checksum.read_digests(arena, slot, chunks, cancelled=self._ending.is_set, over=self._hands.map)
            self._reading.warm(arena, slot, chunks)
        return found

    def _shares(self, arena: Arena, slot: int) -> tuple[ReplicaSetDigest, ...]:
        try:
            return class_digests(open_book(arena, slot), self._hands.map)
        except (OSError, Error):  # written again meanwhile: whoever asks for the version finds out
            return ()

    def _problem(self, arena: Arena, slot: int) -> str:
        try:
            self._again(lambda: checksum.verify(arena, slot, self._digests))
        except Exception as error:
            return str(error) or repr(error)
        return ""

    def _again(self, call: Callable[[], SealedSlot]) -> SealedSlot:
        """Try again when the machine fails: only bytes that fail their check may count against a version."""
        for pause_s in RETRY_PAUSES_S:
            try:
                return call()
            except (OSError, MemoryError):
                self._ending.wait(pause_s)
        return call()

    def make_for(self, effect: FetchSnapshot, manifest: RankManifest) -> tuple[Arena, Future[None]]:
        """An arena for a snapshot that comes from elsewhere, with room for the next ones of its rank.

        Its memory is reserved while the first slot is filled; the future ends when all of it is there.
        """
        need = manifest.need
        header = plan_header(
            SnapshotSize(need.layout_bytes, 2 * need.values_bytes + VALUES_SLACK, need.payload_bytes),
            slots=effect.slots, local_index=effect.local_index, generation=effect.generation,
            run_id=self._identity.run_id, node_id=self._identity.node_id, instance=self._instance,
        )  # fmt: skip
        self._allocating.acquire()  # until its memory is there: what the next one may have is measured then
        try:
            what = f"the snapshot of rank {effect.piece.rank} that this node takes over"
            memory_limits.check(total_bytes(header), what, room=memory_limits.measure(), memory_limit_bytes=0)
            arena = Arena.create(header, reserve=False)
        except BaseException:
            self._allocating.release()
            raise
        reserved: Future[None] = Future()
        threading.Thread(target=self._reserve, args=(arena, reserved), name="keepstep-reserve", daemon=True).start()
        return arena, reserved

    def _reserve(self, arena: Arena, reserved: Future[None]) -> None:
        try:
            arena.segment.reserve(cancelled=lambda: self._ending.is_set() or reserved.cancelled())
            with contextlib.suppress(InvalidStateError):
                reserved.set_result(None)
        except Error as error:
            with contextlib.suppress(InvalidStateError):
                reserved.set_exception(error)
        finally:
            self._allocating.release()

    def _create(self, effect: CreateArena) -> Arena | Error:
        wanted = effect.wanted
        header = plan_header(
            wanted.need, slots=wanted.slots, local_index=effect.local_index, generation=effect.generation,
            run_id=self._identity.run_id, node_id=self._identity.node_id, instance=self._instance,
        )  # fmt: skip
        try:
            what = f"the arena of local rank {effect.local_index} ({wanted.slots} slots)"
            limit = wanted.memory_limit_bytes
            with self._allocating:
                memory_limits.check(total_bytes(header), what, room=memory_limits.measure(), memory_limit_bytes=limit)
                return Arena.create(header)
        except Error as error:
            return error
        except Exception as error:
            return KeeperError(f"the arena could not be made: {error!r}")


def _threads() -> int:
    """All cores that this process may use, at low priority: a large state at every step needs most of them."""
    return max(2, min(MOST_THREADS, len(os.sched_getaffinity(0))))


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)  # of this thread only


def _together(found: list[ReplicaAuditAnswer]) -> ReplicaAuditAnswer:
    """Of all slots of this node; they belong to one class, so they have one shape."""
    if not found:
        return ReplicaAuditAnswer()
    units = tuple(unit for one in found for unit in one.units)
    return ReplicaAuditAnswer(found[0].n, found[0].m, units, found[0].paths)


def describe(arena: Arena) -> ArenaAdded:
    """What the headers of an arena say, as the event that brings it into the core."""
    slots = []
    for index in range(arena.num_slots):
        sealed, found = arena.sealed(index), arena.trainer_header(index)
        trainer = found[1] if found else None
        committed = trainer is not None and trainer.state == COMMITTED
        state = "sealed" if sealed else "committed" if committed else "free"
        if trainer is None or not committed:
            slots.append(SlotFound(index, state))
            continue
        age_s = max(0.0, time.time() - sealed.keeper.sealed_at) if sealed else 0.0
        slots.append(SlotFound(index, state, trainer.info, age_s))
    header = arena.header
    capacity = SnapshotSize(header.layout_capacity, header.values_capacity, header.payload_capacity)
    return ArenaAdded(
        arena.arena_id, header.local_index, header.generation, arena.segment.size_bytes, capacity, tuple(slots),
        arena.ledger(), arena.grant(), arena.progress(),
    )  # fmt: skip
