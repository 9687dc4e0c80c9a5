"""A module is read from its memory, under the names of `state_dict()`, and its hooks are not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_objects import Container, FusedProjection
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from keepstep import CaptureError, RecoveryError
from keepstep.trainer.state.module_memory import expected_extras, is_plain, read_extras, read_memory, write_extras
from keepstep.trainer.state.objects import OPTIMIZER, STATEFUL, StateObjects
from keepstep.trainer.state.reader import StateReader


def tied() -> nn.Module:
    model = nn.ModuleDict({"inner": nn.Linear(3, 3, bias=False), "outer": nn.Linear(3, 3, bias=False)})
    model["outer"].weight = model["inner"].weight
    return model


def shared() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.ReLU(), layer)


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model.register_buffer("shown", torch.zeros(2))
    model.register_buffer("hidden", torch.zeros(2), persistent=False)
    model.register_buffer("none", None)
    model.register_parameter("no_parameter", None)
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "shared": shared,
    "buffers": with_buffers,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "compiled": lambda: nn.Sequential(torch.compile(with_buffers(), backend="eager"), nn.Linear(2, 2)),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(with_buffers()), nn.Linear(2, 2)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(with_buffers()),
    "lstm": lambda: nn.LSTM(3, 3, 2),
}


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # the import of torch.compile's backends
@pytest.mark.parametrize("name", MODULES)
def test_names_and_tensors_are_those_of_state_dict(name: str) -> None:
    module = MODULES[name]()
    state, memory = module.state_dict(), read_memory(module)
    assert list(memory) == list(state)
    assert all(memory[key].data_ptr() == state[key].data_ptr() for key in state)
    assert is_plain(module)
    assert read_extras(module, memory) == {}


def test_hook_that_makes_up_entries_is_not_run_and_its_weight_is_read_whole() -> None:
    module = nn.Sequential(FusedProjection(4))
    before = FusedProjection.shown
    reading = StateReader(StateObjects({"model": module}), rng=False, grads=False).read()
    assert FusedProjection.shown == before
    assert sorted(reading.paths().values()) == ["model.0.fused", "model.0.scale"]


class Counting(nn.Linear):
    """Keeps a number beside its weight, in one of the three ways that torch has."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0


class ByExtraState(Counting):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class BySaving(Counting):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = self.calls
        destination[prefix + "again"] = self.weight.detach()  # an alias of its memory is nothing more to keep

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.calls = state.pop(prefix + "calls")
        state.pop(prefix + "again", None)
        super()._load_from_state_dict(state, prefix, *args)


class ByStateDict(Counting):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        state[options.get("prefix", "") + "calls"] = self.calls
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.calls = state_dict.pop("calls")
        return super().load_state_dict(state_dict, *args, **options)


@pytest.mark.parametrize("kind", [ByExtraState, BySaving, ByStateDict])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_part_keeps_beside_its_memory_is_kept(kind: type[Counting], nested: bool) -> None:
    def make() -> tuple[nn.Module, Counting]:
        part = kind()
        return (nn.Sequential(nn.Linear(2, 2), part), part) if nested else (part, part)

    module, part = make()
    part.calls = 7
    memory = read_memory(module)
    extras = read_extras(module, memory)
    assert len(extras) == 1
    assert not is_plain(module)
    other, other_part = make()
    assert expected_extras(other) <= set(extras)
    write_extras(other, extras, "model")
    assert other_part.calls == 7


def test_extra_that_no_part_takes_and_a_part_that_fails_are_named() -> None:
    with pytest.raises(RecoveryError, match=r"model: 1\.calls"):
        write_extras(nn.Sequential(nn.Linear(2, 2)), {"1.calls": 3}, "model")
    with pytest.raises(RecoveryError, match=r"model\.0 refused _extra_state"):
        write_extras(nn.Sequential(ByExtraState()), {"0._extra_state": {"other": 1}}, "model")
    broken = nn.Sequential(ByExtraState())
    del broken[0].calls
    with pytest.raises(CaptureError, match="state of 0"):
        read_extras(broken, read_memory(broken))


def test_optimizers_inside_an_optimizer_are_objects_of_their_own() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    container = Container(*models)
    objects = StateObjects({"optimizer": container})
    assert [(item.path, item.kind) for item in objects.all] == [
        ("optimizer.0", OPTIMIZER), ("optimizer.1", OPTIMIZER), ("optimizer.param_groups", STATEFUL),
    ]  # fmt: skip
    assert objects.optimizers == container.optimizers
    container.param_groups = [group for inner in container.optimizers for group in inner.param_groups]
    assert len(StateObjects({"optimizer": container}).all) == 2, "its groups are theirs"


def test_options_of_a_container_come_back_and_a_tensor_stays_the_same_object() -> None:
    saved, live = Container(nn.Linear(2, 2)), Container(nn.Linear(2, 2))
    rate = torch.tensor(0.5)
    saved.param_groups[0].update(lr=torch.tensor(0.1), initial_lr=0.2)
    live.param_groups[0].update(lr=rate, more=1)
    item, other = (StateObjects({"o": thing}).of(STATEFUL)[0].thing for thing in (saved, live))
    other.load_state_dict(item.state_dict())
    group = live.param_groups[0]
    assert group["lr"] is rate
    assert rate.item() == torch.tensor(0.1).item()
    assert group["initial_lr"] == 0.2
    assert "more" not in group
