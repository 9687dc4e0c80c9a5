"""The public object: `restore()` once, `take(step)` after each optimizer step, `close()` at the end.

Saving never stops training: `take` returns a skipped PendingSnapshot with a reason where it cannot
capture, and never raises for a fault of keepstep's. Restoring never guesses: `restore()` returns
None only when there is truly nothing, and raises with a reason otherwise.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from keepstep.arena.records import Grant
from keepstep.config import Config, resolve
from keepstep.control.messages import Committed, Complete, Protected, Void, Voided
from keepstep.errors import CaptureError, ConfigError
from keepstep.layout import SnapshotSize
from keepstep.trainer.capture.capture import Capture
from keepstep.trainer.capture.job import CaptureJob
from keepstep.trainer.connection.agreement import meet_if_needed
from keepstep.trainer.connection.environment import (
    World,
    find_identity,
    find_place,
    registration,
    warn_about_shared_store,
)
from keepstep.trainer.connection.keeper_link import KeeperLink, Listeners, RankState
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.memory.rank_arena import RankArena
from keepstep.trainer.plan import arena_size
from keepstep.trainer.plan.copy_plan import SMALL_BYTES
from keepstep.trainer.plan.plan_cache import CachedPlan, PlanCache
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.replication import Replicas
from keepstep.trainer.plan.stillness import Stillness
from keepstep.trainer.restore.restore import RestoreRun, Stopwatch, short_switch_interval
from keepstep.trainer.restore.writer import Restored, sharded_modules
from keepstep.trainer.results import PendingSnapshot, PendingSnapshots
from keepstep.trainer.state.objects import MODULE, OPTIMIZER, STATEFUL, StateObjects, unwrap_optimizer
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.trainer.state.reader import StateReader
from keepstep.types import Status, Version

log = logging.getLogger("keepstep")

_open_here: set[str] = set()


class Snapshotter:
    """Keeps the state of this trainer. Use as a context manager; one per process and run."""

    def __init__(self, state: Mapping[str, Any], config: Config | None = None) -> None:
        self.config = resolve(config)
        self._items = StateObjects(state)
        self._place = find_place()
        self._identity = find_identity(self.config, self._place)
        warn_about_shared_store()
        key = f"{os.getpid()}:{self._identity.key}"
        if key in _open_here:
            raise ConfigError("another Snapshotter of this run is open in this process", hint="close() it first")
        listeners = Listeners(self._on_complete, self._on_protected, self._on_voided, self._on_arena_refused)
        met = meet_if_needed(self._identity, self.config, self._place)
        register = registration(self.config, self._place, met.incarnation if met else None)
        self._rank = RankState()
        membership = met.membership if met else None
        self._link = KeeperLink(self._identity, self.config, register, self._rank, listeners, membership)
        self._link.connect()
        _open_here.add(key)
        self._key = key
        optimizers = [(item.path, unwrap_optimizer(item.thing)) for item in self._items.of(OPTIMIZER)]
        self._fence = OptimizerFence(optimizers, [item.thing for item in self._items.of(MODULE)])
        self._capture = Capture(
            self._place, self.config.take, self._fence,
            committed=self._on_committed, voided=self._on_void,
        )  # fmt: skip
        self._sharing = self._find_sharing()
        self._sharded = [part for item in self._items.of(MODULE) for part in sharded_modules(item.thing)]
        self._survey = PlanCache(
            StateReader(self._items, rng=self.config.rng, grads=self.config.grads), self._fence, self._sharing,
            self._replicas, Stillness(restless=bool(self._sharded)), SMALL_BYTES,
        )  # fmt: skip
        self._memory = RankArena(self._link, self._rank, self.config.arena)
        self._waiting = PendingSnapshots()
        self._taking = threading.Lock()
        """held by a `take` as long as it writes into the arena"""
        self._used = ("", -1)
        """the arena and serial of the last grant that was used"""
        self._warned: set[str] = set()
        self._diverged: frozenset[str] = frozenset()
        """paths of replicas that were found to differ between nodes: each rank's own from then on"""
        self._closed = False

    # Restoring

    def restore(self, rehearsal: Callable[[], object] | None = None) -> Restored | None:
        """Bring back the newest version that all ranks have; None on a first start.

        Call it once, on every rank, after model, optimizer, scheduler and loader exist and before the
        first step. Also prepares the memory for snapshots. `rehearsal`: one throw-away forward and
        backward pass, run before the state is written, which makes DDP with three or more ranks exact.
        """
        self._check_open()
        with short_switch_interval():
            return self._restore(rehearsal)

    def _restore(self, rehearsal: Callable[[], object] | None) -> Restored | None:
        watch = Stopwatch()
        loading = RestoreRun(self.config, self._identity, self._place, self._items, self._link)
        restored = loading.run(rehearsal, self._replicas, watch)
        # Before the first step: all that can fail, fails here.
        need = self._foresee()
        watch.lap("looking at the state")
        self._memory.get(need, show=self._place.local_index == 0)  # one bar on the terminal of a node
        watch.lap("memory for snapshots")
        self._prepare_devices(need)
        watch.lap("devices")
        self._link.report_loaded(restored.step if restored else None)
        watch.lap("waiting for all ranks")
        log.info("ready for the first step: %s", watch)
        return restored

    # What other nodes hold too

    def _find_sharing(self) -> ReplicaShares | None:
        """None on a single node, where everything is this rank's own."""
        world, parity = World.of(self._place), self.config.parity
        return ReplicaShares(world, parity.replicated, parity.losses, parity.group_size) if world is not None else None

    def _replicas(self) -> Replicas:
        return Replicas(self._items, self._sharing, named=self.config.replicated, diverged=self._diverged)

    # Memory

    def _foresee(self) -> SnapshotSize:
        """What a snapshot will need, with the optimizer state that is still to come."""
        reading, plan = self._survey.begin()
        self._fence.muted = True
        try:
            missing = arena_size.missing_state(self._items.optimizers, self._replicas())
            missing += arena_size.missing_grads(self._items.optimizers) if self.config.grads else []
        finally:
            self._fence.muted = False
        return arena_size.need_of(plan, len(reading.values), missing, self._sharing)

    def _prepare_devices(self, need: SnapshotSize) -> None:
        """What is on a device now tells how what comes will be spread."""
        assert self._survey.plans is not None
        plan = self._survey.plans.first
        sizes: Counter[torch.device] = Counter()
        for unit in plan.ops:
            sizes[unit.device] += unit.size_bytes
        total = sum(sizes.values())
        codes = {(stream.n - stream.m, stream.m) for stream in plan.layout.replica_sets if stream.m}
        foreseen = {d: need.payload_bytes * size // total for d, size in sizes.items() if d.type == "cuda"}
        self._capture.lanes.prepare(foreseen, codes)

    # Taking

    def take(self, step: int) -> PendingSnapshot:
        """Capture the state as it is now, under the name `step`. Call it after `optimizer.step()`.

        Returns before the copy has finished. Never raises for a fault on the way: the returned
        snapshot is then `skipped` with a `reason`.
        """
        self._check_open()
        if type(step) is not int or step < 0:
            raise ConfigError(f"a step is a number from 0 on, not {step!r}")
        try:
            return self._take(step)
        except Exception as error:
            log.exception("take(%d) failed; training goes on", step)
            self._memory.write_progress()
            return PendingSnapshot(step, reason=f"take failed: {error!r}")

    def _take(self, step: int) -> PendingSnapshot:
        if step <= self._rank.step:
            return self._skip(step, f"steps must grow: the last one was {self._rank.step}")
        self._rank.step = step
        stepped = self._fence.take_stepped()
        self._capture.suspect()
        if step % self.config.every:
            return self._skip(step, f"not due: every={self.config.every}")
        for part in self._sharded:
            part.reshard()
        with self._taking:
            return self._take_granted(step, stepped=stepped)

    def _take_granted(self, step: int, *, stepped: bool) -> PendingSnapshot:
        grant = self._grant(step)
        if isinstance(grant, str):
            return self._skip(step, grant)
        version = Version(self._link.incarnation, step)
        view = self._memory.view
        if view is not None and self._capture.is_full(view.arena.num_slots):
            return self._void(version, grant, "the snapshot before it is still being copied")
        try:
            return self._begin_capture(version, grant, inexact=self._is_inexact(stepped))
        except Exception as error:  # whatever it is, the grant must not stay open
            reason = str(error) or repr(error)
            self._warn_once(f"step {step} is not captured: {reason}")
            return self._void(version, grant, reason)

    def _void(self, version: Version, grant: Grant, reason: str) -> PendingSnapshot:
        self._link.say(Void(self._used[0], grant.slot, version, reason))
        return self._skip(version.step, reason)

    def _grant(self, step: int) -> Grant | str:
        """The grant for this step, or why there is none."""
        view = self._memory.view
        if view is None:
            # restore() was never called: prepare behind the training.
            if not self._memory.busy:
                self._memory.get_behind(
                    self._foresee(), before=lambda: None, after=partial(self._link.report_loaded, None)
                )
            return "the memory is being prepared: call restore() before the first step"
        if self._memory.busy:
            return "the arena is growing"
        granted = view.arena.grant()
        if granted is None or granted.incarnation != self._link.incarnation:
            return "not granted yet: the keeper waits for all ranks" if self._link.up else self._no_keeper()
        arena_id = view.arena.arena_id
        used = self._used[1] if self._used[0] == arena_id else 0
        grant = granted.after(used)
        if grant is None:
            if not self._link.up:
                return self._no_keeper()
            return "not granted: the last snapshot is still being sealed"
        if step < grant.step:
            return f"not granted: the next snapshot is at step {grant.step}"
        self._used = (arena_id, grant.serial)
        return grant

    def _no_keeper(self) -> str:
        return f"the keeper has ended: {self._link.ended}" if self._link.ended else "the keeper is away"

    def _begin_capture(self, version: Version, grant: Grant, *, inexact: bool) -> PendingSnapshot:
        view = self._memory.view
        assert view is not None
        seen = self._survey.at(version.step)
        self._check_room(view, seen, seen.reading.least_values_bytes)
        pending = PendingSnapshot(version.step)
        self._waiting.add(version, pending)
        behind = partial(self._behind_take, view, seen)
        self._capture.begin(view, grant.slot, version, seen.plan, inexact=inexact, behind=behind, look=seen.look)
        return pending

    def _behind_take(self, view: ArenaView, seen: CachedPlan) -> bytes:
        """On the copy thread: what need not be done inside `take`. Returns the encoded values."""
        self._memory.write_progress()
        self._check_room(view, seen, len(seen.reading.values))
        return seen.reading.values

    def _check_room(self, view: ArenaView, seen: CachedPlan, values_bytes: int) -> None:
        plan = seen.plan
        if not view.arena.fits(SnapshotSize(len(plan.encoded), values_bytes, plan.payload_bytes)):
            wanted = arena_size.need_of(plan, len(seen.reading.values), [], self._sharing)
            self._memory.grow(wanted, before=self._let_go)
            size = plan.payload_bytes + values_bytes
            raise CaptureError(f"the state has outgrown its arena ({size:,} bytes); a larger one is made")

    def _is_inexact(self, stepped: bool) -> bool:
        """Between accumulation steps gradients are part of the state, and they are not in the snapshot."""
        if self.config.grads or not self._fence.watched or stepped:
            return False
        scaled = any(type(item.thing).__name__ == "GradScaler" for item in self._items.of(STATEFUL))
        if not scaled:
            self._warn_once(
                "take() was called although no optimizer was seen to step since the last one: gradients are not "
                "captured, so a resume from between accumulation steps is not exact. Take after optimizer.step(), or "
                "use Config(grads=True). Whole steps that are replayed from a CUDA graph are not seen and are exact"
            )
        return not scaled

    def _skip(self, step: int, reason: str) -> PendingSnapshot:
        self._memory.write_progress()
        log.debug("step %d skipped: %s", step, reason)
        return PendingSnapshot(step, reason=reason)

    # From other threads

    def _on_committed(self, job: CaptureJob) -> None:
        self._link.say(Committed(job.view.arena.arena_id, job.slot, job.version))

    def _on_void(self, job: CaptureJob, reason: str) -> None:
        self._warn_once(f"a snapshot that had begun is void: {reason}")
        self._memory.write_progress()  # the copy may have failed before it was
        self._link.say(Void(job.view.arena.arena_id, job.slot, job.version, reason))
        self._waiting.void(job.version, reason)

    def _on_complete(self, message: Complete) -> None:
        self._waiting.complete(message.version, final=message.final)

    def _on_protected(self, message: Protected) -> None:
        self._waiting.protected(message.version)

    def _on_arena_refused(self) -> None:
        self._memory.replace(before=self._let_go)

    def _let_go(self) -> None:
        """The arena goes: no `take` begins any more (`RankArena.busy`), and those that have begun are over."""
        with self._taking:
            pass
        self._capture.drain(timeout_s=600)

    def _on_voided(self, message: Voided) -> None:
        view = self._memory.view
        if view is not None:
            view.forget_layouts()  # a damaged one would fail every snapshot in its slot
        if message.diverged:
            log.error("step %d is void: %s", message.version.step, message.reason)
            self._diverged = self._diverged | frozenset(message.diverged)
            self._survey.outdate()  # the next layout has them as this rank's own
        self._waiting.void(message.version, f"void elsewhere (rank {message.rank}: {message.reason})")

    # The rest

    def status(self) -> Status:
        """What the keeper knows: the structure that `keepstep status --json` prints."""
        self._check_open()
        return self._link.status()

    def close(self, *, finished: bool = True) -> None:
        """End. `finished`: the training is over; when all ranks say so the keeper gives the state up."""
        if self._closed:
            return
        self._closed = True
        self._capture.close()
        self._fence.close()
        self._link.close(finished=finished)
        self._memory.close()
        self._survey.close()
        _open_here.discard(self._key)
        self._waiting.end("closed before it was complete")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Snapshotter is closed", hint="make a new one")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 100:
            self._warned.add(text)
            log.warning(text)
