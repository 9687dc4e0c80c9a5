"""Seal and verify slots in threads, off the keeper's loop.

A seal calls the parts in order (`arena/checksum`): list the committed chunks, read their digests, write table and
header. Digests of a large slot come from the checksum worker; of a small one, or when the worker fails, they are read
through the descriptor by the hash threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor

import msgspec

from keepstep.arena import checksum
from keepstep.arena.checksum import Chunk
from keepstep.arena.slots import Arena, SealedSlot
from keepstep.config import KeeperConfig
from keepstep.control.messages import VerifyResult
from keepstep.errors import Error, IntegrityError, KeeperError
from keepstep.keeper.node.effects import CreateArena, ReadReplicaDigests, SealSlot, VerifySlot
from keepstep.keeper.node.events import Conn, ReplicaDigestsRead, SlotSealed, SlotVerified
from keepstep.keeper.workers.allocation import ArenaAllocator
from keepstep.keeper.workers.checksum_client import ChecksumClient
from keepstep.keeper.workers.checksum_worker import NICENESS
from keepstep.keeper.workers.replica_digests import answer, set_digests
from keepstep.keeper.workers.results import ArenaCreated, Results, SlotsChecked
from keepstep.keeper.workers.sealed_snapshot import open_sealed
from keepstep.parity.divergence import ReplicaAuditAnswer, ReplicaSetDigest
from keepstep.types import Version

JOBS = 4
MAX_HASH_THREADS = 32
CHUNKS_PER_RUN = 16  # that one hash thread reads in one go
LEAST_BYTES = 256 << 20  # of a slot that is worth the worker process: it hashes in a quarter of the CPU time
RETRY_PAUSES_S = (0.01, 0.1, 1.0)
SlotToCheck = tuple[Arena, VerifyResult, Version]


class Sealer:
    """Seals and verifies slots on the caller's thread; digests are read by `threads`, of large slots by the worker."""

    def __init__(self, threads: Executor, worker: ChecksumClient, *, worker_min_bytes: int) -> None:
        self._threads, self._worker, self._worker_min_bytes = threads, worker, worker_min_bytes
        self._stopped = threading.Event()

    def seal(self, arena: Arena, slot: int, version: Version) -> SealedSlot:
        """Seal what the trainer committed. Raises when the slot does not hold it, or is written meanwhile.

        A slot that is sealed already is verified instead: new checksums would cover a bit that flipped since.
        """
        committed = checksum.committed_chunks(arena, slot, version)
        if arena.sealed(slot) is not None:
            return self.verify(arena, slot)
        return checksum.write_seal(arena, committed, self._digests(arena, committed.chunks))

    def verify(self, arena: Arena, slot: int) -> SealedSlot:
        """Check a sealed slot byte for byte. Raises IntegrityError that names the region that is wrong."""
        expected = checksum.sealed_chunks(arena, slot)
        return checksum.check_digests(arena, expected, self._digests(arena, expected.chunks))

    def stop(self) -> None:
        """Raise KeeperError from seals and verifications in progress."""
        self._stopped.set()

    def _digests(self, arena: Arena, chunks: list[Chunk]) -> bytes:
        size_bytes = sum(chunk.span.size_bytes for chunk in chunks)
        if size_bytes >= self._worker_min_bytes:
            digests = self._worker.digests(arena, chunks)
            if digests is not None:
                return digests
        return self._read_digests(arena, chunks)

    def _read_digests(self, arena: Arena, chunks: list[Chunk]) -> bytes:
        buffers: list[memoryview] = []  # as many as threads work at once, until all is read

        def read_run(start: int) -> bytes:
            if self._stopped.is_set():
                # Not an IntegrityError: only bytes that fail their check may count against a version.
                raise KeeperError("stopped: the keeper is ending")
            buffer = buffers.pop() if buffers else memoryview(bytearray(checksum.WINDOW_BYTES))
            digests = checksum.read_digests(arena, chunks[start : start + CHUNKS_PER_RUN], buffer)
            buffers.append(buffer)
            return digests

        return b"".join(self._threads.map(read_run, range(0, len(chunks), CHUNKS_PER_RUN)))


