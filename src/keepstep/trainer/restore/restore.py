"""One `restore()`: ask the keeper, read the snapshot, compare it with the live objects, write it, time it.

While the keeper verifies the bytes, this process loads the kernels for fingerprints and page-locks the upload buffers.
`LayoutProof` makes the same comparison with what a `take` captures.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from keepstep import layout as layouts
from keepstep.arena.records import INEXACT, PRINTS
from keepstep.config import Config
from keepstep.control.client import RESTORE_S
from keepstep.control.messages import EXITED, FINISHED, RestoreFrom, WantRestore
from keepstep.errors import CaptureError, IntegrityError
from keepstep.identity import Identity
from keepstep.layout import SnapshotSize, format_bytes
from keepstep.parity.gpu import batches as parity
from keepstep.trainer.connection.environment import RankPlace
from keepstep.trainer.connection.keeper_link import KeeperLink
from keepstep.trainer.data.loader import Loader
from keepstep.trainer.integrity.fingerprints import unframe
from keepstep.trainer.memory.arena_view import ArenaView
from keepstep.trainer.memory.rank_arena import open_view
from keepstep.trainer.plan.copy_plan import PlanTurns
from keepstep.trainer.plan.plan_cache import CachedPlan
from keepstep.trainer.plan.replication import Replicas
from keepstep.trainer.restore.device_upload import PinnedUploader, UploadQueue, threads_for
from keepstep.trainer.restore.read_back import ReadBack
from keepstep.trainer.restore.replica_chunks import Chunks, ReplicaChunks
from keepstep.trainer.restore.saved_snapshot import RandomStates, SavedSnapshot
from keepstep.trainer.restore.writer import StateWriter
from keepstep.trainer.results import Restored
from keepstep.trainer.state import reader as states
from keepstep.trainer.state.objects import LOADER, MODULE, OPTIMIZER, StateObjects
from keepstep.types import Source, Survives

log = logging.getLogger("keepstep")

SWITCH_INTERVAL_S = 0.0001  # Python's own is 5 ms.

Rehearsal = Callable[[], object]


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Give busy Python threads 0.1 ms of the GIL at a time instead of 5 ms.

    Every call that releases the GIL, as each call into torch does, lets a thread that only computes (an import, a data
    loader) run for one interval. A restore makes thousands of such calls: beside one busy thread 1,168 tensors took
    33 s, and take 0.7 s with the short interval.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s + 5e-7)  # it counts microseconds, and rounds down


class Stopwatch:
    """Durations of the stages of one restore, for the log."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        """Record the time since the last lap."""
        now = time.monotonic()
        self._laps.append((name, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._laps)


@dataclass(frozen=True)
class RestoreRun:
    """The steps of one `restore()`, in order."""

    config: Config
    identity: Identity
    place: RankPlace
    items: StateObjects
    link: KeeperLink

    def run(self, rehearsal: Rehearsal | None, replicas: Callable[[], Replicas], watch: Stopwatch) -> Restored | None:
        """Restore the newest version; None when no version of this run was ever complete."""
        self._warm_up()
        uploader = PinnedUploader(threads_for(self.place.local_world_size))
        try:
            answer, fds = self._ask(uploader)
            watch.lap("asking and checking")
            if answer.version is None:
                if answer.had_arenas and self.place.rank == 0:
                    run_id = self.identity.run_id
                    _inform(f"the last start of run {run_id!r} left no complete snapshot: beginning anew")
                return None
            with ReplicaChunks(fds[1:]) as sources, closing(open_view(fds[0], self.identity)) as view:
                self._rehearse(rehearsal)
                watch.lap("rehearsing")
                saved = _read_snapshot(view, answer, sources, uploader)
                restored = self._load(saved, answer, replicas(), watch)
            self._inform(restored)
            return restored
        finally:
            uploader.close()

    def _warm_up(self) -> None:
        """Load kernels, which takes a second or two, while the keeper verifies the bytes."""
        devices = {parameter.device for module in self.items.modules for parameter in module.parameters()}
        for device in devices:
            if device.type == "cuda":
                threading.Thread(target=parity.warm_up, args=(device, 1, 1), name="keepstep-warm", daemon=True).start()

    def _ask(self, uploader: PinnedUploader) -> tuple[RestoreFrom, list[int]]:
        """Ask the keeper, which verifies every byte before it answers; page-lock the upload buffers meanwhile."""
        threading.Thread(target=uploader.lock, name="keepstep-pin", daemon=True).start()
        return self.link.request(WantRestore(), RestoreFrom, timeout_s=RESTORE_S)

    def _rehearse(self, rehearsal: Rehearsal | None) -> None:
        if rehearsal is None:
            self._warn_about_ddp()
            return
        rehearsal()
        for optimizer in self.items.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _warn_about_ddp(self) -> None:
        parallel = any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in self.items.modules)
        if parallel and self.place.world_size >= 3 and self.place.rank == 0:
            log.warning(
                "the first step of a new DDP sums in another order with three or more ranks: pass "
                "restore(rehearsal=one_forward_and_backward) for a bit-exact resume"
            )

    def _load(self, saved: SavedSnapshot, answer: RestoreFrom, replicas: Replicas, watch: Stopwatch) -> Restored:
        """Compare, then write. Nothing that is returned points into the arena."""
        assert answer.version is not None
        writer = StateWriter(saved, self.items, replicas.ranks_of)
        writer.prepare()
        watch.lap("comparing with the live objects")
        writer.write()
        watch.lap("writing")
        checked = saved.check_devices()
        _wait_for_devices()
        watch.lap("waiting for devices")
        ReadBack(saved, self.items).check()
        watch.lap("reading back")
        random_states = RandomStates(saved.tree, self.items)
        random_states.set()
        for item in self.items.of(LOADER):
            if isinstance(item.thing, Loader):
                item.thing.set_rng_at_resume(random_states.set)
        log.debug("restored %s from %s: %s (%s)", answer.version, answer.source, "; ".join(answer.plan), watch)
        if checked:
            log.debug("%d fingerprints on the devices equal those of the captured state", checked)
        return Restored(
            step=answer.version.step, source=Source(answer.source), survives=Survives.PROCESS,
            duration_s=watch.seconds, bytes=answer.size_bytes, plan=tuple(answer.plan),
            note=_note(answer, self.identity.run_id), _set_rng=random_states.set,
            _size=SnapshotSize(0, saved.values_bytes, saved.layout.payload_bytes),
        )  # fmt: skip

    def _inform(self, restored: Restored) -> None:
        """Tell people, once for the job."""
        if self.place.rank == 0:
            size, run_id = format_bytes(restored.bytes), self.identity.run_id
            source = f"{restored.source.value}, {size} in {restored.duration_s:.1f} s"
            _inform(f"restored step {restored.step} of run {run_id!r} from {source}")
            if restored.note:
                log.warning(restored.note)


class LayoutProof:
    """Compares each new layout with what a restore of it will require, on the live objects, before it is captured."""

    def __init__(self, items: StateObjects) -> None:
        self._items = items
        # Of the layout that was compared last. Weak: plans hold tensors.
        self._compared: weakref.ref[PlanTurns] | None = None
        self._obstacles: list[str] = []
        self._num_groups: dict[str, int] = {}  # parameter groups of each optimizer at the first layout
        self._warned: set[str] = set()

    def check(self, cached: CachedPlan) -> None:
        """Raise CaptureError when a snapshot of this layout could not be restored. Compares it once."""
        plans = cached.state.plans
        if self._compared is None or self._compared() is not plans:
            self._warn_of_groups()
            self._obstacles = self._compare(cached)
            self._compared = weakref.ref(plans)
        if self._obstacles:
            more = f" (and {len(self._obstacles) - 3} more)" if len(self._obstacles) > 3 else ""
            raise CaptureError(
                f"a snapshot of this state could not be restored: {'; '.join(self._obstacles[:3])}{more}",
                hint="give an object whose load_state_dict() takes what its state_dict() gives, or plain tensors",
            )

    def _warn_of_groups(self) -> None:
        """A restored optimizer must have the groups that were saved, and a new process begins with the first ones."""
        for path, optimizer in self._items.named_optimizers:
            now = len(optimizer.param_groups)
            before = self._num_groups.setdefault(path, now)
            if now != before and path not in self._warned:
                self._warned.add(path)
                log.warning(
                    "%s has %d parameter groups now and had %d at the start: after a restart the program must %s "
                    "before restore(), which refuses the snapshot otherwise",
                    path, now, before, "add the group" if now > before else "leave out the group",
                )  # fmt: skip

    def _compare(self, cached: CachedPlan) -> list[str]:
        reading = cached.reading
        compared = [item.path for item in self._items.all if item.kind in (MODULE, OPTIMIZER)]
        trees = {path: reading.decoded(path) for path in compared if path not in reading.skipped}
        layout = cached.plan.layout
        chunks: dict[str, Chunks] = {each.class_id: [] for each in layout.replica_sets}
        saved = SavedSnapshot({"items": trees}, layout, torch.empty(0, dtype=torch.uint8), chunks)
        return StateWriter(saved, self._items).obstacles()


def _read_snapshot(
    view: ArenaView, answer: RestoreFrom, sources: ReplicaChunks, uploader: PinnedUploader
) -> SavedSnapshot:
    """Read the tree and the layout of a slot that the keeper verified."""
    sealed = view.arena.sealed(answer.slot)
    if sealed is None or sealed.version != answer.version:
        raise IntegrityError(f"slot {answer.slot} changed after it was verified")
    if sealed.trainer.flags & INEXACT:
        log.warning(
            "%s was captured without gradients, and no optimizer step was seen before it: exact after a replayed CUDA "
            "graph, not exact between accumulation steps",
            answer.version,
        )
    layout_span, values_span, payload_span = view.arena.used_spans(answer.slot, sealed.trainer)
    encoded = view.arena.segment.read(layout_span.offset, layout_span.size_bytes)
    layout = layouts.decode(encoded, payload_bytes=sealed.trainer.payload_bytes)
    values = view.arena.segment.read(values_span.offset, values_span.size_bytes)
    values, prints = unframe(values) if sealed.trainer.flags & PRINTS else (values, b"")
    tree = states.decode(values)
    payload = view.payload(answer.slot)
    chunks = sources.chunks(layout, answer.streams, arena=view.bytes, payload=payload)
    return SavedSnapshot(
        tree, layout, payload, chunks, prints, UploadQueue(uploader, view.arena.segment, payload_span.offset),
        values_bytes=values_span.size_bytes,
    )  # fmt: skip


def _inform(text: str) -> None:
    """Log at INFO. Where nothing handles the logs of keepstep, Python would drop it: print it to standard error."""
    if log.hasHandlers():
        log.info(text)
    else:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)


def _note(answer: RestoreFrom, run_id: str) -> str:
    """Whether there may be nothing left to train."""
    assert answer.version is not None
    step = answer.version.step
    if answer.ended == FINISHED:
        end = f"step {step} was the last step of a finished run: some of its ranks had closed"
    elif answer.ended == EXITED:
        end = f"the last start ended by sys.exit after step {step}; if that was its last step, the run has finished"
    else:
        return ""
    return (
        f"{end}. A loop over more steps goes on from here; to begin anew, end this program, then "
        f"`keepstep release --run-id {run_id}` on every node, or give the new run another id"
    )


def _wait_for_devices() -> None:
    """Wait until the copies that are queued on the current streams are done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            torch.cuda.current_stream(index).synchronize()
