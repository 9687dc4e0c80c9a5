"""The public object: `restore()` once, `take(step)` after each optimizer step, `close()` at the end.

Saving never stops training: `take` returns a skipped PendingSnapshot with a reason where it cannot capture, and never
raises for a fault of keepstep's. Restoring never guesses: `restore()` returns None only when no version of this run was
ever complete, and raises with a reason otherwise. The training thread alone calls into this object.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from keepstep.config import Config
from keepstep.errors import ConfigError, Error
from keepstep.trainer.capture.capture import Capture
from keepstep.trainer.capture.grants import GrantReader, Skip, SlotGrant, TakeStatistics, TakeWait
from keepstep.trainer.check.recorder import COMPLETE_S, StateRecorder, wait_for
from keepstep.trainer.connection.job import TrainerJob
from keepstep.trainer.data.batch_loop import BatchLoop, training_state
from keepstep.trainer.data.fetch_watch import FetchWatch
from keepstep.trainer.memory.rank_arena import RankArena
from keepstep.trainer.plan.state_planner import StatePlanner
from keepstep.trainer.restore.restore import LayoutProof, RestoreRun, Stopwatch, short_switch_interval
from keepstep.trainer.results import PendingSnapshot, Restored, SnapshotReporter
from keepstep.trainer.state.optimizer_fence import OptimizerFence
from keepstep.types import Status, Version

log = logging.getLogger("keepstep")


class Snapshotter:
    """Keeps the state of this trainer. Use as a context manager; one per process and run."""

    def __init__(self, state: Mapping[str, Any], config: Config | None = None, *, loader: Any = None) -> None:
        """`loader`: what `batches` reads, a Loader or what one is made of. It becomes part of the state."""
        self._items, self._loader = training_state(state, loader)
        self._job = TrainerJob.open(config)
        self.config, self._place, self._rank, self._link = (
            self._job.config,
            self._job.place,
            self._job.rank,
            self._job.link,
        )
        self._reporter = SnapshotReporter(self._link)
        self._link.listen(self._reporter)
        self._fence = OptimizerFence(self._items.named_optimizers, self._items.modules)
        self._planner = StatePlanner(self._items, self._fence, self._job.world, self.config)
        self._proof = LayoutProof(self._items)
        self._capture = Capture(self._place, self.config.take, self._fence, self._planner.plans, self._reporter)
        self._memory = RankArena(self._link, self._rank, self.config.arena)
        self._grants, self._takes = GrantReader(self._link, self._memory), TakeStatistics()
        self._recorder = StateRecorder.from_environment(self._items, self._place.rank, self._place.world_size)
        self._fetches = FetchWatch(self._items.optimizers, [self._loader] if self._loader is not None else [])
        self._batch_loop: BatchLoop | None = None
        self._is_restored = False  # `restore` has returned.
        self._next_step = 0  # as `restore` left it
        self._closed, self._pid = False, os.getpid()
        self._link.close_with_program(self)

    # Restoring

    def restore(self, rehearsal: Callable[[], object] | None = None) -> Restored | None:
        """Restore the newest version that all ranks have; None on a first start.

        Call it once, on every rank, after model, optimizer, scheduler and loader exist and before the
        first step. Memory for snapshots is prepared in the background, and `take` skips until it is
        ready; a limit that forbids it is an error here. `rehearsal`: one throw-away forward and
        backward pass, run before the state is written, which makes DDP with three or more ranks exact.
        """
        self._check_open()
        try:
            with short_switch_interval():
                restored = self._restore(rehearsal)
        except Error as error:
            self._link.report_failure(error, restoring=True)
            if self._recorder is not None:
                self._recorder.refused(error)
            raise
        if self._recorder is not None:
            self._recorder.restored(restored.step if restored else None)
        self._is_restored, self._next_step = True, restored.step + 1 if restored else 0
        return restored

    def _restore(self, rehearsal: Callable[[], object] | None) -> Restored | None:
        watch = Stopwatch()
        loading = RestoreRun(self.config, self._job.identity, self._place, self._items, self._link)
        restored = loading.run(rehearsal, self._planner.replication.prove, watch)
        # Before the first step: a state that cannot be planned, or needs too much memory, fails here.
        forecast = self._planner.forecast(restored._size if restored else None)
        self._proof.check(forecast.cached)
        watch.lap("planning")
        lanes = self._capture.lanes
        lanes.prepare(forecast.device_bytes, forecast.codes)
        watch.lap("devices")
        self._memory.request(forecast.size, before=self._capture.drain, warm_up=lanes.warm_up)
        watch.lap("requesting memory")
        self._link.report_loaded(restored.step if restored else None)
        watch.lap("waiting for all ranks")
        log.debug("ready for the first step: %s", watch)
        return restored

    # Taking

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yield `(epoch, batch)` until so many epochs or steps are done; from where a restore has left off.

            for epoch, batch in snapshots.batches(epochs=3):
                train_one_step(batch)

        Restores first, unless `restore` was called. A step is taken when the batch after it is asked for: whatever is
        done with a batch, evaluation and logging too, belongs to its step. Steps are counted from 0, where an optimizer
        steps. After a `break` another call goes on with the next batch.
        """
        self._check_open()
        if not self._is_restored:
            self.restore()
        self._fetches.close()
        if self._batch_loop is None:
            self._batch_loop = BatchLoop(self._loader, self._fence, self._next_step)
        while True:
            step = self._batch_loop.ended_step()
            if step is not None:
                self.take(step)
            following = self._batch_loop.next_batch(epochs, steps)
            if following is None:
                return
            yield following

    def take(self, step: int) -> PendingSnapshot:
        """Capture the state as it is now, under the name `step`. Call it after `optimizer.step()`.

        Returns before the copy has finished. Never raises for a fault on the way: the returned
        snapshot is then `skipped` with a `reason`.
        """
        self._check_open()
        if type(step) is not int or step < 0:
            raise ConfigError(f"a step is a number from 0 on, not {step!r}")
        if self._recorder is not None:
            return self._take_recorded(self._recorder, step)
        try:
            return self._take(step)
        except Exception as error:
            log.exception("take(%d) failed; training goes on", step)
            return self._skip(step, f"take failed: {error!r}")

    def before_update(self) -> None:
        """Announce that code that is no Optimizer's step is going to write the state: call it before each such write.

        For updates by hand and optimizers that are no `torch.optim.Optimizer`. The parameters and large tensors that
        they write are then copied while training goes on, and the next call waits until that is done; without it they
        are copied inside `take`. A program that calls it writes nothing of the state between a `take` and its next
        call, except in the steps of its Optimizers, in forward (buffers) and in loaders.
        """
        self._check_open()
        self._fence.before_update()

    def _take_recorded(self, recorder: StateRecorder, step: int) -> PendingSnapshot:
        """Under `keepstep check`: record the state, and capture this step, however long it takes."""
        self._planner.reshard()
        recorder.begin_take(step, in_batches=self._batch_loop is not None)
        if step > self._rank.step:
            self._act_on_reports()
            wait_for(lambda: isinstance(self._grants.next(step), SlotGrant))
        pending = self._take(step)
        pending.wait(timeout_s=COMPLETE_S)
        recorder.end_take(step, pending.reason)
        return pending

    def _take(self, step: int) -> PendingSnapshot:
        self._fetches.check()
        if step <= self._rank.step:
            return self._skip(step, f"steps must grow: the last one was {self._rank.step}")
        self._act_on_reports()
        stepped = self._fence.take_stepped()
        self._capture.check_unfenced_write()
        if step % self.config.every:
            return self._skip(step, f"not due: every={self.config.every}")
        self._planner.reshard()
        wait = TakeWait(self.config.take.wait_s, self._capture.lanes.queued_work)
        grant = self._wait_for_grant(step, wait)
        if isinstance(grant, Skip):
            self._rank.takes = self._takes.count(grant.kind, wait.waited_s)
            return self._skip(step, grant.reason)
        return self._take_granted(step, grant, wait, inexact=self._is_inexact(stepped))

    def _wait_for_grant(self, step: int, wait: TakeWait) -> SlotGrant | Skip:
        if self._place.world_size > self._place.local_world_size:
            # Orders to other nodes take longer than a step: the coordinator grants steps further ahead than this one.
            return self._grants.next(step)
        grant = self._grants.wait(step, wait)
        if isinstance(grant, Skip) and wait.waited_s:
            # The keeper may have granted this step to all ranks at the moment when this one stopped waiting.
            self._publish(step)
            grant = self._grants.next(step)
        return grant

    def _take_granted(self, step: int, grant: SlotGrant, wait: TakeWait, *, inexact: bool) -> PendingSnapshot:
        """Capture under this grant, or void it for all ranks: it must not stay open."""
        version = Version(self._link.incarnation, step)
        self._grants.use(grant)
        pending = self._reporter.open(version)
        self._publish(step)
        skip = self._begin(version, grant, wait, inexact=inexact)
        if skip is not None:
            self._reporter.voided(grant.arena_id, grant.slot, version, skip.reason)
        self._rank.takes = self._takes.count(skip.kind if skip else "", wait.waited_s)
        self._memory.write_progress()
        return pending

    def _begin(self, version: Version, grant: SlotGrant, wait: TakeWait, *, inexact: bool) -> Skip | None:
        """Begin the capture. Returns why it did not begin, whatever the reason is."""
        try:
            while self._capture.is_full(grant.view.arena.num_slots):
                if not wait.pause():
                    return Skip.copying()
            cached = self._planner.lookup(version.step)
            self._proof.check(cached)
            self._capture.begin(grant.view, grant.slot, version, cached, inexact=inexact)
        except Exception as error:
            return Skip.failed(error)
        return None

    def _publish(self, step: int) -> None:
        """Report through the arena that the `take` at `step` has the grant that it will use, or none."""
        self._rank.step = max(step, self._rank.step)
        self._memory.write_progress()

    def _skip(self, step: int, reason: str) -> PendingSnapshot:
        self._publish(step)
        log.debug("step %d skipped: %s", step, reason)
        return PendingSnapshot(step, reason=reason)

    def _act_on_reports(self) -> None:
        """Do what other threads reported since the last `take`: only this thread replaces plans and arenas."""
        notices, view = self._reporter.take_notices(), self._memory.view
        if notices.diverged:
            self._planner.exclude(notices.diverged)
        if notices.arena_refused:
            self._memory.replace(before=self._capture.drain)
        if view is None:
            self._prepare_memory()
            return
        if notices.layouts_damaged:
            view.forget_layouts()
        outgrown = self._capture.take_outgrown()
        if outgrown is not None and not view.arena.fits(outgrown.size):
            need = self._planner.arena_for(outgrown.plan, outgrown.size.values_bytes)
            self._memory.grow(need, before=self._capture.drain)

    def _prepare_memory(self) -> None:
        """Prepare the arena in the background: restore() was never called."""
        if not self._memory.busy:
            size = self._planner.forecast().size
            self._memory.request_behind(size, before=self._capture.drain, after=self._link.ensure_loaded)

    def _is_inexact(self, stepped: bool) -> bool:
        """Between accumulation steps gradients are part of the state, and they are not in the snapshot."""
        if self.config.grads or not self._fence.optimizers or stepped:
            return False
        scaled = self._items.has_grad_scaler
        if not scaled:
            self._reporter.warn_once(
                "take() was called although no optimizer was seen to step since the last one: gradients are not "
                "captured, so a resume from between accumulation steps is not exact. Take after optimizer.step(), or "
                "use Config(grads=True). Whole steps that are replayed from a CUDA graph are not seen and are exact"
            )
        return not scaled

    # Status and close

    def status(self) -> Status:
        """Fetch the keeper's status: the structure that `keepstep status --json` prints."""
        self._check_open()
        return self._link.status()

    def close(self, *, finished: bool | None = None) -> None:
        """End. `finished`: training is over. When all ranks close so, the keeper frees the memory and ends.

        None: finished, unless an exception is being handled (`finally: snapshots.close()`). A program that returns
        returns without calling it closes so by itself; one that ends by an exception or `sys.exit` has not finished.
        In a forked child it does nothing: the trainer is its parent.
        """
        if self._closed or self._is_forked():
            return
        self._closed = True
        error = sys.exc_info()[1]
        if finished is None and error is not None:
            self._link.report_failure(error)
        self._capture.close()
        self._fence.close()
        self._fetches.close()
        self._job.close(finished=error is None if finished is None else finished)
        self._memory.close()
        self._planner.close()
        self._reporter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed and not self._is_forked():
            self._link.report_failure(error)
        self.close(finished=kind is None)

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Snapshotter is closed", hint="make a new one")
