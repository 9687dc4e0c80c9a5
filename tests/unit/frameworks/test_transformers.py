"""What the adapter for transformers' Trainer refuses, warns about and holds; its resumes are in tests/integration."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep import Config, ConfigError, RecoveryError

pytest.importorskip("transformers")
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from keepstep.frameworks import transformers as adapter
from keepstep.frameworks.transformers import KeepTrainer, keep
from keepstep.frameworks.transformers_progress import (
    OPEN_RECORDS,
    RECORDS_IN_BLOCK,
    EpochPosition,
    HistoryBlocks,
    TrainerProgress,
    records_of,
)


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2) * index, "labels": torch.ones(())}


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.inner(x).squeeze(-1) - labels).square().mean()}


class Order:
    """A batch order without a loader."""

    def state_dict(self, num_used: int) -> dict[str, int]:
        return {"used": num_used}

    def load_state_dict(self, saved: Any) -> None:
        self.loaded = saved


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def trainer(kind: type = Trainer, callbacks: Any = None, **options: Any) -> Any:
        own = {name: options.pop(name) for name in list(options) if name.startswith("keepstep")}
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **options)
        return kind(model=Line(), args=args, train_dataset=Pairs(), callbacks=callbacks, **own)

    return trainer


# Refused


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size changes the batches"),
        ({"ignore_data_skip": True}, "ignore_data_skip begins the data anew"),
    ],
)
def test_arguments_that_cannot_be_exact_are_refused(make: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(KeepTrainer, **options).train()


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("is_deepspeed_enabled", "DeepSpeed keeps the state"),
        ("is_fsdp_enabled", "FSDP inside the Trainer was not proven"),
        ("is_distributed_loading_by_transformers", "tensor, context and expert parallelism"),
        ("_buffered_inputs", "generates batches"),
    ],
)
def test_trainers_that_were_not_proven_are_refused(make: Any, attribute: str, reason: str) -> None:
    trainer = make(KeepTrainer)
    setattr(trainer, attribute, True)
    with pytest.raises(ConfigError, match=reason):
        trainer.train()


def test_a_search_for_hyperparameters_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="many runs in one"):
        make(KeepTrainer).train(trial={"learning_rate": 1.0})


def test_iterable_datasets_and_dispatched_batches_are_refused(make: Any) -> None:
    class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Any:
            return (Pairs()[index] for index in range(8))

    trainer = make(KeepTrainer, max_steps=2)
    trainer.train_dataset = Endless()
    with pytest.raises(ConfigError, match=r"iterable dataset|reads the batches of all"):
        trainer.train()
    with pytest.raises(ConfigError, match="reads the batches of all"):
        make(KeepTrainer, accelerator_config={"dispatch_batches": True}).train()


def test_a_version_without_the_methods_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter._check_version()
    monkeypatch.setitem(adapter.OVERRIDDEN, "_run_epoch", ("position",))
    with pytest.raises(ConfigError, match=r"no Trainer\._run_epoch\(position\)"):
        adapter._check_version()


def test_the_other_order_of_bases_is_an_error_of_python() -> None:
    with pytest.raises(TypeError, match="MRO"):
        type("Wrong", (Trainer, KeepTrainer), {})


def test_another_number_of_batches_and_another_training_are_refused(make: Any) -> None:
    progress = TrainerProgress(make(), Order(), ())  # type: ignore[arg-type]
    progress.position = saved = EpochPosition(epoch=1, num_batches=2, batches_in_epoch=4)
    progress.check_position(EpochPosition(batches_in_epoch=4))
    with pytest.raises(RecoveryError, match="4 batches, 1 for each step, and has 5 now"):
        progress.check_position(EpochPosition(batches_in_epoch=5))
    with pytest.raises(RecoveryError, match=r"train\(\) number 1 of the program, and this is number 2"):
        progress.check_position(EpochPosition(batches_in_epoch=4, training=2))
    assert progress.position == saved


# Instances and settings


def test_keep_changes_an_instance_and_nothing_of_its_class(make: Any) -> None:
    trainer = make()
    config = Config(run_id="one")
    assert keep(trainer, every=3, config=config) is trainer
    assert isinstance(trainer, KeepTrainer)
    assert type(trainer).__name__ == "Trainer"
    assert (trainer.keepstep_every, trainer.keepstep_config) == (3, config)
    assert keep(trainer, every=4) is trainer
    assert trainer.keepstep_every == 4
    assert not isinstance(make(), KeepTrainer)
    with pytest.raises(ConfigError, match=r"SimpleNamespace is no transformers\.Trainer"):
        keep(SimpleNamespace())


def test_settings_are_arguments_of_the_trainer(make: Any) -> None:
    trainer = make(KeepTrainer, keepstep_every=5)
    assert (trainer.keepstep_every, trainer.keepstep_config) == (5, None)


# Progress


class Counter(TrainerCallback, ExportableState):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


class Resumable(TrainerCallback):
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.count = saved["count"]


def test_progress_is_applied_to_another_trainer_when_told(make: Any) -> None:
    first = make(callbacks=[Counter(3), Counter(4), Resumable()])
    first._tr_loss, first.extra = torch.tensor(2.5), [1, 2]
    first.state.global_step, first.state.best_metric = 7, 0.25
    first.state.log_history = [{"loss": 1.0}]
    first.control.should_log = True
    first.callback_handler.callbacks[-2].count = 9 if isinstance(first.callback_handler.callbacks[-2], Resumable) else 0
    progress = TrainerProgress(first, Order(), ("extra",))  # type: ignore[arg-type]
    progress.position = EpochPosition(epoch=1, num_batches=2)
    saved = progress.state_dict()

    order = Order()
    second = make(callbacks=[Counter(), Counter(), Resumable()])
    restored = TrainerProgress(second, order, ("extra",))  # type: ignore[arg-type]
    restored.load_state_dict(saved)
    assert restored.is_pending
    assert restored.state_dict() is saved
    assert second.state.global_step == 0
    restored.apply_trainer_state()
    assert (second.state.global_step, second.state.best_metric) == (7, 0.25)
    assert second.state.log_history == [{"loss": 1.0}]
    restored.apply()
    assert not restored.is_pending
    assert (second._tr_loss.item(), second.extra, second.control.should_log) == (2.5, [1, 2], True)
    found = [callback.count for callback in second.callback_handler.callbacks if hasattr(callback, "count")]
    assert found == [callback.count for callback in first.callback_handler.callbacks if hasattr(callback, "count")]
    assert order.loaded == {"used": 2}
    assert restored.position == EpochPosition(epoch=1, num_batches=2)


def test_what_changes_and_is_not_captured_is_named_once(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(TrainerCallback):
        seen = 0

    class Annealed(Trainer):
        pass

    trainer = make(Annealed, callbacks=[Forgetful(), Counter()])
    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Forgetful))
    counter = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Counter))
    callback.seen, trainer.temperature, trainer.named = 0, 1.0, 0
    progress = TrainerProgress(trainer, Order(), ("named",))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "keepstep"):
        for step in range(3):
            progress.state_dict()
            callback.seen, trainer.temperature, trainer.named = step + 1, 0.5**step, step + 1
            counter.count, trainer.current_flos = step + 1, step + 1
            trainer.temperature = 0.9 ** (step + 1)
    messages = sorted(record.message for record in caplog.records)
    assert len(messages) == 2
    assert any("Forgetful.seen changes while training and is not restored" in message for message in messages)
    assert any("keepstep_attributes = ('temperature',)" in message for message in messages)


# The history


def test_old_records_are_encoded_once() -> None:
    history = [{"loss": float(step), "step": step} for step in range(2 * RECORDS_IN_BLOCK + OPEN_RECORDS)]
    blocks = HistoryBlocks()
    first = blocks.state_of(history)
    assert (len(first["blocks"]), len(first["rest"])) == (2, OPEN_RECORDS)
    history[-1]["note"] = 1.0
    history += [{"loss": 0.5}]
    second = blocks.state_of(history)
    assert all(one is other for one, other in zip(first["blocks"], second["blocks"], strict=True))
    assert records_of(second) == history


def test_another_history_is_encoded_anew() -> None:
    blocks = HistoryBlocks()
    for size in (2 * RECORDS_IN_BLOCK, RECORDS_IN_BLOCK + OPEN_RECORDS, 3, 4 * RECORDS_IN_BLOCK):
        history = [{"loss": float(step), "size": size} for step in range(size)]
        assert records_of(blocks.state_of(history)) == history