class WorkerPool:
    """A few threads for work on the bytes of this node; each job hands one result to the keeper's loop."""

    def __init__(self, allocator: ArenaAllocator, config: KeeperConfig, results: Results) -> None:
        self._allocator, self._results = allocator, results
        num_threads = config.seal_threads or _num_hash_threads()
        self._jobs = ThreadPoolExecutor(max_workers=JOBS, thread_name_prefix="keepstep-job")
        # They read and hash for all jobs together.
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="keepstep-hash", initializer=_lower_priority)
        self._worker = ChecksumClient(num_threads)
        self._sealer = Sealer(self._threads, self._worker, worker_min_bytes=LEAST_BYTES)
        self._stopped = threading.Event()

    def seal(self, arena: Arena, effect: SealSlot) -> None:
        self._jobs.submit(lambda: self._results.put(self._seal(arena, effect)))

    def verify(self, arena: Arena, effect: VerifySlot) -> None:
        self._jobs.submit(lambda: self._results.put(self._verify(arena, effect)))

    def create(self, effect: CreateArena) -> None:
        self._jobs.submit(lambda: self._results.put(ArenaCreated(effect, self._allocator.create(effect))))

    def read_replica_digests(self, arenas: list[Arena], effect: ReadReplicaDigests) -> None:
        """Digests of a replica set on this node, for the coordinator's comparison."""
        self._jobs.submit(lambda: self._results.put(_replica_digests(arenas, effect)))

    def check(self, conn: Conn, ticket: int, slots: list[SlotToCheck]) -> None:
        """Verify slots for `keepstep verify`."""
        self._jobs.submit(lambda: self._results.put(self._check(conn, ticket, slots)))

    def forget(self, arena_id: str) -> None:
        """Have the worker unmap an arena that is closed. Returns at once."""
        self._jobs.submit(self._worker.forget, arena_id)

    def close(self) -> None:
        self._stopped.set()
        self._sealer.stop()
        self._worker.close()
        self._jobs.shutdown(wait=True, cancel_futures=True)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _seal(self, arena: Arena, effect: SealSlot) -> SlotSealed:
        started = time.monotonic()
        try:
            sealed = arena.sealed(effect.slot)
            if sealed is None or effect.version not in (None, sealed.version):
                version = _version_to_seal(arena, effect)
                sealed = self._seal_or_verify(arena, effect.slot, version)
        except Exception as error:
            return SlotSealed(arena.arena_id, effect.slot, effect.version, problem=str(error) or repr(error))
        info, shares = sealed.trainer.info, self._set_digests(arena, effect.slot)
        took_s = time.monotonic() - started
        return SlotSealed(arena.arena_id, effect.slot, info.version, info, shares=shares, took_s=took_s)

    def _verify(self, arena: Arena, effect: VerifySlot) -> SlotVerified:
        return SlotVerified(arena.arena_id, effect.slot, effect.version, self._problem(arena, effect.slot))

    def _check(self, conn: Conn, ticket: int, slots: list[SlotToCheck]) -> SlotsChecked:
        results, damaged = [], []
        for arena, result, version in slots:
            problem = self._problem(arena, result.slot)
            results.append(msgspec.structs.replace(result, problem=problem))
            if problem:
                damaged.append(SlotVerified(arena.arena_id, result.slot, version, problem))
        return SlotsChecked(conn, ticket, results, damaged)

    def _problem(self, arena: Arena, slot: int) -> str:
        try:
            self._seal_or_verify(arena, slot)
        except Exception as error:
            return str(error) or repr(error)
        return ""

    def _set_digests(self, arena: Arena, slot: int) -> tuple[ReplicaSetDigest, ...]:
        try:
            return set_digests(open_sealed(arena, slot), self._threads.map)
        except (OSError, Error):  # The slot was written again: who asks for the version is refused.
            return ()

    def _seal_or_verify(self, arena: Arena, slot: int, version: Version | None = None) -> SealedSlot:
        """Seal this version, or verify the sealed slot when none is given.

        Tries again when the machine fails: only bytes that fail their check may count against a version.
        """
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                if version is None:
                    return self._sealer.verify(arena, slot)
                return self._sealer.seal(arena, slot, version)
            except (OSError, MemoryError):
                if pause_s is None:
                    raise
                self._stopped.wait(pause_s)
        raise AssertionError("the loop returns or raises")


def _version_to_seal(arena: Arena, effect: SealSlot) -> Version:
    version = effect.version
    if version is None:
        committed = arena.committed(effect.slot)
        if committed is None:
            raise IntegrityError("half written: its trainer ended first")
        version = committed[1].version
    if effect.newer_than is not None and version <= effect.newer_than:
        raise IntegrityError(f"{version} was sealed once and its seal is gone")
    return version


def _replica_digests(arenas: list[Arena], effect: ReadReplicaDigests) -> ReplicaDigestsRead:
    answers: list[ReplicaAuditAnswer] = []
    for arena in arenas:
        for slot in range(arena.num_slots):
            sealed = arena.sealed(slot)
            if sealed is not None and sealed.version == effect.audit.version:
                of_slot = answer(open_sealed(arena, slot), effect.audit)
                answers += [of_slot] if of_slot is not None else []
    return ReplicaDigestsRead(effect.audit, _merge(answers))


def _merge(answers: list[ReplicaAuditAnswer]) -> ReplicaAuditAnswer:
    """One answer for all slots of this node; they hold the same replica set, so n, m and paths are equal."""
    if not answers:
        return ReplicaAuditAnswer()
    first = answers[0]
    return ReplicaAuditAnswer(first.n, first.m, tuple(unit for one in answers for unit in one.units), first.paths)


def _num_hash_threads() -> int:
    """All cores that this process may use, at low priority: a large state at every step needs most of them."""
    return max(2, min(MAX_HASH_THREADS, len(os.sched_getaffinity(0))))


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)  # of this thread only
