"""A layout that could not be restored is refused by path, at `restore()` or at the first `take` that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from odd_objects import Container, FusedProjection
from torch import nn

from keepstep import CaptureError, Config, Snapshotter, Survives
from keepstep.testing.run import LocalRun
from keepstep.trainer.plan.state_planner import StatePlanner
from keepstep.trainer.restore.restore import LayoutProof
from keepstep.trainer.restore.writer import StateWriter
from keepstep.trainer.state.objects import OPTIMIZER, StateObjects
from keepstep.trainer.state.optimizer_fence import OptimizerFence


def check(state: dict[str, Any]) -> None:
    """Prove the layout of this state, as the first `take` would."""
    objects = StateObjects(state)
    fence = OptimizerFence([])
    planner = StatePlanner(objects, fence, None, Config())
    try:
        LayoutProof(objects).check(planner.lookup(0))
    finally:
        planner.close()


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class ShownWeight(nn.Linear):
    """Keeps its own parameter as extra state: its memory, so nothing beside it is captured."""

    def get_extra_state(self) -> torch.Tensor:
        return self.weight.detach()

    def set_extra_state(self, state: torch.Tensor) -> None: ...


class OneWay(nn.Linear):
    """Keeps a counter beside its memory, and has no method that would take it back."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = 3


class BothWays(OneWay):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "calls")
        super()._load_from_state_dict(state_dict, prefix, *args)


class OnlyGiven(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


class Rows(torch.optim.Optimizer):
    """Keeps one number per row, as Adafactor does: a DTensor where the parameter is one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = parameter.detach().sum(dim=1)


class Sharded:
    """Gives DTensors, and takes DTensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["average"])


@pytest.fixture(scope="module")
def sharded() -> Iterator[torch.Tensor]:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield distribute_tensor(torch.ones(40, 20), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def test_usual_states_are_proven() -> None:
    model = nn.Sequential(FusedProjection(4), nn.BatchNorm1d(12), nn.Linear(12, 2))
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(3))])
    lbfgs.step(lambda: (lbfgs.param_groups[0]["params"][0] ** 2).sum())
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    check({"model": model, "optimizer": optimizer, "lbfgs": lbfgs, "scheduler": scheduler, "seen": {"x": [1]}})
    check({"model": model, "optimizers": Container(model)})


def test_sharded_state_of_a_sharded_parameter_is_proven(sharded: torch.Tensor) -> None:
    parameter = nn.Parameter(sharded)
    check({"optimizer": stepped(torch.optim.AdamW([parameter])), "plain": {"average": sharded}})


def test_extra_state_that_is_memory_of_the_module_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"model: 1._extra_state was not saved") as refused:
        check({"model": nn.Sequential(nn.ReLU(), ShownWeight(2, 2))})
    assert refused.value.hint


def test_extra_state_that_no_method_takes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"model\.1\.calls was given, and no method takes it back"):
        check({"model": nn.Sequential(nn.ReLU(), OneWay(2, 2))})
    with pytest.raises(CaptureError, match=r"model\._extra_state was given"):
        check({"model": OnlyGiven(2, 2)})
    check({"model": nn.Sequential(nn.ReLU(), BothWays(2, 2))})


def test_a_hook_that_gives_another_form_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state: {"flat": state["param_groups"]})
    with pytest.raises(CaptureError, match="optimizer is an optimizer now and was none"):
        check({"optimizer": optimizer})


def test_a_group_without_an_option_of_its_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    del optimizer.param_groups[0]["nesterov"]
    with pytest.raises(CaptureError, match="its nesterov was not saved"):
        check({"optimizer": optimizer})


def test_an_option_that_torch_adds_to_the_defaults_alone_is_not_missed() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    del optimizer.param_groups[0]["differentiable"]  # optimizers outside torch never had it
    optimizer.__setstate__(optimizer.__getstate__())
    del optimizer.param_groups[0]["differentiable"]
    assert "differentiable" in optimizer.defaults
    check({"optimizer": optimizer})


def test_state_that_a_new_process_would_shard_otherwise_is_refused(sharded: torch.Tensor) -> None:
    """Here it fits what is there; an optimizer without state would make it like its parameter."""
    optimizer = stepped(Rows([nn.Parameter(sharded)]))
    with pytest.raises(CaptureError, match=r"optimizer\.state\.0\.rows was the part at \(0,\)"):
        check({"optimizer": optimizer})


def test_dtensors_in_foreign_objects_and_groups_are_refused(sharded: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match=r"averages\.average is a DTensor"):
        check({"averages": Sharded(sharded)})
    optimizer = torch.optim.SGD([nn.Parameter(sharded)], lr=0.1)
    optimizer.param_groups[0]["flat_momentum"] = sharded.clone()
    with pytest.raises(CaptureError, match=r"optimizer\.param_groups\.0\.flat_momentum is a DTensor"):
        check({"optimizer": optimizer})


def test_two_objects_with_one_path_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"two objects of the state have the path a\.b"):
        StateObjects({"a.b": nn.Linear(2, 2), "a": {"b": nn.Linear(2, 2)}})


def test_it_is_refused_before_the_first_step(local: LocalRun) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    del optimizer.param_groups[0]["nesterov"]
    with (
        Snapshotter({"optimizer": optimizer}) as snapshots,
        pytest.raises(CaptureError, match="could not be restored"),
    ):
        snapshots.restore()


def test_state_that_the_first_step_makes_is_proven_when_it_is_there(
    local: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = 0
    compare = StateWriter.obstacles

    def counting(self: StateWriter) -> list[str]:
        nonlocal proofs
        proofs += 1
        return compare(self)

    monkeypatch.setattr(StateWriter, "obstacles", counting)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    assert [item.kind for item in StateObjects({"optimizer": optimizer}).all] == [OPTIMIZER]
    with Snapshotter({"model": model, "optimizer": optimizer}) as snapshots:
        snapshots.restore()
        assert proofs == 1
        for step in range(3):
            stepped(optimizer)
            assert snapshots.take(step).wait(timeout_s=60) is Survives.PROCESS
        assert proofs == 2  # with the state that the first step made, and never again
        del optimizer.param_groups[0]["amsgrad"]  # a layout is its tensors: the same, so it is not compared again
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        pending = snapshots.take(3)
        assert pending.skipped
        assert "its amsgrad was not saved" in pending.reason


def test_another_number_of_parameter_groups_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    objects = StateObjects({"model": model, "optimizer": optimizer})
    planner, proof = (
        StatePlanner(objects, OptimizerFence(objects.named_optimizers), None, Config()),
        LayoutProof(objects),
    )
    proof.check(planner.lookup(0))
    assert not caplog.messages
    optimizer.add_param_group({"params": list(model[1].parameters())})
    proof.check(planner.lookup(1))
    stepped(optimizer)
    proof.check(planner.lookup(2))
    planner.close()
    assert len(caplog.messages) == 1
    assert "optimizer has 2 parameter groups now and had 1 at the start" in caplog.text
    assert "add the group before restore()" in caplog.text
