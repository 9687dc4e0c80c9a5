"""What is found around the state, and that the state itself is not."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from keepstep.trainer.check.surroundings import read_surroundings
from keepstep.trainer.state.objects import StateObjects


class Average:
    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


class Normalised(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.calls = 0


def surroundings_of(state: dict[str, Any], **variables: Any) -> dict[str, str]:
    def train(variables: dict[str, Any]) -> dict[str, str]:
        return read_surroundings(StateObjects(state))

    return {path.replace("train.variables.", ""): text for path, text in train(variables).items() if "train." in path}


@pytest.mark.parametrize(
    ("thing", "key"),
    [
        (lambda model: Average(model), "tensor thing.shadow.weight"),
        (lambda model: copy.deepcopy(model), "module thing.weight"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.5), "optimizer thing.groups.0.lr"),
        (lambda model: torch.Generator(), "generator thing"),
        (lambda model: random.Random(1), "generator thing"),
        (lambda model: [3, 4], "variable thing"),
        (lambda model: torch.tensor(1.5), "variable thing"),
        (lambda model: torch.ones(3), "tensor thing"),
        (lambda model: torch.utils.data.DataLoader([1, 2], num_workers=2), "workers thing"),
    ],
)
def test_what_is_outside_the_state_is_found_with_its_kind(thing: Any, key: str) -> None:
    model = torch.nn.Linear(2, 2)
    assert key in surroundings_of({"model": model}, thing=thing(model))


def test_state_is_not_around_itself() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    wrapped = torch.nn.Sequential(model)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    found = surroundings_of({"model": model, "optimizer": optimizer}, wrapped=wrapped, again=optimizer, part=momentum)
    assert found == {}


def test_buffers_and_attributes_that_state_dict_leaves_out_are_found() -> None:
    model = Normalised()
    found = read_surroundings(StateObjects({"model": model}))
    assert "buffer model.hidden" in found
    assert found["variable model.calls"] == "0"


def test_change_of_a_value_changes_its_digest() -> None:
    model = torch.nn.Linear(2, 2)
    average = Average(model)
    before = surroundings_of({"model": model}, average=average)
    average.shadow["weight"].add_(1)
    after = surroundings_of({"model": model}, average=average)
    assert [path for path in before if before[path] != after[path]] == ["tensor average.shadow.weight"]


def test_object_that_raises_when_it_is_looked_at_does_no_harm() -> None:
    class Odd:
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    found = surroundings_of({"model": torch.nn.Linear(2, 2)}, odd=Odd(), plain=3)
    assert found.get("variable plain", "3") == "3"
