"""Other ways to save the same state in the same loop, each behind a few calls.

A contender is a context manager that yields a `Contender` and leaves nothing behind. Files go to a directory on tmpfs.
Lost time covers all of the background work: steps go on until it is over, and are compared with steps without it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Device, Saving, lost_in, run_block, spread
from results import Results, say
from sizes import Task
from workloads import Workload

WAIT_S = 120.0
ALONE_STEPS = 8
LEAST_STEPS = 4
"""a block with a snapshot is never shorter, however soon the work is over"""


class Contender:
    """A blocking `save`; the others change what they do differently."""

    def __init__(self, save: Callable[[int], Any]) -> None:
        self._save = save

    def save(self, step: int) -> None:
        self._save(step)

    def fence(self) -> None:
        """Before the next update: wait for copies that still read the state."""

    def is_busy(self) -> bool:
        return False

    def discard(self) -> None:
        """Remove what the last `save` wrote; raises what went wrong behind it. Never timed."""


Opener = Callable[[Workload, Device, Path], AbstractContextManager[Contender]]


def state_of(workload: Workload) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in workload.state.items()}


@contextmanager
def open_copy_and_wait(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    """Synchronise, copy everything into pinned memory, go on: what anybody writes in five lines."""
    sources = workload.tensors()
    targets = [torch.empty_like(source, device="cpu", pin_memory=device.is_cuda) for source in sources]

    def save(step: int) -> None:
        device.synchronize()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        device.synchronize()

    yield Contender(save)


# torch.distributed.checkpoint


class _Dcp(Contender):
    """`dcp.async_save`, as documented: the call stages a copy and returns; writing goes on behind it."""

    def __init__(self, workload: Workload, directory: Path, **options: Any) -> None:
        super().__init__(lambda step: None)
        self._workload, self._directory, self._options = workload, directory, options
        self._target = directory / "step-0"
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._target = self._directory / f"step-{step}"
        answer = async_save(self._workload.state, checkpoint_id=self._target, **self._options)
        if isinstance(answer, Future):
            self._written = answer
        else:
            self._staged, self._written = answer.staging_completion, answer.upload_completion

    def fence(self) -> None:
        if self._staged is not None:
            self._staged.result(WAIT_S)
            self._staged = None

    def is_busy(self) -> bool:
        return self._written is not None and not self._written.done()

    def discard(self) -> None:
        if self._written is not None:
            self._written.result(WAIT_S)
            self._written = None
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
def open_dcp_thread(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    with _single_process_group(directory):
        yield _Dcp(workload, directory)


@contextmanager
def open_dcp_pinned(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    """DCP at its best: a stager that copies into pinned, shared memory in a thread, and a process that writes."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    options = StagingOptions(use_pinned_memory=device.is_cuda, use_non_blocking_copy=device.is_cuda)
    stager = DefaultStager(options)
    try:
        with _single_process_group(directory):
            kind = AsyncCheckpointerType.PROCESS
            yield _Dcp(workload, directory, async_stager=stager, async_checkpointer_type=kind)
    finally:
        stager.close()


# Packages that may be there


class _TorchCheckpointing(_Dcp):
    def __init__(self, workload: Workload, directory: Path, manager: Any, base: Any, item: Any) -> None:
        super().__init__(workload, directory)
        self._manager = manager

        class State(base):  # type: ignore[misc, valid-type]
            def get_items(self) -> dict[str, Any]:
                return {name: item(value=part) for name, part in state_of(workload).items()}

            def load_state_dict(self, state_dict: Any) -> None:
                raise NotImplementedError

        self._state = State()

    def save(self, step: int) -> None:
        self._target = self._directory / f"step-{step}"
        self._staged, self._written = self._manager.save(str(self._target), self._state)


@contextmanager
def open_torch_checkpointing(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    from torch_checkpointing import CheckpointBase, CheckpointItem, CheckpointManager  # type: ignore[import-not-found]
    from torch_checkpointing.config import AsyncCheckpointSaverConfig  # type: ignore[import-not-found]
    from torch_checkpointing.staging import CheckpointStagerConfig  # type: ignore[import-not-found]

    staging = CheckpointStagerConfig(use_pinned_memory=device.is_cuda, use_non_blocking_copy=device.is_cuda)
    manager = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(staging_config=staging)).build()
    try:
        yield _TorchCheckpointing(workload, directory, manager, CheckpointBase, CheckpointItem)
    finally:
        manager.close()


