"""Random states of loader workers, so that data which is augmented in them is the same after a restore.

A worker reports its states with each batch for which it drew: the collate function, which runs in the worker, adds
them. After a restore the function that initialises a worker sets them. A worker that draws nothing reports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from keepstep.trainer.data.order_state import marks, note_state, set_noted
from keepstep.trainer.state.loaders import worker_generators
from keepstep.trainer.state.rng import Generator


class WorkerBatch(NamedTuple):
    """A batch, and the random states of its worker after it. A tuple: that is what torch can pin.

    The states are a tensor of bytes, which travels in shared memory: they would fill the pipe of the worker, and a
    worker whose trainer was killed cannot end before its pipe is empty.
    """

    batch: Any
    worker: int
    states: torch.Tensor


@dataclass
class _ThisWorker:
    """What this worker process knows. Unused in the training process."""

    generators: list[Generator] = field(default_factory=list)
    mark: Any = None  # of the states at the last report
    num_pads: int = 0  # Empty batches that are still to come.


_this_worker = _ThisWorker()


def without_reports(iterator: Iterator[Any], states: dict[int, bytes]) -> Iterator[Any]:
    """The batches of an iterator; what a worker reported is written into `states` when its batch is given."""
    for batch in iterator:
        if type(batch) is WorkerBatch:
            states[batch.worker] = batch.states.numpy().tobytes()
            yield batch.batch
        else:
            yield batch


class WorkerStart:
    """Initialises a worker: as the user wants it, then with the random states of the snapshot."""

    def __init__(self, initialise: Callable[[int], None] | None, collate: Any) -> None:
        self._initialise, self._collate = initialise, collate
        self.states: dict[int, bytes] = {}  # by worker
        self.num_pads = 0

    def __call__(self, worker: int) -> None:
        if self._initialise is not None:
            self._initialise(worker)
        info = get_worker_info()
        assert info is not None, "called in workers only"
        _this_worker.generators = worker_generators(info.dataset, self._collate)
        if worker in self.states:
            set_noted(self.states[worker], _this_worker.generators)
        _this_worker.num_pads = int(worker < self.num_pads)
        _this_worker.mark = marks(_this_worker.generators)


class ReportingCollate:
    """The collate function of the user, with a report where the worker drew."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        if _this_worker.num_pads and isinstance(samples, list) and not samples:
            _this_worker.num_pads -= 1
            return None
        batch = self._collate(samples)
        mark = marks(_this_worker.generators)
        if mark == _this_worker.mark:
            return batch
        _this_worker.mark = mark
        info = get_worker_info()
        assert info is not None, "called in workers only"
        states = bytearray(note_state(_this_worker.generators))
        return WorkerBatch(batch, info.id, torch.frombuffer(states, dtype=torch.uint8))
