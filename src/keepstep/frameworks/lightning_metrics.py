"""What a Lightning fit has logged so far: read, and put back into another process.

Lightning's checkpoints leave all of this out. Without it the means of the epoch in which a run is killed would begin
anew, and what callbacks and schedulers monitor would be missing until it is logged again.

Tested with Lightning 2.6 and torchmetrics 1.9. The results of the current epoch have no public interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric

from keepstep.errors import CaptureError

# Where the loops are inside an epoch, and the last value of everything logged.
_CONNECTOR_FIELDS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
_CACHES = ("_forward_cache", "_computed", "_update_count")
_METADATA = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def read_metrics(trainer: Trainer) -> dict[str, Any]:
    """Everything logged so far: last values, sums of the current epoch, and the states of the module's metrics."""
    connector = trainer._logger_connector
    return {
        "last": {name: _copy(getattr(connector, name)) for name in _CONNECTOR_FIELDS},
        "epoch": {key: _read_result(key, result) for key, result in _results(trainer).items()},
        "modules": {name: _read_states(metric) for name, metric in _metrics(trainer.lightning_module)},
    }


def put_back_metrics(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Put back what `read_metrics` has read in a process that logs the same."""
    module = trainer.lightning_module
    connector, device = trainer._logger_connector, module.device
    for name, value in saved["last"].items():
        setattr(connector, name, _copy(value, device))
    modules = dict(_metrics(module))
    for name, states in saved["modules"].items():
        _put_back(modules[name], states, device)
    results = _results(trainer)
    results.clear()
    for key, result in saved["epoch"].items():
        results[key] = _make_result(trainer, modules, result, device)


def _results(trainer: Trainer) -> dict[str, Any]:
    """The results of the training epoch, by name. Those of validation begin anew with each validation."""
    results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
    return results


def _metrics(module: LightningModule) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _read_result(key: str, result: Any) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    if sync._group is not None:
        raise CaptureError(
            f"{key} is logged with a sync_dist_group, which another process does not have",
            hint="log it without sync_dist_group",
        )
    reduce_fx = meta.reduce_fx
    return {
        "meta": {name: getattr(meta, name) for name in _METADATA},
        "reduce": (reduce_fx is getattr(torch, reduce_fx.__name__, None), reduce_fx.__name__),
        "sync": (sync._should, sync.rank_zero_only, sync._op),
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        # A metric of the module has its states there.
        "states": _read_states(result) if result.is_tensor else {"_forward_cache": _copy(result._forward_cache)},
    }


def _make_result(trainer: Trainer, modules: Mapping[str, Any], saved: Mapping[str, Any], device: torch.device) -> Any:
    """The entry that `self.log` would find: its description must equal that of the next call."""
    of_torch, reduce_name = saved["reduce"]
    reduce_fx = getattr(torch, reduce_name) if of_torch else {"min": min, "max": max, "sum": sum}[reduce_name]
    meta = _Metadata(**saved["meta"], reduce_fx=reduce_fx)
    should, rank_zero_only, op = saved["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only, _op=op)
    result = _ResultMetric(meta, saved["is_tensor"])
    if not saved["is_tensor"]:
        result.value = modules[meta.metric_attribute]
    _put_back(result, saved["states"], device)
    result.has_reset = saved["has_reset"]
    return result


def _read_states(metric: Any) -> dict[str, Any]:
    return {name: _copy(getattr(metric, name)) for name in (*metric._defaults, *_CACHES)}


def _put_back(metric: Any, states: Mapping[str, Any], device: torch.device) -> None:
    for name, value in states.items():
        setattr(metric, name, _copy(value, device))


def _copy(value: Any, device: torch.device | None = None) -> Any:
    """New containers, detached tensors. The tensors of a snapshot are on the host: `device` is where they belong."""
    if isinstance(value, torch.Tensor):
        return value.detach() if device is None else value.detach().to(device)
    if isinstance(value, dict):
        return {key: _copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, device) for item in value)
    return value
