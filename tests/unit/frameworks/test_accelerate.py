"""What the accelerate adapter refuses, each with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from keepstep import ConfigError
from keepstep.frameworks.accelerate import check_accelerator, resume
from keepstep.frameworks.accelerate_loader import check_loader, install_batches
from keepstep.testing.run import LocalRun


class Counting(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Lazy(Sampler):
    """Draws from the global random state for every index."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(8, ())) for _ in range(8))

    def __len__(self) -> int:
        return 8


def program(loader: DataLoader, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    model = torch.nn.Linear(1, 1)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, *prepared


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(8.0).reshape(8, 1))


def plugin(kind: str, **others: Any) -> Any:
    settings = {"parallelism_config": None, "num_processes": 1, "even_batches": True, "ddp_handler": None, **others}
    return SimpleNamespace(distributed_type=SimpleNamespace(name=kind), **settings)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP"])
def test_plugin_that_is_not_proven_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"accelerate with {kind} is not proven"):
        check_accelerator(plugin(kind))


def test_parallelism_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="ParallelismConfig"):
        check_accelerator(plugin("MULTI_GPU", parallelism_config=object()))


def test_uneven_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="different numbers of batches"):
        check_accelerator(plugin("MULTI_CPU", num_processes=2, even_batches=False))


def test_communication_hook_with_a_state_is_refused() -> None:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
    with pytest.raises(ConfigError, match="POWER_SGD keeps errors"):
        check_accelerator(plugin("MULTI_CPU", num_processes=2, ddp_handler=handler))


def test_static_graph_is_refused_where_the_order_of_sums_matters() -> None:
    handler = DistributedDataParallelKwargs(static_graph=True)
    check_accelerator(plugin("MULTI_CPU", num_processes=2, ddp_handler=handler))
    with pytest.raises(ConfigError, match="static_graph"):
        check_accelerator(plugin("MULTI_CPU", num_processes=3, ddp_handler=handler))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loader_with_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draws the order inside accelerator.prepare\(\)"):
        resume(*program(DataLoader(dataset(), batch_size=2, num_workers=1), use_stateful_dataloader=True))


def test_iterable_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="iterable dataset"):
        resume(*program(DataLoader(Counting(), batch_size=2)))


def test_loader_without_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=None"):
        resume(*program(DataLoader(dataset(), batch_size=None)))


def test_loader_that_was_not_prepared_is_refused() -> None:
    accelerator, model, optimizer, _ = program(DataLoader(dataset(), batch_size=2))
    with pytest.raises(ConfigError, match="not prepared by this accelerator"):
        resume(accelerator, model, optimizer, DataLoader(dataset(), batch_size=2))


def test_two_loaders_are_refused() -> None:
    accelerator, model, optimizer, loader = program(DataLoader(dataset(), batch_size=2))
    other = accelerator.prepare(DataLoader(dataset(), batch_size=2))
    with pytest.raises(ConfigError, match="the one loader that is trained on, and was given 2"):
        resume(accelerator, model, optimizer, loader, other)


def test_persistent_workers_of_another_loader_are_refused() -> None:
    accelerator, *prepared = program(DataLoader(dataset(), batch_size=2))
    accelerator.prepare(DataLoader(dataset(), batch_size=2, num_workers=1, persistent_workers=True))
    with pytest.raises(ConfigError, match="not trained on has persistent_workers"):
        resume(accelerator, *prepared)


def test_batches_are_dispatched_only_where_the_last_one_is_whole() -> None:
    accelerator, *prepared = program(DataLoader(dataset(), batch_size=2), dispatch_batches=True)
    check_loader(prepared[-1])
    prepared[-1].state = SimpleNamespace(num_processes=3)
    with pytest.raises(ConfigError, match="completes the last batch"):
        resume(accelerator, *prepared)


def test_sampler_that_draws_for_every_index_is_refused() -> None:
    *_, loader = program(DataLoader(dataset(), batch_size=2, sampler=Lazy()))
    install_batches(loader, [])
    with pytest.raises(ConfigError, match="draws from the global random states"):
        list(loader)


def test_no_snapshot_while_another_loader_was_left_in_its_middle(caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, optimizer, loader = program(DataLoader(dataset(), batch_size=2))
    other = accelerator.prepare(DataLoader(dataset(), batch_size=2))
    with LocalRun() as local, resume(accelerator, model, optimizer, loader, config=local.config()) as run:
        for _ in run.epochs(1):
            for batch in run.batches():
                accelerator.backward(model(batch[0]).sum())
                optimizer.step()
                if run.batch == 1:
                    next(iter(other))
        assert run.step == 1
    assert caplog.text.count("another prepared loader was left before its last batch") == 1


def test_batches_are_asked_for_once_in_each_epoch() -> None:
    with LocalRun() as local, resume(*program(DataLoader(dataset(), batch_size=2)), config=local.config()) as run:
        with pytest.raises(ConfigError, match="once in each epoch"):
            next(run.batches())
        for _ in run.epochs(1):
            assert len(list(run.batches())) == 4
            with pytest.raises(ConfigError, match="once in each epoch"):
                next(run.batches())


def test_missing_optimizer_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(dataset(), batch_size=2))
    with pytest.raises(ConfigError, match="no optimizer was prepared"):
        resume(accelerator, model, loader)
