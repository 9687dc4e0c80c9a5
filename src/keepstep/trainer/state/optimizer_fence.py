"""Optimizer fence: tensors of an optimizer may be copied while training goes on, until it steps again.

A tensor is read-only from the end of one `optimizer.step()` to the start of the next. The global pre-hook of
torch.optim marks that start, so it waits there for copies that still read what this optimizer will overwrite. Tensor
version counters prove nothing (fused optimizers, foreach moments, CUDA graphs and `.data` do not bump them), so a fence
is trusted only if its hook fired since the last `take`. Code that writes the state without an Optimizer announces it
with `before_update()`, which waits in the same way. What is not fenced is copied inside `take`.

The hook never raises and never ends the step: a fault of keepstep must not be one of the training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from keepstep.trainer.state.dtensors import is_dtensor

log = logging.getLogger("keepstep")

FENCE_WAIT_S = 120.0  # A copy that takes longer is stuck: the step goes on, and the snapshot is void.


class DeviceReads(Protocol):
    """Copies of one snapshot that a device executes."""

    def wait_on_device(self, owner: int) -> None:
        """Make the compute stream of the device wait for its reads of what this optimizer owns."""


class CopyGate:
    """Copies of one snapshot that read what one optimizer owns: on the host, and on these devices."""

    def __init__(self, owner: int, device_reads: Sequence[DeviceReads] = ()) -> None:
        self._owner, self._device_reads = owner, device_reads
        self.done = threading.Event()  # Set when every copy is done (host) or queued (device).
        self.waited_for = threading.Event()  # Set when an optimizer waits: rate caps and extra checks stop.
        self.broken = ""
        self._device_waits = False

    @property
    def open(self) -> bool:
        """Whether a copy may still read that the optimizer does not wait for yet."""
        return not (self.done.is_set() and (self._device_waits or not self._device_reads))

    def wait(self) -> float:
        """Block until the copies no longer read; returns the seconds waited."""
        if not self.done.is_set():
            started = time.perf_counter()
            self.waited_for.set()
            if not self.done.wait(FENCE_WAIT_S):
                self.broken = f"the copy did not end within {FENCE_WAIT_S:g} s"
            waited = time.perf_counter() - started
        else:
            waited = 0.0
        if self._device_reads and _is_capturing():
            self.broken = "the optimizer's step is being captured into a CUDA graph"
            return waited
        for reads in self._device_reads:
            reads.wait_on_device(self._owner)
        self._device_waits = True
        return waited


class ReadCounter:
    """Lets each optimizer write once every copy that reads what it owns is done (host) or queued (device)."""

    def __init__(self, gates: Mapping[int, CopyGate], readers: Sequence[frozenset[int]]) -> None:
        """`readers`: for each copy, the optimizers that own what it reads."""
        self.gates = gates
        self._left = {index: sum(index in owners for owners in readers) for index in gates}

    @property
    def waited_for(self) -> bool:
        """Whether an optimizer waits for this snapshot."""
        return any(gate.waited_for.is_set() for gate in self.gates.values())

    def release(self, index: int) -> None:
        """Count one copy that no longer reads what this optimizer owns."""
        self._left[index] -= 1
        if self._left[index] == 0:
            self.gates[index].done.set()


class WatchedWriter:
    """Something that writes the state: whether it announces that, and the gate that it must wait at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fired = 0  # Announcements since the last `take`.
        self.untrusted_reason = ""  # Why its tensors are copied inside `take` from now on.
        self.gate: CopyGate | None = None

    @property
    def trusted(self) -> bool:
        return self.fired > 0 and not self.untrusted_reason

    @property
    def writes(self) -> str:
        """The only place that may write what it owns, for messages."""
        return f"{self.name}.step()"

    def storages(self, small_bytes: int) -> set[int]:
        """Storage addresses of everything that it writes after an announcement."""
        raise NotImplementedError


class WatchedUpdates(WatchedWriter):
    """All code that calls `before_update()`. It may write what no optimizer owns, except what others write too."""

    def __init__(self) -> None:
        super().__init__("before_update()")
        self._covered: list[torch.Tensor] = []
        self._others: set[int] = set()

    def cover(self, tensors: list[torch.Tensor], others: set[int]) -> None:
        """`others`: storages that optimizers own, or that are written without an announcement."""
        self._covered, self._others = tensors, others

    @property
    def writes(self) -> str:
        return f"what {self.name} announces"

    def storages(self, small_bytes: int) -> set[int]:
        owned: set[int] = set()
        _add_storages(self._covered, owned, above_bytes=small_bytes)
        return owned - self._others