class _LmResiliency(Contender):
    def __init__(self, manager: Any, workload: Workload) -> None:
        super().__init__(lambda step: manager.save(state_of(workload), step))
        self._manager = manager

    def fence(self) -> None:
        self._manager.maybe_wait()

    def discard(self) -> None:
        self._manager.finalize_replication()


@contextmanager
def open_lm_resiliency(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    from lm_resiliency import InMemoryCkptConfig  # type: ignore[import-not-found]
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager  # type: ignore[import-not-found]

    config = InMemoryCkptConfig(
        interval=1, disk_flush_interval=0, disk_folder=str(directory), run_id="bench", pin_memory=device.is_cuda
    )
    manager = InMemoryCheckpointManager(config)
    try:
        yield _LmResiliency(manager, workload)
    finally:
        manager.close()


@contextmanager
def open_dlrover(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    """Saves to memory only. Its segment outlives it by design, so it is unlinked here through its engine."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # type: ignore[import-not-found]
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # type: ignore[import-not-found]

    checkpointer = DdpCheckpointer(str(directory))

    def save(step: int) -> None:
        path = str(directory / "state.pt")
        checkpointer.save_checkpoint(step, state_of(workload), path, storage_type=StorageType.MEMORY)

    try:
        yield Contender(save)
    finally:
        checkpointer._engine._shm_handler.unlink()
        checkpointer._engine.close()


class _Torchsnapshot(Contender):
    def __init__(self, workload: Workload, directory: Path) -> None:
        super().__init__(lambda step: None)
        self._workload, self._directory = workload, directory
        self._target = directory / "step-0"
        self._pending: Any = None

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot  # type: ignore[import-not-found]

        self._target = self._directory / f"step-{step}"
        self._pending = Snapshot.async_take(str(self._target), self._workload.state)

    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def discard(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        shutil.rmtree(self._target, ignore_errors=True)


@contextmanager
def open_torchsnapshot(workload: Workload, device: Device, directory: Path) -> Iterator[Contender]:
    yield _Torchsnapshot(workload, directory)


OPENERS: dict[str, Opener] = {
    "copy-and-wait": open_copy_and_wait,
    "dcp-pinned": open_dcp_pinned,
    "dcp-thread": open_dcp_thread,
    "torch_checkpointing": open_torch_checkpointing,
    "lm-resiliency": open_lm_resiliency,
    "dlrover": open_dlrover,
    "torchsnapshot": open_torchsnapshot,
}


def _save(contender: Contender, step: int) -> bool:
    contender.save(step)
    return True


def measure_contender(task: Task, workload: Workload, device: Device, num_snapshots: int) -> None:
    """Blocks without, with one snapshot until its work is over, without, and so on; each snapshot is written down."""
    results, name = Results(Path(task.out), task.part), task.option
    for _ in range(task.sizes.warm_steps):
        workload.step()
    alone_steps = 2 if task.toy else ALONE_STEPS
    with OPENERS[name](workload, device, Path(task.scratch)) as contender:
        results.measure("contenders", name, "workload", value=workload.describe())
        before = run_block(workload, device, alone_steps)
        for number in range(num_snapshots):
            saving = Saving(partial(_save, contender, number), lambda index: index == 0, contender.fence)
            block = run_block(workload, device, lambda done: done < LEAST_STEPS or contender.is_busy(), saving)
            contender.discard()
            after = run_block(workload, device, alone_steps)
            found = {
                "lost_s": lost_in(block, before, after),
                "call_s": block.save_s[0],
                "until_done_s": block.wall_s,
                "step_alone_s": after.per_step_s,
                "steps_with": spread(block.step_s),
            }
            results.measure("contenders", name, "snapshots", str(number), value=found)
            lost_ms, call_ms = 1e3 * found["lost_s"], 1e3 * found["call_s"]
            say(f"{name}: snapshot {number + 1} lost {lost_ms:.1f} ms, its call took {call_ms:.1f} ms")
            before = after
