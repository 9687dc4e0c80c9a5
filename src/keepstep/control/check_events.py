"""What `keepstep check` and the trainers under it write for each other, as files in one directory per run.

    orders.json     written by the check before the run: where the run ends, where a trainer is killed
    rank-R.jsonl    one line per event of a trainer of that rank, appended by all that follow each other
    killed-N        order N was carried out: it is not carried out again after the restart

`KEEPSTEP_CHECK` names the directory. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

CHECK = "KEEPSTEP_CHECK"
ORDERS = "orders.json"

# The moments of a kill at step s: in `take(s)` before anything is captured, in `take(s)` when the snapshot is complete,
# at a random moment between `take(s)` and the next, or in the first evaluation after `take(s)`.
BEFORE, AFTER, WITHIN, EVALUATION = "before", "after", "within", "evaluation"

OPENED, RESTORED, REFUSED, TAKE, KEPT, SKIPPED, KILLED, REACHED = (
    "opened", "restored", "refused", "take", "kept", "skipped", "killed", "reached"
)  # fmt: skip

# What is not in the state, by kind.
MODULE, OPTIMIZER, SCHEDULER, BUFFER, GENERATOR, TENSOR, VARIABLE, WORKERS = (
    "module", "optimizer", "scheduler", "buffer", "generator", "tensor", "variable", "workers"
)  # fmt: skip


class KillOrder(msgspec.Struct, frozen=True):
    """One SIGKILL of one trainer."""

    number: int
    rank: int
    step: int
    moment: str


class CheckOrders(msgspec.Struct, frozen=True):
    """What the trainers of a run do besides training."""

    takes: int = 0  # the run ends at this many different steps; 0: no limit
    last_step: int = -1  # the run ends at this step; -1: no limit
    kills: tuple[KillOrder, ...] = ()


class StepTrace(msgspec.Struct, frozen=True):
    """What led to one `take`, since the one before it."""

    state: dict[str, str] = {}  # at the first forward pass
    around: dict[str, str] = {}
    inputs: tuple[str, ...] = ()  # tensors that the modules of the state were called with
    evaluations: int = 0  # forward passes without gradients
    evaluated_first: bool = False  # some of them before the first one with gradients
    stepped: bool = False  # whether an optimizer stepped
    drawn: bool = False  # whether random numbers were drawn between the end of its step and `take`
    in_batches: bool = False  # `Snapshotter.batches` made this `take`


class TrainerEvent(msgspec.Struct, frozen=True):
    """One line of a trainer."""

    kind: str
    at: float
    pid: int
    rank: int
    world_size: int
    step: int = -1
    text: str = ""
    state: dict[str, str] = {}  # by path: a short value as it is, anything else as its digest
    around: dict[str, str] = {}  # the same of what is not in the state, by `<kind> <path>`
    trace: StepTrace = StepTrace()
    output: str = ""  # the file that standard output is, and how long it was
    output_bytes: int = -1


def record_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.jsonl"


def killed_path(directory: Path, order: KillOrder) -> Path:
    return directory / f"killed-{order.number}"


def read_orders(directory: Path) -> CheckOrders:
    return msgspec.json.decode((directory / ORDERS).read_bytes(), type=CheckOrders)


def write_orders(directory: Path, orders: CheckOrders) -> None:
    (directory / ORDERS).write_bytes(msgspec.json.encode(orders))