class WatchedOptimizer(WatchedWriter):
    """One optimizer: its hook announces its writes."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, modules: Iterable[torch.nn.Module] = ()) -> None:
        super().__init__(name)
        self.optimizer = optimizer
        self._modules = list(modules)

    @property
    def trusted(self) -> bool:
        return super().trusted and not self._captured()

    def _captured(self) -> bool:
        return any(group.get("capturable") for group in self.optimizer.param_groups) and _is_capturing()

    def storages(self, small_bytes: int) -> set[int]:
        """Storage addresses of everything this optimizer writes in its step.

        Of its groups also momentum and the like (NorMuon), but nothing small: schedulers write `lr` and `betas`, which
        may be tensors, at any time.
        """
        owned: set[int] = set()
        for group in self.optimizer.param_groups:
            _add_storages(group["params"], owned)
            _add_storages([value for key, value in group.items() if key != "params"], owned, above_bytes=small_bytes)
        for state in self.optimizer.state.values():
            _add_storages(state, owned)
        return owned - _written_in_forward(self._modules)


class OptimizerFence:
    """All optimizers of the state behind one global hook, and what else announces its writes."""

    def __init__(
        self, optimizers: Iterable[tuple[str, torch.optim.Optimizer]], modules: Iterable[torch.nn.Module] = ()
    ) -> None:
        self._modules = list(modules)
        self.optimizers = [WatchedOptimizer(optimizer, name, self._modules) for name, optimizer in optimizers]
        self._updates = WatchedUpdates()
        self.watched: list[WatchedWriter] = [*self.optimizers, self._updates]
        self._by_id = {id(w.optimizer): w for w in self.optimizers}
        self.waited_s = 0.0
        self._stepped = False
        self.muted = False  # Set while keepstep itself steps an optimizer (arena_size).
        self._handles: list[RemovableHandle] = []
        if self.optimizers:  # Where there is an optimizer torch has imported its compiler, which takes a second.
            # torch.compile traces hooks too, and would compile the step anew for every value of a counter in here.
            outside = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._handles.append(register_optimizer_step_pre_hook(outside))

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the last `take`, or there is none that could be seen to."""
        return self._stepped or not self.optimizers

    def take_stepped(self) -> bool:
        """Whether any optimizer has stepped since the last call, which each `take` makes, captured or not."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def owned(self) -> list[list[list[int]]]:
        """Identities of the parameters that each optimizer steps: they decide which fence covers which tensor."""
        return [[list(map(id, group["params"])) for group in w.optimizer.param_groups] for w in self.optimizers]

    def cover(self, tensors: Iterable[torch.Tensor], small_bytes: int) -> None:
        """Take these tensors as what `before_update()` announces, for plans that are made from now on.

        Not what optimizers own, nor buffers, which forward writes.
        """
        others = _written_in_forward(self._modules).union(*(w.storages(small_bytes) for w in self.optimizers))
        for module in self._modules:
            _add_storages(list(module.buffers()), others)
        self._updates.cover(list(tensors), others)

    def before_update(self) -> None:
        """Wait until no copy reads live tensors. Never raises."""
        self._updates.fired += 1
        self._stepped = True
        for watched in self.watched:
            if watched.gate is None:
                continue
            try:
                self._wait(watched.gate)
            except Exception:
                log.exception("the fence of %s failed; the snapshot in flight is void", watched.name)
                watched.untrusted_reason = watched.gate.broken = "its fence failed"

    def arm(self, gates: dict[int, CopyGate]) -> None:
        """Begin a new snapshot: `gates` by index of the optimizer. Counts start again."""
        for index, watched in enumerate(self.watched):
            watched.gate = gates.get(index)
            watched.fired = 0

    def close(self) -> None:
        self._updates.cover([], set())
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        watched = self._by_id.get(id(optimizer))
        if watched is None or self.muted:
            return None
        try:
            return self._fence(watched, args, kwargs)
        except Exception:
            log.exception("the fence of %s failed; the snapshot in flight is void", watched.name)
            watched.untrusted_reason = "its fence failed"
            if watched.gate is not None:
                watched.gate.broken = "the fence failed"
            return None

    def _fence(self, watched: WatchedOptimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        watched.fired += 1
        self._stepped = True
        gate = watched.gate
        if gate is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # torch's own optimizers call the closure, with forward and backward in it, before they write:
        # waiting behind it keeps the overlap (Lightning). Others (SAM) may write first.
        if closure is None or not type(watched.optimizer).__module__.startswith("torch.optim"):
            self._wait(gate)
            return None
        deferred = self._after(closure, gate)
        if len(args) > 1:
            return (args[0], deferred, *args[2:]), kwargs
        return args, {**kwargs, "closure": deferred}

    def _after(self, closure: Callable[..., Any], gate: CopyGate) -> Callable[..., Any]:
        def closure_then_wait(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            self._wait(gate)
            return result

        return closure_then_wait

    def _wait(self, gate: CopyGate) -> None:
        self.waited_s += gate.wait()


def _written_in_forward(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Weights that `max_norm` rescales in forward, row by row: no hook fires, and samples would hardly show it."""
    weights: set[int] = set()
    for module in modules:
        for part in module.modules():
            if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.max_norm is not None:
                _add_storages(part.weight, weights)
    return weights


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _add_storages(value: Any, owned: set[int], above_bytes: int = 0) -> None:
    if is_dtensor(value):
        value = value._local_tensor
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.nbytes > above_bytes:
            owned.add(value.untyped_storage().data_ptr())
    elif isinstance(value, dict):
        for item in value.values():
            _add_storages(item, owned, above_bytes)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_storages(item, owned, above_bytes)
