"""One measurement in a process of its own: `python child.py TASK`, started by children.py."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from contenders import measure_contender
from cost import grow_batch, measure, measure_with_limits, open_cost, state_dict_s
from measuring import Device
from profiling import profile_copies
from results import Results
from sizes import Task
from stamped import load_large, save_large, train_poisoned, train_until_killed
from workloads import LargeGpt, make_gpt, make_small

NODES = tuple(range(8))
"""the job that a trainer with shares believes to be in: one rank on each of eight nodes"""


def measure_gpt(task: Task) -> None:
    device, results = Device(task.device), _results(task)
    with open_cost(make_gpt(task.sizes.gpt, task.device), device, results, task.name, task.sizes) as cost:
        if task.every:
            measure(cost, task.cadences_of(task.sizes.cadences), 0)
            return
        measure_with_limits(cost, task.sizes.cadences, task.sizes, toy=task.toy)
        cost.crowd(task.sizes.cadences[0])
        if device.is_cuda:
            profile_copies(cost)


def measure_every_step(task: Task) -> None:
    """With a slot more: a host that runs ahead of the device takes before the last but one is sealed."""
    device, results = Device(task.device), _results(task)
    with open_cost(make_gpt(task.sizes.gpt, task.device), device, results, task.name, task.sizes) as cost:
        measure(cost, tuple(one for one in task.sizes.cadences if one.every == 1), 0)


def measure_large(task: Task) -> None:
    device, results = Device(task.device), _results(task)
    workload = LargeGpt(task.sizes.large, task.device)
    batch = grow_batch(workload, device, task.sizes.large.batch, task.sizes.large_step_s)
    results.measure(task.name, "batch", value=batch)
    with open_cost(workload, device, results, task.name, task.sizes) as cost:
        measure(cost, task.sizes.large_cadences, 2)


def measure_small(task: Task) -> None:
    device, results = Device(task.device), _results(task)
    workload = make_small(task.sizes.small, task.device)
    with open_cost(workload, device, results, task.name, task.sizes) as cost:
        measure(cost, task.sizes.small_cadences, task.sizes.quiet_snapshots)
        results.measure(task.name, "state_dict_s", value=state_dict_s(workload))


def measure_share(task: Task) -> None:
    """This process as rank 0 of eight nodes; which part of the state is its own follows from that alone."""
    from keepstep.trainer.connection.environment import World

    World.of = classmethod(lambda cls, place, environ=None: cls(0, NODES))  # type: ignore[method-assign, assignment]
    device, results = Device(task.device), _results(task)
    with open_cost(make_gpt(task.sizes.gpt, task.device), device, results, task.name, task.sizes) as cost:
        measure(cost, task.sizes.share_cadences, task.sizes.quiet_snapshots)


def measure_other(task: Task) -> None:
    workload = make_gpt(task.sizes.gpt, task.device)
    for name in task.option.split():
        num_snapshots = 1 if task.toy or name == "dcp-thread" else 2  # one of these takes half a minute
        measure_contender(replace(task, option=name), workload, Device(task.device), num_snapshots)


MEASURES: dict[str, Callable[[Task], None]] = {
    "keepstep": measure_gpt,
    "every-step": measure_every_step,
    "large": measure_large,
    "small": measure_small,
    "share": measure_share,
    "contender": measure_other,
    "train-until-killed": train_until_killed,
    "train-poisoned": train_poisoned,
    "save-large": save_large,
    "load-large": load_large,
}


def _results(task: Task) -> Results:
    return Results(Path(task.out), task.part)


def _die_with_parent() -> None:
    """A benchmark that was killed must not leave its child training on."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    task = Task.decode(sys.argv[1])
    if task.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.zeros((), device=task.device)  # the context, so that no measurement pays for it
    MEASURES[task.name](task)


if __name__ == "__main__":
    main()
