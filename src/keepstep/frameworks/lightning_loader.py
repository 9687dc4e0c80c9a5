"""The train dataloader as Lightning sees it: the user's own, which reports each request for a batch.

Installed behind Lightning's own changes to the loader (a distributed sampler, seeds for workers). Batches come through
a `keepstep.Loader`, made with the first iterator: from then on nobody changes the loader any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader

from keepstep.errors import ConfigError
from keepstep.trainer.data.loader import Loader
from keepstep.types import Stateful


class BatchListener(Protocol):
    """Is called when the training loop asks for its next batch."""

    def before_batch(self) -> None:
        """Everything of the last batch is done, and nothing of the next one."""


class LoaderPosition:
    """The position of the train dataloader, also while there is none yet."""

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._restored: Mapping[str, Any] | None = None

    def attach(self, loader: Loader) -> None:
        """From now on the position is that of `loader`, which begins where the restored one was."""
        self._loader = loader
        if self._restored is not None:
            loader.load_state_dict(self._restored)
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() if self._loader is not None else dict(self._restored or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state or None


def wrap_train_loader(loader: Any, position: LoaderPosition, listener: BatchListener) -> TrainLoader:
    """The loader as a TrainLoader. Checkpoints of Lightning hold its position only if it has one of its own."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the train dataloader is a {type(loader).__name__}: Lightning begins it twice, and its order is lost",
            hint="give a DataLoader",
        )
    if isinstance(loader, Loader):
        return TrainLoader(loader, position, listener)
    Loader(loader)  # Refuses here what has no position: Lightning would hide an error of the first iterator.
    kind = StatefulTrainLoader if isinstance(loader, Stateful) else TrainLoader
    return kind(loader, position, listener)


class TrainLoader(DataLoader[Any]):
    """Another loader, with all its attributes."""

    def __init__(self, loader: Any, position: LoaderPosition, listener: BatchListener) -> None:
        vars(self).update(_wrapped=loader, _position=position, _listener=listener, _batches=None)

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._wrapped, Loader) and name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)  # That position is in snapshots.
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def __len__(self) -> int:
        return len(self._wrapped)

    def __iter__(self) -> Any:
        if self._batches is None:
            loader = self._wrapped if isinstance(self._wrapped, Loader) else Loader(self._wrapped)
            self._position.attach(loader)
            vars(self).update(_batches=loader)
        return _ReportingIterator(self._batches.begin_pass(), self._listener)


class StatefulTrainLoader(TrainLoader):
    """A loader that knows its position by itself, such as torchdata's."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._wrapped.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wrapped.load_state_dict(state)


class _ReportingIterator:
    def __init__(self, batches: Iterator[Any], listener: BatchListener) -> None:
        self._batches, self._listener = batches, listener

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._listener.before_batch()
        return next(self._batches)
