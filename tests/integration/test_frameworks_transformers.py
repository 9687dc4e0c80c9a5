"""transformers' Trainer with keepstep: killed anywhere, it ends as the run without keepstep. More in tests/chaos."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers_trials import Place, Server, Trial, run_trial

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)


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


def test_trainer_that_is_killed_anywhere_ends_as_the_one_without_keepstep(server: Server, places: list[Place]) -> None:
    trial = Trial(
        "3:substep 7:evaluating 9:took 13:epoch_end 13:took 14:begin 26:end",
        life={"noise": True, "epochs": 2}, options={"eval_strategy": "steps", "eval_steps": 7},
    )  # fmt: skip
    run_trial(trial, server, places)
