"""The ways of saving that `bench_take.py` compares, each behind the same few calls.

A contender is a context manager that yields a `Saver` and leaves nothing behind. Files go to `directory`, which is
on tmpfs: a disk would only make the file-writing ones slower. Packages that are not installed are not an error here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from granted import wait_for_grant
from take_memory import Keeper
from take_workload import Workload


class Saver(Protocol):
    def save(self, step: int) -> str | None:
        """Save the state as the loop would; the loop stands still meanwhile. The reason, when it was skipped."""

    def fence(self) -> None:
        """Before the next update: wait for copies that still read the state, unless the saver's own hook does."""

    def settle(self) -> None:
        """Wait until the background work of the last `save` has ended."""

    def discard(self) -> None:
        """Remove what the last `save` wrote. Never timed."""

    def keeper(self) -> Keeper | None:
        """The process that holds the saved state, where there is one."""


NUM_BATCHES = 10_000

Opener = Callable[[Workload, Path, float], AbstractContextManager[Saver]]


class _Blocking:
    """A saver whose `save` does it all; the others change what they do differently."""

    def __init__(self, save: Callable[[int], Any], *, writes: Path | None = None) -> None:
        self._save = save
        self._writes = writes

    def save(self, step: int) -> str | None:
        self._save(step)
        return None

    def fence(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def discard(self) -> None:
        if self._writes is not None:
            self._writes.unlink(missing_ok=True)

    def keeper(self) -> Keeper | None:
        return None


class _Keepstep(_Blocking):
    def __init__(self, snapshots: Any, wait_s: float) -> None:
        super().__init__(snapshots.take)
        self._snapshots = snapshots
        self._pending: Any = None
        self._wait_s = wait_s

    def save(self, step: int) -> str | None:
        self._pending = self._snapshots.take(step)
        return str(self._pending.reason) if self._pending.skipped else None

    def settle(self) -> None:
        if self._pending is None or self._pending.skipped:
            return
        reached = self._pending.wait(timeout_s=self._wait_s)
        if reached < 1:
            raise RuntimeError(f"step {self._pending.step} was taken and is not kept: {self._pending.reason}")

    def keeper(self) -> Keeper | None:
        status = self._snapshots.status()
        return Keeper(status.keeper.pid, len(status.ranks[0].slots))


@contextmanager
def open_keepstep(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    import keepstep

    config = keepstep.Config(run_id=os.environ["KEEPSTEP_RUN_ID"])
    with keepstep.Snapshotter(workload.state, config) as snapshots:
        snapshots.restore()
        wait_for_grant(snapshots)
        yield _Keepstep(snapshots, wait_s)


class _KeepstepWithLoader(_Keepstep):
    """In mid-epoch of a Loader, as `batches` takes; the next batch is fetched beside the clock."""

    def __init__(self, snapshots: Any, wait_s: float, batches: Iterator[Any]) -> None:
        super().__init__(snapshots, wait_s)
        self._batches = batches
        next(batches)

    def settle(self) -> None:
        super().settle()
        next(self._batches)


class _Noise(torch.utils.data.Dataset[torch.Tensor]):
    """Draws in the worker, so that its random states are part of each snapshot."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8)


@contextmanager
def open_keepstep_with_loader(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    """With the position of a loader in the state: shuffled, two workers that draw."""
    import keepstep

    config = keepstep.Config(run_id=os.environ["KEEPSTEP_RUN_ID"])
    loader = keepstep.Loader(torch.utils.data.DataLoader(_Noise(), shuffle=True, num_workers=2))
    with keepstep.Snapshotter(workload.state, config, loader=loader) as snapshots:
        snapshots.restore()
        wait_for_grant(snapshots)
        yield _KeepstepWithLoader(snapshots, wait_s, iter(loader))


@contextmanager
def open_keepstep_without_seals(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    """The copy alone: a keeper that reports every snapshot as sealed and reads none."""
    subprocess.run([sys.executable, str(Path(__file__).with_name("keeper_without_seals.py"))], check=True)
    with open_keepstep(workload, directory, wait_s) as saver:
        yield saver


class _DcpAsync(_Blocking):
    """`dcp.async_save`, as documented: the call stages a copy and returns; writing goes on behind it."""

    def __init__(self, workload: Workload, directory: Path, wait_s: float, **options: Any) -> None:
        super().__init__(lambda step: None)
        self._workload, self._directory, self._wait_s, self._options = workload, directory, wait_s, options
        self._target = directory / "step-0"
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> str | None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._target = self._directory / f"step-{step}"
        answer = async_save(self._workload.state, checkpoint_id=self._target, **self._options)
        if isinstance(answer, Future):
            self._written = answer
        else:
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        return None

    def fence(self) -> None:
        if self._staged is not None:
            self._staged.result(self._wait_s)
            self._staged = None

    def settle(self) -> None:
        if self._written is not None:
            self._written.result(self._wait_s)
            self._written = None

    def discard(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)


@contextmanager
def _single_process_group(directory: Path) -> Iterator[None]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def open_dcp_thread(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    with _single_process_group(directory):
        yield _DcpAsync(workload, directory, wait_s)


@contextmanager
def open_dcp_process(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    with _single_process_group(directory):
        yield _DcpAsync(workload, directory, wait_s, async_checkpointer_type=AsyncCheckpointerType.PROCESS)


@contextmanager
def open_dcp_async_staging(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    """DCP at its best: a stager that is kept between saves and copies in a thread of its own."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    try:
        with _single_process_group(directory):
            yield _DcpAsync(
                workload,
                directory,
                wait_s,
                async_stager=stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
    finally:
        stager.close()


@contextmanager
def open_torch_save(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    target = directory / "state.pt"

    def save(step: int) -> None:
        torch.save({name: part.state_dict() for name, part in workload.state.items()}, target)

    yield _Blocking(save, writes=target)


class _LmResiliency(_Blocking):
    def __init__(self, manager: Any, workload: Workload) -> None:
        super().__init__(
            lambda step: manager.save({name: part.state_dict() for name, part in workload.state.items()}, step)
        )
        self._manager = manager

    def fence(self) -> None:
        self._manager.maybe_wait()

    def settle(self) -> None:
        self._manager.finalize_replication()


@contextmanager
def open_lm_resiliency(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    from lm_resiliency import InMemoryCkptConfig  # type: ignore[import-not-found]
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager  # type: ignore[import-not-found]

    config = InMemoryCkptConfig(
        interval=1, disk_flush_interval=0, disk_folder=str(directory), run_id="bench", pin_memory=False
    )
    manager = InMemoryCheckpointManager(config)
    try:
        yield _LmResiliency(manager, workload)
    finally:
        manager.close()


@contextmanager
def open_dlrover(workload: Workload, directory: Path, wait_s: float) -> Iterator[Saver]:
    """Saves to memory only. Its segment outlives it by design, so it is unlinked here through its engine."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # type: ignore[import-not-found]
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # type: ignore[import-not-found]

    checkpointer = DdpCheckpointer(str(directory))

    def save(step: int) -> None:
        state = {name: part.state_dict() for name, part in workload.state.items()}
        checkpointer.save_checkpoint(step, state, str(directory / "state.pt"), storage_type=StorageType.MEMORY)

    try:
        yield _Blocking(save)
    finally:
        checkpointer._engine._shm_handler.unlink()
        checkpointer._engine.close()
        shutil.rmtree(Path("/tmp/ckpt_sock") / os.environ["TORCHELASTIC_RUN_ID"], ignore_errors=True)


OPENERS: dict[str, Opener] = {
    "keepstep": open_keepstep,
    "keepstep-loader": open_keepstep_with_loader,
    "keepstep-copy-alone": open_keepstep_without_seals,
    "dcp-thread": open_dcp_thread,
    "dcp-process": open_dcp_process,
    "dcp-async-staging": open_dcp_async_staging,
    "torch-save": open_torch_save,
    "lm-resiliency": open_lm_resiliency,
    "dlrover": open_dlrover,
}
