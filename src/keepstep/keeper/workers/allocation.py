"""Arenas of this node: created for a request or for a fetched snapshot, described for the core."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace

from keepstep.arena.memfd import Memfd
from keepstep.arena.records import COMMITTED, ArenaHeader
from keepstep.arena.slots import FEW_SLOTS, Arena, plan_header, total_bytes
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.keeper.node.effects import CreateArena, FetchSnapshot
from keepstep.keeper.node.events import ArenaAdded, SlotFound
from keepstep.keeper.workers import memory_limits
from keepstep.keeper.workers.manifest import RankManifest
from keepstep.keeper.workers.memory_limits import MemoryLimits, SlotChoice
from keepstep.layout import SnapshotSize

VALUES_SLACK = 1 << 20


class ArenaAllocator:
    """Creates arenas within the memory limits. For any thread."""

    def __init__(self, identity: Identity, instance: bytes) -> None:
        self._identity, self._instance = identity, instance
        self._closed = threading.Event()
        # One arena at a time: two that each fit may not fit together.
        self._allocating = threading.Lock()
        self._unreserved: list[Memfd] = []  # Arenas whose memory was promised and may not all be reserved yet.
        self.chosen: SlotChoice | None = None  # for `arena.slots = auto`, once for all ranks of the node

    def create(self, effect: CreateArena) -> Arena | Error:
        """The arena that a rank asked for, or the reason why it cannot have it. Its trainer reserves the memory."""
        wanted, limit = effect.wanted, effect.wanted.memory_limit_bytes
        try:
            with self._allocating:
                limits = self._measure()
                slots = wanted.slots or self._choose(wanted.need, effect.num_ranks, limits, limit)
                header = self._plan(wanted.need, slots, effect.local_index, effect.generation)
                what = f"the arena of local rank {effect.local_index} ({slots} slots)"
                memory_limits.check(total_bytes(header), what, room=limits, memory_limit_bytes=limit)
                return self._create(header)
        except Error as error:
            return error
        except Exception as error:
            return KeeperError(f"the arena could not be created: {error!r}")

    def create_for_fetch(self, effect: FetchSnapshot, manifest: RankManifest) -> tuple[Arena, Future[None]]:
        """An arena for a snapshot of another node, with room for the next ones of its rank.

        Its memory is reserved while the first slot is filled; the future ends when all of it is reserved.
        """
        need = manifest.need
        size = SnapshotSize(need.layout_bytes, 2 * need.values_bytes + VALUES_SLACK, need.payload_bytes)
        with self._allocating:
            limits = self._measure()
            slots = effect.slots or self._choose(size, effect.local_world_size, limits)
            header = self._plan(size, slots, effect.local_index, effect.generation)
            what = f"the snapshot of rank {effect.piece.rank} that this node takes over"
            memory_limits.check(total_bytes(header), what, room=limits, memory_limit_bytes=0)
            arena = self._create(header)
        reserved: Future[None] = Future()
        threading.Thread(target=self._reserve, args=(arena, reserved), name="keepstep-reserve", daemon=True).start()
        return arena, reserved

    def track(self, arena: Arena) -> None:
        """Count what an adopted arena has not reserved yet against the limits."""
        with self._allocating:
            self._unreserved.append(arena.segment)

    def close(self) -> None:
        """Stop reserving memory."""
        self._closed.set()

    def _measure(self) -> MemoryLimits:
        """The memory limits, less what was promised to arenas and is not reserved yet."""
        missing = {memfd: _missing_bytes(memfd) for memfd in self._unreserved}
        self._unreserved = [memfd for memfd, size_bytes in missing.items() if size_bytes]
        limits, promised = memory_limits.measure(), sum(missing.values())
        return replace(
            limits,
            available_bytes=limits.available_bytes - promised,
            cgroup_used_bytes=limits.cgroup_used_bytes + promised,
        )

    def _create(self, header: ArenaHeader) -> Arena:
        """An arena whose memory is reserved later."""
        arena = Arena.create(header, reserve=False)
        self._unreserved.append(arena.segment)
        return arena

    def _choose(self, size: SnapshotSize, num_ranks: int, limits: MemoryLimits, limit_bytes: int = 0) -> int:
        """Slots for `auto`: chosen once for the node, fewer for a rank whose arena does not fit after that."""
        slot_bytes = self._plan(size, FEW_SLOTS, 0, 1).slot_stride  # with its headers, table and padding
        if self.chosen is None:
            self.chosen = memory_limits.choose_slots(slot_bytes, num_ranks, limits, limit_bytes)
        elif self.chosen.slots > FEW_SLOTS:
            again = memory_limits.choose_slots(slot_bytes, 1, limits, limit_bytes)
            if again.slots < self.chosen.slots:
                self.chosen = again
        return self.chosen.slots

    def _plan(self, size: SnapshotSize, slots: int, local_index: int, generation: int) -> ArenaHeader:
        return plan_header(
            size, slots=slots, local_index=local_index, generation=generation,
            run_id=self._identity.run_id, node_id=self._identity.node_id, instance=self._instance,
        )  # fmt: skip

    def _reserve(self, arena: Arena, reserved: Future[None]) -> None:
        try:
            arena.segment.reserve(cancelled=lambda: self._closed.is_set() or reserved.cancelled())
            with contextlib.suppress(InvalidStateError):
                reserved.set_result(None)
        except Error as error:
            with contextlib.suppress(InvalidStateError):
                reserved.set_exception(error)


def _missing_bytes(memfd: Memfd) -> int:
    """Bytes that are not reserved yet; 0 of an arena that was closed."""
    with contextlib.suppress(OSError):
        return max(0, memfd.size_bytes - memfd.allocated_bytes)
    return 0


def describe(arena: Arena) -> ArenaAdded:
    """An arena as its headers describe it, as the event that adds it to the core."""
    header = arena.header
    slots = tuple(_describe_slot(arena, index) for index in range(arena.num_slots))
    return ArenaAdded(
        arena.arena_id, header.local_index, header.generation, arena.segment.size_bytes, header.capacity, slots,
        arena.ledger(), arena.grant(), arena.progress(),
    )  # fmt: skip


def _describe_slot(arena: Arena, index: int) -> SlotFound:
    sealed, record = arena.sealed(index), arena.trainer_header(index)
    trainer = record[1] if record else None
    committed = trainer is not None and trainer.state == COMMITTED
    state = "sealed" if sealed else "committed" if committed else "free"
    if trainer is None or not committed:
        return SlotFound(index, state)
    age_s = max(0.0, time.time() - sealed.keeper.sealed_at) if sealed else 0.0
    return SlotFound(index, state, trainer.info, age_s)
