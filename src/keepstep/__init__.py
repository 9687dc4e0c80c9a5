"""keepstep keeps every step of a PyTorch training run in host memory and restores it bit for bit.

    state = {"model": model, "optimizer": optimizer}
    with keepstep.Snapshotter(state) as snapshots:
        restored = snapshots.restore()
        for step in range(restored.step + 1 if restored else 0, total_steps):
            train_one_step()
            snapshots.take(step)

Importing this package does not import torch: the names that need it are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keepstep._version import VERSION as __version__
from keepstep.config import Config
from keepstep.errors import CaptureError, ConfigError, Error, IntegrityError, KeeperError, RecoveryError
from keepstep.types import Source, Stateful, Status, Survives

if TYPE_CHECKING:
    from keepstep.trainer.connection.job import find
    from keepstep.trainer.data.loader import Loader
    from keepstep.trainer.results import PendingSnapshot, Restored
    from keepstep.trainer.snapshotter import Snapshotter

__all__ = [
    "CaptureError",
    "Config",
    "ConfigError",
    "Error",
    "IntegrityError",
    "KeeperError",
    "Loader",
    "PendingSnapshot",
    "RecoveryError",
    "Restored",
    "Snapshotter",
    "Source",
    "Stateful",
    "Status",
    "Survives",
    "__version__",
    "find",
]

_LAZY = {
    "Loader": "keepstep.trainer.data.loader",
    "PendingSnapshot": "keepstep.trainer.results",
    "Restored": "keepstep.trainer.results",
    "Snapshotter": "keepstep.trainer.snapshotter",
    "find": "keepstep.trainer.connection.job",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
