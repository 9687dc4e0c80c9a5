"""transformers' Trainer with keepstep, killed at each moment of a step, an epoch and an evaluation: nothing differs.

26 batches of 2 an epoch, 13 steps of 2 batches, where a trial says nothing else. Each run that is killed is compared
with one without keepstep: parameters, optimizer, scheduler, losses, random states, logged history.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from transformers_trials import Place, Server, Trial, check_lives, compare, run_torchrun, run_trial

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(900)

EVERY_7_STEPS = {"eval_strategy": "steps", "eval_steps": 7}
TRIALS = {
    "around the ends of epochs": Trial(
        "1:took 12:took 13:took 14:took 25:took 26:took 27:took 38:took 39:took", {"noise": True}
    ),
    "between the batches of a step": Trial(
        "1:substep 7:substep 12:begin 13:substep 14:substep 33:substep", {"noise": True, "samples": 50}
    ),
    "evaluation every 7 steps": Trial(
        "7:evaluating 7:begin 13:took 14:evaluating 21:took 28:evaluating 39:evaluating", {"noise": True},
        EVERY_7_STEPS,
    ),
    "evaluation at the end of epochs": Trial(
        "12:took 13:evaluating 13:took 14:begin 26:evaluating 39:evaluating 39:end", {},
        {"eval_strategy": "epoch", "eval_on_start": True, "logging_strategy": "epoch"},
    ),
    "checkpoints, best model, early stop": Trial(
        "7:evaluating 7:save 13:took 14:save 20:substep 21:evaluating", {"patience": 2},
        {
            **EVERY_7_STEPS, "save_strategy": "steps", "save_steps": 7, "load_best_model_at_end": True,
            "metric_for_best_model": "loss", "learning_rate": 0.2, "save_total_limit": 2,
        },
    ),
    "2 workers": Trial("5:took 12:took 13:took 14:begin 20:substep 26:epoch_end", {"workers": 2}, EVERY_7_STEPS),
    "2 workers that stay": Trial(
        "5:took 13:took 14:begin 20:substep 26:took 26:begin", {"workers": 2},
        {**EVERY_7_STEPS, "dataloader_persistent_workers": True},
    ),
    "order from the global random state": Trial(
        "3:took 12:took 13:took 15:substep 26:epoch_end", {"seedable": False, "noise": True}
    ),
    "an instance, every 5th step": Trial("4:took 7:took 13:took 14:substep 31:took", {"every": 5, "noise": True}),
    "an epoch that a callback ends": Trial(
        "5:took 8:epoch_end 8:took 9:begin 20:substep 21:took", {"stop_epoch_at": 8, "noise": True}
    ),
    "a last epoch that ends in its middle": Trial(
        "3:took 9:begin 13:took 19:substep 20:took 20:end", {},
        {"max_steps": 20, **EVERY_7_STEPS, "lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0},
    ),
    "no accumulation, whole batches": Trial(
        "24:took 25:took 26:epoch_end 26:took 27:begin", {"accumulation": 1, "samples": 53, "epochs": 1.5},
        {"dataloader_drop_last": True, "include_num_input_tokens_seen": "all", "optim": "adafactor"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    this = Server()
    yield this
    this.close()


@pytest.fixture
def places() -> Iterator[list[Place]]:
    made: list[Place] = []
    yield made
    for place in made:
        place.clear()


@pytest.mark.parametrize("name", TRIALS)
def test_trainer_that_is_killed_ends_as_the_one_without_keepstep(
    name: str, server: Server, places: list[Place]
) -> None:
    run_trial(TRIALS[name], server, places, kept="instance" if "instance" in name else "class")


def test_ddp_on_two_ranks(server: Server, places: list[Place]) -> None:
    kills = "0@3:substep 1@7:evaluating 0@13:took 1@13:begin 0@20:took 1@26:epoch_end"
    run_trial(Trial(kills, {"noise": True, "samples": 104}, EVERY_7_STEPS, ranks=2), server, places)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_ddp_on_three_ranks_rehearses_by_itself(accumulation: int, server: Server, places: list[Place]) -> None:
    kills = "0@3:took 2@5:took 1@6:begin"
    life = {"accumulation": accumulation, "samples": 50 * accumulation, "epochs": 1}
    options = {"ddp_find_unused_parameters": False}  # with it DDP sums in one order from the first step on
    run_trial(Trial(kills, life, options, ranks=3), server, places)


def test_job_under_torchrun(places: list[Place]) -> None:
    trial = Trial(
        "0@3:substep 1@7:evaluating 0@13:took 1@13:begin 0@20:took 1@26:epoch_end", {"noise": True, "samples": 104},
        EVERY_7_STEPS, ranks=2,
    )  # fmt: skip
    bare, killed = Place(), Place()
    places += [bare, killed]
    run_torchrun(trial.request(bare, kept=""), bare, trial.ranks)
    run_torchrun(trial.request(killed, kept="class", kills=tuple(trial.kills.split())), killed, trial.ranks)
    killed.check_no_trace()
    check_lives(trial, killed)
    compare(bare, killed, trial.ranks)


def test_memory_goes_before_the_checkpoint_and_the_checkpoint_is_loaded_without_it(
    server: Server, places: list[Place]
) -> None:
    """A checkpoint that a kill left half written is not looked at while there is a snapshot."""
    options = {"save_strategy": "steps", "save_steps": 5, **EVERY_7_STEPS}
    truth, memory, disk, bare = Place(), Place(), Place(), Place()
    places += [truth, memory, disk, bare]
    trial = Trial("5:save 8:took 12:begin", {"epochs": 1}, options)
    server.finish(trial.request(truth, kept=""), truth)

    life = trial.request(memory, kept="class", kills=tuple(trial.kills.split()))
    assert server.live(life, memory, 1) == [-9]
    (memory.out / "checkpoints" / "checkpoint-5" / "trainer_state.json").write_text("half")
    server.finish({**life, "resume": True}, memory)
    check_lives(trial, memory)
    compare(truth, memory, 1)

    for place in (disk, bare):
        shutil.copytree(truth.out / "checkpoints", place.out / "checkpoints")
        shutil.rmtree(place.out / "checkpoints" / "checkpoint-10")
        shutil.rmtree(place.out / "checkpoints" / "checkpoint-13")
    server.finish({**trial.request(bare, kept=""), "resume": True}, bare)
    from_disk = Trial("8:took 12:substep", trial.life, options)
    life = from_disk.request(disk, kept="class", kills=tuple(from_disk.kills.split()))
    server.finish({**life, "resume": True}, disk)
    check_lives(from_disk, disk)
    compare(bare, disk, 1)
