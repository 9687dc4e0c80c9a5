"""What counts as proof that other ranks hold the same bytes, and what does not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from keepstep.trainer.connection.environment import RankPlace, Ranks, World
from keepstep.trainer.plan.replica_shares import ReplicaShares
from keepstep.trainer.plan.replication import Replicas, replica_ranks
from keepstep.trainer.state.objects import StateObjects
from keepstep.trainer.state.reader import StateReader

WIDE = 600
"""a weight of WIDE x WIDE floats is more than a MiB"""
FOUR_NODES = World(0, (0, 1, 2, 3))
EVERYONE = (0, 1, 2, 3)


@pytest.fixture
def world_of_four() -> Iterator[None]:
    """Rank 0 of 4, without the others: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE)
        self.second = nn.Linear(WIDE, WIDE, bias=False)
        self.register_buffer("table", torch.zeros(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def classes(state: dict[str, Any], sharing: ReplicaShares | None = None, **options: Any) -> dict[str, Ranks]:
    """Path -> ranks of everything that is proven to be held by others too."""
    items = StateObjects(state)
    replicas = Replicas(items, sharing or ReplicaShares(FOUR_NODES), **options)
    reading = StateReader(items, rng=False, grads=options.get("grads", False)).read()
    found = {path: replicas.ranks_of(reading.tensors[index], path) for index, path in reading.paths().items()}
    return {path: ranks for path, ranks in found.items() if ranks is not None}


# Where the ranks are


def test_world_is_known_where_ranks_are_dealt_out_node_by_node() -> None:
    assert World.of(RankPlace(5, 8, 1, 4), {}) == World(5, (0, 0, 0, 0, 1, 1, 1, 1))
    assert World.of(RankPlace(5, 8, 1, 4), {"GROUP_RANK": "1"}) is not None


@pytest.mark.parametrize(
    ("place", "environ"),
    [
        (RankPlace(0, 1, 0, 1), {}),
        (RankPlace(1, 4, 1, 4), {}),
        (RankPlace(5, 8, 0, 4), {}),
        (RankPlace(5, 7, 1, 4), {}),
        (RankPlace(5, 8, 1, 4), {"GROUP_RANK": "0"}),
    ],
    ids=["single process", "single node", "dealt out otherwise", "unequal nodes", "another node rank"],
)
def test_no_world_where_there_is_one_node_or_ranks_are_dealt_out_otherwise(
    place: RankPlace, environ: dict[str, str]
) -> None:
    assert World.of(place, environ) is None


def test_nothing_is_shared_without_a_world(world_of_four: None) -> None:
    items = StateObjects({"model": DistributedDataParallel(Net())})
    replicas = Replicas(items, None, named="model")
    assert replicas.ranks_of(torch.zeros(WIDE, WIDE), "model.x") is None
    assert replicas.ranks_of_state(torch.optim.SGD([nn.Parameter(torch.ones(1))]), torch.ones(1), 1 << 30) is None


# DDP


def test_parameters_of_ddp_and_the_state_of_torchs_optimizers_are_shared_and_nothing_else(world_of_four: None) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    moments = [f"optimizer.state.{index}.{name}" for index in (0, 2) for name in ("exp_avg", "exp_avg_sq")]
    paths = ["model.module.first.weight", "model.module.second.weight", *moments]
    found = classes({"model": model, "optimizer": optimizer, "ema": torch.zeros(WIDE, WIDE)})
    assert found == dict.fromkeys(paths, EVERYONE)


def test_frozen_parameters_of_ddp_are_shared_too(world_of_four: None) -> None:
    net = Net()
    net.second.weight.requires_grad_(False)
    assert "model.module.second.weight" in classes({"model": DistributedDataParallel(net)})


def test_ddp_inside_another_module_and_tied_weights_are_found(world_of_four: None) -> None:
    net = Net()
    net.second.weight = net.first.weight
    outer = nn.Module()
    outer.body = DistributedDataParallel(net)
    outer.head = nn.Linear(WIDE, WIDE)
    found = classes({"model": outer})
    assert found == {"model.body.module.first.weight": EVERYONE, "model.body.module.second.weight": EVERYONE}


def test_parameters_that_ddp_ignores_are_the_ranks_own(world_of_four: None) -> None:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["second.weight"])
    model = DistributedDataParallel(net)
    assert set(classes({"model": model})) == {"model.module.first.weight"}


def test_ddp_over_a_group_is_shared_by_that_group_only(world_of_four: None) -> None:
    group = dist.new_group([0, 2])
    assert set(classes({"model": DistributedDataParallel(Net(), process_group=group)}).values()) == {(0, 2)}


def test_ddp_whose_group_torch_does_not_know_is_not_proven(world_of_four: None) -> None:
    model = DistributedDataParallel(Net())
    model.process_group = object()
    assert classes({"model": model}) == {}


@pytest.mark.parametrize(("name", "shared"), [("default", True), ("own", False), ("post_local_sgd", False)])
def test_gradient_hooks_that_let_ranks_drift_apart_are_no_proof(world_of_four: None, name: str, shared: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook

    hooks = {
        "default": default_hooks.fp16_compress_hook,
        "own": lambda state, bucket: None,
        "post_local_sgd": post_localSGD_hook.post_localSGD_hook,
    }
    model = DistributedDataParallel(Net())
    model._comm_hooks.append((hooks[name], None))
    assert bool(classes({"model": model})) is shared


class Own(torch.optim.SGD):
    """An optimizer that steps in its own way: it may keep state on some ranks only."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """Torch's own step under another name."""


@pytest.mark.parametrize(("kind", "shared"), [(Own, False), (Renamed, True), (torch.optim.Adagrad, True)])
def test_state_is_shared_only_where_the_step_is_torchs_own(world_of_four: None, kind: Any, shared: bool) -> None:
    model = DistributedDataParallel(Net())
    options = {"momentum": 0.9} if kind is Own else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    step(model, optimizer)
    found = classes({"model": model, "optimizer": optimizer})
    assert any(path.startswith("optimizer") for path in found) is shared
    replicas = Replicas(StateObjects({"model": model, "optimizer": optimizer}), ReplicaShares(FOUR_NODES))
    weight = model.module.first.weight
    assert (replicas.ranks_of_state(optimizer, weight, weight.nbytes) == EVERYONE) is shared


def test_state_of_zero_redundancy_is_the_ranks_own(world_of_four: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it scripts its functional optimizers
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    weight = model.module.first.weight
    optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
    replicas = Replicas(StateObjects({"model": model, "optimizer": optimizer}), ReplicaShares(FOUR_NODES))
    assert replicas.ranks_of(optimizer.state[weight]["exp_avg"], "optimizer.state.0.exp_avg") is None
    assert replicas.ranks_of(weight, "model.module.first.weight") == EVERYONE


def test_state_of_another_shape_than_its_parameter_is_the_ranks_own(world_of_four: None) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.module.first.weight]["odd"] = torch.zeros(WIDE * WIDE)
    assert not any(path.startswith("optimizer") for path in classes({"model": model, "optimizer": optimizer}))


def test_gradients_are_the_ranks_own(world_of_four: None) -> None:
    """Between micro-batches they are not reduced yet."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    items = StateObjects({"model": model, "optimizer": optimizer})
    replicas = Replicas(items, ReplicaShares(FOUR_NODES), named="grads")
    reading = StateReader(items, rng=False, grads=True).read()
    found = {path for index, path in reading.paths().items() if replicas.ranks_of(reading.tensors[index], path)}
    assert found == {"model.module.first.weight", "model.module.second.weight"}


def test_small_and_non_contiguous_tensors_are_the_ranks_own(world_of_four: None) -> None:
    net = nn.Module()
    net.small = nn.Parameter(torch.zeros((1 << 18) - 1))
    net.turned = nn.Parameter(torch.zeros(WIDE, WIDE + 1).t())
    net.large = nn.Parameter(torch.zeros(1 << 18))
    assert set(classes({"model": DistributedDataParallel(net)})) == {"model.module.large"}


# Where it matters


def test_replicas_on_one_node_or_on_too_few_nodes_are_the_ranks_own(world_of_four: None) -> None:
    model = DistributedDataParallel(Net())
    two_nodes = World(0, (0, 0, 1, 1))
    assert classes({"model": model}, ReplicaShares(World(0, (0, 0, 0, 0, 1, 1, 1, 1)))) == {}, "all on one node"
    assert set(classes({"model": model}, ReplicaShares(two_nodes, losses=2)).values()) == {EVERYONE}, "all there are"
    group = dist.new_group([0, 2])
    pair = DistributedDataParallel(Net(), process_group=group)
    assert classes({"model": pair}, ReplicaShares(FOUR_NODES, losses=2)) == {}, "both may be lost"
    assert classes({"model": pair}, ReplicaShares(FOUR_NODES, losses=1)) != {}
    assert classes({"model": model}, ReplicaShares(World(0, (0, 1)))) == {}, "ranks that the world does not have"


# DTensor


def dtensor(mesh: Any, placements: list[Any], rows: int = WIDE) -> DTensor:
    return DTensor.from_local(torch.zeros(rows, WIDE), mesh, placements, run_check=False)


def test_dtensor_is_shared_by_the_ranks_that_differ_in_replicate_dimensions_only(world_of_four: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    state = {
        "hsdp": dtensor(mesh, [Replicate(), Shard(0)]),
        "turned": dtensor(mesh, [Shard(0), Replicate()]),
        "all": dtensor(mesh, [Replicate(), Replicate()]),
        "fsdp": dtensor(mesh, [Shard(0), Shard(0)]),
        "partial": dtensor(mesh, [Replicate(), Partial()]),
        "sub": dtensor(mesh["replicate"], [Replicate()]),
        "small": dtensor(mesh, [Replicate(), Replicate()], rows=3),
    }
    assert classes({"plain": state}) == {
        "plain.hsdp": (0, 2), "plain.turned": (0, 1), "plain.all": EVERYONE, "plain.sub": (0, 2),
    }  # fmt: skip


def test_placements_of_a_dtensor_outweigh_what_the_user_says(world_of_four: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    sharded = dtensor(mesh, [Shard(0)])
    assert classes({"plain": {"x": sharded, "y": torch.zeros(WIDE, WIDE)}}, named="plain") == {"plain.y": EVERYONE}


def test_hsdp_shares_each_shard_and_plain_fsdp_shares_nothing(world_of_four: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dims, expected in ((mesh, {(0, 2)}), (mesh["shard"], set())):
        model = nn.Sequential(nn.Linear(2 * WIDE, WIDE, bias=False))
        fully_shard(model, mesh=dims)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        weight = next(model.parameters())
        optimizer.state[weight] = {"exp_avg": torch.zeros_like(weight), "step": torch.tensor(1.0)}
        found = classes({"model": model, "optimizer": optimizer})
        assert set(found.values()) == expected
        assert set(found) == ({"model.0.weight", "optimizer.state.0.exp_avg"} if expected else set())
        replicas = Replicas(StateObjects({"model": model, "optimizer": optimizer}), ReplicaShares(FOUR_NODES))
        assert {replicas.ranks_of_state(optimizer, weight, 1 << 21)} == (expected or {None})


@pytest.mark.parametrize(
    ("coordinate", "placements", "expected"),
    [
        ((0, 0, 0), [Replicate(), Replicate(), Replicate()], tuple(range(12))),
        ((1, 2, 0), [Replicate(), Shard(0), Shard(1)], (4, 10)),
        ((1, 2, 0), [Shard(0), Shard(1), Replicate()], (10, 11)),
        ((1, 2, 0), [Replicate(), Shard(0), Replicate()], (4, 5, 10, 11)),
        ((1, 2, 0), [Shard(0), Shard(1), Shard(0)], None),
        ((1, 2, 0), [Replicate(), Partial(), Shard(0)], None),
        (None, [Replicate(), Replicate(), Replicate()], None),
    ],
)
def test_ranks_of_a_mesh_that_hold_the_same_part(
    coordinate: tuple[int, ...] | None, placements: list[Any], expected: Ranks | None
) -> None:
    assert replica_ranks(torch.arange(12).reshape(2, 3, 2), coordinate, placements) == expected


# Named by the user


def test_named_paths_are_shared_by_all_ranks() -> None:
    big = torch.zeros(WIDE, WIDE)
    state = {"ema": {"a": big, "b": big.clone()}, "ema2": {"a": big.clone()}, "x": big.clone()}
    assert classes(state, named="ema, x.") == {"ema.a": EVERYONE, "ema.b": EVERYONE, "x": EVERYONE}
    assert classes(state, named="ema.b,,") == {"ema.b": EVERYONE}
    assert classes(state) == {}


# What really happens


def _train_in_two_processes(rank: int, store: str, results: str) -> None:
    with contextlib.ExitStack() as stack:
        torch.manual_seed(rank)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        stack.callback(dist.destroy_process_group)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, WIDE)).square().mean().backward()
            model.module.table.add_(rank + 1)
            optimizer.step()
        items = StateObjects({"model": model, "optimizer": optimizer})
        replicas = Replicas(items, ReplicaShares(World(rank, (0, 1))))
        reading = StateReader(items, rng=False, grads=False).read()
        shared = {
            path: reading.tensors[index].detach().clone()
            for index, path in reading.paths().items()
            if replicas.ranks_of(reading.tensors[index], path)
        }
        torch.save(shared, f"{results}.{rank}")


def test_what_is_called_shared_is_the_same_on_both_ranks(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(  # type: ignore[no-untyped-call]
        _train_in_two_processes, args=(str(tmp_path / "store"), str(tmp_path / "found")), nprocs=2
    )
    one, other = (torch.load(tmp_path / f"found.{rank}") for rank in range(2))
    assert set(one) == set(other)
    assert len(one) == 6
    assert all(torch.equal(one[path], other[path]) for path in one)
