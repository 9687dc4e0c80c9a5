"""What is recorded of the way from one `take` to the next."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import torch

from keepstep.control.check_events import CheckOrders
from keepstep.trainer.check.event_log import EventLog, KillSwitch
from keepstep.trainer.check.step_watch import StepWatch
from keepstep.trainer.state.objects import StateObjects

BATCH = torch.ones(1, 2)


class Training:
    def __init__(self, directory: Path) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        objects = StateObjects({"model": self.model, "optimizer": self.optimizer})
        self.watch = StepWatch(objects, KillSwitch(EventLog(directory, 0, 1), CheckOrders()))
        self.watch.open(0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(BATCH).sum().backward()
        self.optimizer.step()


def test_state_and_inputs_are_those_of_the_first_forward_pass(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    first = training.watch.finish()
    training.watch.open(1)
    training.step()
    second = training.watch.finish()
    assert first.inputs == second.inputs
    assert first.inputs
    assert first.state["model.weight"] != second.state["model.weight"]
    assert first.stepped


def test_evaluation_is_no_beginning_of_a_step(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with torch.no_grad():
        training.model(BATCH)
    trace = training.watch.finish()
    assert (trace.evaluations, trace.state, trace.inputs, trace.stepped) == (1, {}, (), False)


def test_random_numbers_between_update_and_take_are_noticed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    assert not training.watch.finish().drawn
    torch.rand(1)
    assert training.watch.finish().drawn


def test_step_without_modules_begins_at_the_update(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    objects = StateObjects({"weight": weight, "optimizer": optimizer})
    watch = StepWatch(objects, KillSwitch(EventLog(tmp_path, 0, 1), CheckOrders()))
    watch.open(0)
    weight.sum().backward()
    optimizer.step()
    trace = watch.finish()
    assert "weight" in trace.state
    assert trace.stepped


def test_module_can_be_copied_and_pickled(tmp_path: Path) -> None:
    training = Training(tmp_path)
    copy.deepcopy(training.model)(BATCH)
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(BATCH)
