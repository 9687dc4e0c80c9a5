"""The accelerate adapter under SIGKILL at the instants that random kills do not reach, for each way to load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from accelerate_runs import AccelerateServer, compare_with_bare

# Ten batches in an epoch. `backward` comes after the snapshot of the batch before, `step` before that of its own.
KILLS = ["0.3:backward", "0.8:step", "0.9:step", "0.end:evaluation", "1.0:step", "1.1:backward", "1.9:backward"]
SHORT = [kill.replace("0.9", "0.7").replace("1.9", "1.8") for kill in KILLS]  # nine batches
# Five batches in an epoch of each rank.
OF_TWO = [
    "1@0.1:step", "0@0.3:backward", "1@0.4:backward", "1@0.end:evaluation", "0@1.0:step", "0@1.1:backward", "1@1.4:step"
]  # fmt: skip

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in order": {"shuffle": False},
    "accumulation of two": {"accumulate": 2},
    "accumulation of three": {"accumulate": 3},
    "accumulation across epochs": {"accumulate": 3, "across_epochs": True, "epochs": 3},
    "evaluation in the epoch": {"evaluate_every": 3},
    "workers": {"workers": 2, "noise": False},
    "workers and an evaluation": {"workers": 2, "noise": False, "evaluate_every": 3, "accumulate": 2},
    "persistent workers": {"workers": 2, "noise": False, "persistent": True, "epochs": 3},
    "persistent workers, own generator": {
        "workers": 2, "noise": False, "persistent": True, "epochs": 3, "own_generator": True
    },
    "seedable sampler": {"seedable": True},
    "own generator": {"own_generator": True},
    "dispatched": {"dispatch": True},
    "dispatched, seedable": {"dispatch": True, "seedable": True, "accumulate": 2},
    "stateful": {"stateful": True},
    "stateful, own generator": {"stateful": True, "own_generator": True, "accumulate": 3},
    "stateful, dispatched": {"stateful": True, "dispatch": True},
}  # fmt: skip

# Four batches in an epoch of each rank.
OF_THREE = ["0@0.2:backward", "2@0.3:backward", "1@0.end:evaluation", "0@1.0:step", "2@1.1:backward", "1@1.3:step"]

TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation of two": {"accumulate": 2},
    "dispatched": {"dispatch": True},
    "seedable sampler, evaluation": {"seedable": True, "evaluate_every": 2},
    "workers": {"workers": 2, "noise": False},
    "stateful, evaluation": {"stateful": True, "evaluate_every": 2},
}


@pytest.fixture(scope="module")
def server() -> Iterator[AccelerateServer]:
    this = AccelerateServer()
    yield this
    this.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_killed_loop_ends_as_the_loop_without_keepstep(name: str, server: AccelerateServer) -> None:
    compare_with_bare(server, KILLS, **ONE_PROCESS[name])


@pytest.mark.timeout(600)
def test_kills_around_a_batch_that_is_left_out(server: AccelerateServer) -> None:
    compare_with_bare(server, SHORT, drop_last=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"workers": 2, "noise": False, "accumulate": 2}], ids=["plain", "workers"])
def test_kill_at_every_batch_of_two_epochs(options: dict[str, Any], server: AccelerateServer) -> None:
    every = [f"{epoch}.{batch}:backward" for epoch in range(2) for batch in range(10)]
    compare_with_bare(server, every[2:], **options)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_killed_ranks_end_as_those_without_keepstep(name: str, server: AccelerateServer) -> None:
    kills = OF_TWO[1:] if "accumulate" in TWO_PROCESSES[name] else OF_TWO
    compare_with_bare(server, kills, ranks=2, **TWO_PROCESSES[name])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "evaluate_every": 3}], ids=["plain", "accumulation"])
def test_three_ranks_sum_in_the_same_order_after_a_restore(options: dict[str, Any], server: AccelerateServer) -> None:
    compare_with_bare(server, OF_THREE, ranks=3, **options)
