"""What the Lightning adapter refuses, each with a sentence; the loader that Lightning sees; the metrics it logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep import Config, ConfigError, Loader
from keepstep.errors import CaptureError
from keepstep.frameworks.lightning import Keep, _refuse, _with_every
from keepstep.frameworks.lightning_loader import LoaderPosition, TrainLoader, wrap_train_loader
from keepstep.frameworks.lightning_metrics import put_back_metrics, read_metrics
from keepstep.testing.run import LocalRun
from keepstep.types import Stateful

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.mean = torchmetrics.MeanMetric()
        self.group: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = batch["a"] if isinstance(batch, dict) else batch
        loss = self.layer(batch.reshape(-1, 1)).square().mean()
        self.mean(loss)
        self.log("mean", self.mean, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist_group=self.group)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx=max)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Fetching(Module):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        return super().training_step(next(dataloader_iter)[0], 0)


def make_trainer(tmp_path: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=list(callbacks), **options,
    )  # fmt: skip


def numbers() -> DataLoader[Any]:
    return DataLoader(torch.arange(8.0), batch_size=2)  # type: ignore[arg-type]


# Refused


def test_several_train_loaders_are_refused(tmp_path: Path) -> None:
    with LocalRun() as run, pytest.raises(ConfigError, match="this fit has several"):
        make_trainer(tmp_path, Keep(config=run.config())).fit(Module(), {"a": numbers(), "b": numbers()})


def test_a_loader_without_length_is_refused(tmp_path: Path) -> None:
    class Positioned(Numbers):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with LocalRun() as run, pytest.raises(ConfigError, match="has no length"):
        make_trainer(tmp_path, Keep(config=run.config())).fit(Module(), DataLoader(Positioned(), batch_size=2))


def test_a_loader_without_position_is_refused(tmp_path: Path) -> None:
    with LocalRun() as run, pytest.raises(ConfigError, match="position of a Numbers"):
        make_trainer(tmp_path, Keep(config=run.config()), limit_train_batches=3).fit(Module(), DataLoader(Numbers()))


def test_what_is_no_loader_is_refused(tmp_path: Path) -> None:
    with LocalRun() as run, pytest.raises(ConfigError, match="train dataloader is a Numbers"):
        make_trainer(tmp_path, Keep(config=run.config()), limit_train_batches=3).fit(Module(), Numbers())


def test_a_second_fit_with_the_same_callback_is_refused(tmp_path: Path) -> None:
    with LocalRun() as run:
        keep = Keep(config=run.config())
        make_trainer(tmp_path, keep).fit(Module(), numbers())
        with pytest.raises(ConfigError, match="has kept another fit"):
            make_trainer(tmp_path, keep).fit(Module(), numbers())


def test_a_sharded_strategy_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(ConfigError, match="under FSDPStrategy"):
        _refuse(trainer, Module())


def test_ranks_that_lightning_started_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    environment = LightningEnvironment()
    trainer._accelerator_connector.strategy = DDPStrategy(cluster_environment=environment)
    environment.set_world_size(2)
    with pytest.raises(ConfigError, match="started 2 ranks by itself"):
        _refuse(trainer, Module())


def test_a_step_that_fetches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fetches batches inside a step"):
        _refuse(make_trainer(tmp_path), Fetching())


def test_loaders_that_are_made_anew_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reload_dataloaders_every_n_epochs"):
        _refuse(make_trainer(tmp_path, reload_dataloaders_every_n_epochs=1), Module())


def test_a_callback_that_keeps_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="StochasticWeightAveraging changes or keeps parameters"):
        _refuse(make_trainer(tmp_path, StochasticWeightAveraging(0.1)), Module())


def test_every_is_joined_with_the_other_settings() -> None:
    config = _with_every(Config(run_id="one", every=3), 5)
    assert config is not None
    assert (config.run_id, config.every, set(config.given)) == ("one", 5, {"run_id", "every"})
    assert _with_every(None, None) is None


# The loader that Lightning sees


class Listener:
    num_requests = 0

    def before_batch(self) -> None:
        self.num_requests += 1


def test_wrapped_loader_reports_each_request_and_is_otherwise_the_same() -> None:
    loader, listener = numbers(), Listener()
    wrapped = wrap_train_loader(loader, LoaderPosition(), listener)
    assert isinstance(wrapped, DataLoader)
    assert not isinstance(wrapped, Stateful), "Lightning would store a position that only keepstep can read"
    assert (len(wrapped), wrapped.batch_size, wrapped.dataset) == (4, 2, loader.dataset)
    wrapped.worker_init_fn = print
    assert loader.worker_init_fn is print
    assert [batch.tolist() for batch in wrapped] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert listener.num_requests == 5


def test_loader_with_a_position_of_its_own_keeps_it_for_checkpoints_on_disk() -> None:
    loader = StatefulDataLoader(torch.arange(8.0), batch_size=2)
    wrapped = wrap_train_loader(loader, LoaderPosition(), Listener())
    assert isinstance(wrapped, Stateful)
    next(iter(wrapped))
    assert wrapped.state_dict() == loader.state_dict()
    own = wrap_train_loader(Loader(numbers()), LoaderPosition(), Listener())
    assert not isinstance(own, Stateful)


@pytest.mark.parametrize("num_given", [0, 1, 3])
def test_position_is_that_of_the_restored_loader(num_given: int) -> None:
    def make() -> tuple[TrainLoader, LoaderPosition]:
        position = LoaderPosition()
        loader = DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        return wrap_train_loader(loader, position, Listener()), position

    loader, position = make()
    batches = iter(loader)
    for _ in range(num_given):
        next(batches)
    saved, rng = position.state_dict(), torch.get_rng_state()
    rest = [batch.tolist() for batch in batches]
    torch.manual_seed(1)
    again, restored = make()
    restored.load_state_dict(saved)
    assert restored.state_dict() == saved
    batches = iter(again)
    torch.set_rng_state(rng)
    assert [batch.tolist() for batch in batches] == rest


# Metrics


class Stop(pl.Callback):
    """Reads, or puts back, the metrics in the middle of an epoch."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.saved = saved

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and self.saved is not None:
            put_back_metrics(trainer, self.saved)
        if trainer.global_step == 2:
            self.saved = read_metrics(trainer)


def test_metrics_are_put_back_into_another_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, stop = Module(), Stop()
    start = {name: value.clone() for name, value in first.state_dict().items()}
    trainer = make_trainer(tmp_path, stop)
    trainer.fit(first, numbers())
    assert stop.saved is not None
    assert set(stop.saved["epoch"]) == {"training_step.loss", "training_step.mean", "training_step.most"}

    second = Module()
    second.load_state_dict(start)
    put_back = Stop(stop.saved)
    other = make_trainer(tmp_path, put_back)
    other.fit(second, DataLoader(torch.tensor([9.0, 9, 9, 9, 4, 5, 6, 7]), batch_size=2))  # type: ignore[arg-type]
    assert put_back.saved == stop.saved
    assert set(other.callback_metrics) == set(trainer.callback_metrics)


def test_a_group_of_ranks_cannot_be_put_back(tmp_path: Path) -> None:
    module = Module()
    module.group = "a group"
    with pytest.raises(CaptureError, match="logged with a sync_dist_group"):
        make_trainer(tmp_path, Stop()).fit(module, numbers())
