"""What an optimizer's fence covers."""

from __future__ import annotations

import torch

from keepstep.trainer.plan.copy_plan import SMALL_BYTES
from keepstep.trainer.state.optimizer_fence import OptimizerFence, WatchedOptimizer

LARGE = SMALL_BYTES // 4 + 1  # elements of 4 bytes


def storages_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return WatchedOptimizer(optimizer, "optimizer").storages(SMALL_BYTES)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_large_tensors_in_groups_are_fenced_also_in_lists_and_dicts() -> None:
    weight = torch.nn.Parameter(torch.zeros(LARGE))
    optimizer = torch.optim.SGD([weight])
    momentum, second, third = (torch.zeros(LARGE) for _ in range(3))
    optimizer.param_groups[0].update(momentum=momentum, others=[second, {"third": third}])
    assert storages_of(optimizer) == {storage(tensor) for tensor in (weight, momentum, second, third)}


def test_small_tensors_in_groups_are_not_fenced_because_schedulers_write_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    rate, at_the_limit = torch.tensor(0.1), torch.zeros(SMALL_BYTES // 4)
    optimizer = torch.optim.AdamW([weight], lr=rate)
    optimizer.param_groups[0]["table"] = at_the_limit
    assert storages_of(optimizer) == {storage(weight)}


def test_announced_updates_cover_what_no_optimizer_and_no_forward_writes() -> None:
    module = torch.nn.BatchNorm1d(LARGE)
    module.weight2 = torch.nn.Parameter(torch.zeros(LARGE))
    table = torch.nn.Embedding(LARGE, 1, max_norm=1.0)
    average, small = torch.zeros(LARGE), torch.zeros(2)
    fence = OptimizerFence([("sgd", torch.optim.SGD([module.weight, module.bias]))], [module, table])
    try:
        tensors = [*module.parameters(), *module.buffers(), *table.parameters(), average, small]
        fence.cover(tensors, SMALL_BYTES)
        updates = fence.watched[-1]
        assert updates.storages(SMALL_BYTES) == {storage(module.weight2), storage(average)}
        assert not updates.trusted
        fence.before_update()
        assert updates.trusted
        assert fence.take_stepped()
    finally:
        fence.close()


def test_without_an_optimizer_each_batch_counts_as_a_step() -> None:
    fence = OptimizerFence([])
    assert fence.stepped
    assert not OptimizerFence([("sgd", torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))]).stepped
