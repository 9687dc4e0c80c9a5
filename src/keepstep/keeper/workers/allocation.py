"""Arenas of this node: created for a request or for a fetched snapshot, described for the core."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError

from keepstep.arena import memory_limits
from keepstep.arena.manifest import RankManifest
from keepstep.arena.memory_limits import FEW_SLOTS, MemoryLimits, SlotChoice
from keepstep.arena.records import COMMITTED, ArenaHeader
from keepstep.arena.slots import Arena, plan_header, total_bytes
from keepstep.errors import Error, KeeperError
from keepstep.identity import Identity
from keepstep.keeper.node.effects import CreateArena, FetchSnapshot
from keepstep.keeper.node.events import ArenaAdded, SlotFound
from keepstep.layout import SnapshotSize

VALUES_SLACK = 1 << 20


class ArenaAllocator:
    """Creates arenas within the memory limits. For any thread."""

    def __init__(self, identity: Identity, instance: bytes) -> None:
        self._identity, self._instance = identity, instance
        self._closed = threading.Event()
        # One arena at a time: two that each fit may not fit together.
        self._allocating = threading.Lock()
        self.chosen: SlotChoice | None = None  # for `arena.slots = auto`, once for all ranks of the node

    def create(self, effect: CreateArena) -> Arena | Error:
        """The arena that a rank asked for, with all its memory; or the reason why not."""
        wanted, limit = effect.wanted, effect.wanted.memory_limit_bytes
        try:
            with self._allocating:
                limits = memory_limits.measure()
                slots = wanted.slots or self._choose(wanted.need, effect.num_ranks, limits, limit)
                header = self._plan(wanted.need, slots, effect.local_index, effect.generation)
                what = f"the arena of local rank {effect.local_index} ({slots} slots)"
                memory_limits.check(total_bytes(header), what, room=limits, memory_limit_bytes=limit)
                return Arena.create(header)
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
        # Held until the memory is reserved: only then can be measured what the next arena may have.
        self._allocating.acquire()
        try:
            slots = effect.slots or self._choose(size, effect.local_world_size, memory_limits.measure())
            header = self._plan(size, slots, effect.local_index, effect.generation)
            what = f"the snapshot of rank {effect.piece.rank} that this node takes over"
            memory_limits.check(total_bytes(header), what, room=memory_limits.measure(), memory_limit_bytes=0)
            arena = Arena.create(header, reserve=False)
        except BaseException:
            self._allocating.release()
            raise
        reserved: Future[None] = Future()
        threading.Thread(target=self._reserve, args=(arena, reserved), name="keepstep-reserve", daemon=True).start()
        return arena, reserved

    def close(self) -> None:
        """Stop reserving memory."""
        self._closed.set()

    def _choose(self, size: SnapshotSize, num_ranks: int, limits: MemoryLimits, limit_bytes: int = 0) -> int:
        """Slots for `auto`: chosen once for the node, fewer for a rank whose arena does not fit after that."""
        slot_bytes = size.layout_bytes + size.values_bytes + size.payload_bytes
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
        finally:
            self._allocating.release()


def describe(arena: Arena) -> ArenaAdded:
    """An arena as its headers describe it, as the event that adds it to the core."""
    header = arena.header
    capacity = SnapshotSize(header.layout_capacity, header.values_capacity, header.payload_capacity)
    slots = tuple(_describe_slot(arena, index) for index in range(arena.num_slots))
    return ArenaAdded(
        arena.arena_id, header.local_index, header.generation, arena.segment.size_bytes, capacity, slots,
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
