"""`keepstep.Loader`: a data loader that goes on after the batch that it gave last, in the order that it had."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from keepstep.errors import ConfigError, RecoveryError
from keepstep.trainer.data.batch_sources import source_of
from keepstep.trainer.state.loaders import set_all_epochs

log = logging.getLogger("keepstep")

BEHIND_PROPERTIES = ("_DataLoader__multiprocessing_context",)  # what properties of DataLoader read


class Loader(DataLoader[Any]):
    """A data loader that is part of the state. Gives the batches of the loader that it is made of.

        loader = keepstep.Loader(DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4))
        snapshots = keepstep.Snapshotter({"model": model, "optimizer": optimizer}, loader=loader)

    `loader`: a DataLoader; a StatefulDataLoader, or any iterable with `state_dict()` and `load_state_dict()`; or a
    function that returns a batch. After a restore the first iterator goes on after the batch that was given last:
    batches before it are skipped by their indices and not loaded, and all random states are those of the snapshot when
    the next one is loaded.
    """

    def __init__(self, loader: Any) -> None:
        if isinstance(loader, Loader):
            raise ConfigError("this is a keepstep.Loader already", hint="give it to the Snapshotter")
        self._wrapped = loader
        self._source = source_of(loader)
        self.epoch = 0  # The number of the pass that is going on, or comes next. `Snapshotter.batches` counts it.
        self._newest: weakref.ref[LoaderPass] | None = None
        self._progress = PassProgress()  # of the newest pass
        self._given_before = 0  # batches of the passes before it
        self._resumes = False  # The next pass goes on with the one of the snapshot.
        self._num_given = 0  # batches of that pass
        self._saved_epoch = 0  # its epoch
        self._is_epoch_set = False  # The program has set an epoch since.
        self._set_rng: Callable[[], object] = _leave

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.begin_pass(if_empty=self._of_ended_epoch())

    def begin_pass(self, *, if_empty: str = "") -> LoaderPass:
        """An iterator for a loop that keeps the number of the epoch in the state. `if_empty`: see LoaderPass."""
        self._warn_about_dropped()
        if self._resumes:
            batches = self._source.resume(self._num_given)
            progress = PassProgress(self._num_given, resumed_at=self._num_given)
        else:
            batches, progress = self._source.begin(), PassProgress()
        self._given_before = self.num_given
        newest = LoaderPass(batches, progress, self._set_rng, if_empty)
        self._resumes, self._set_rng = False, _leave
        self._progress, self._newest = progress, weakref.ref(newest)
        return newest

    def __len__(self) -> int:
        return len(self._wrapped)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: for all samplers, and for an iterable dataset. A pass of another epoch is over."""
        if epoch != self.epoch:
            self._newest = None
        self.epoch, self._is_epoch_set = epoch, True
        set_all_epochs(self._wrapped, epoch)

    @property
    def num_given(self) -> int:
        """Batches that were given in this process."""
        return self._given_before + self._progress.num_given - (self._progress.resumed_at or 0)

    @property
    def resumes(self) -> bool:
        """Whether the next iterator goes on within an epoch."""
        return self._resumes

    def is_newest(self, batches: object) -> bool:
        """Whether this is the iterator whose position is the position of the loader."""
        return self._newest is not None and self._newest() is batches

    @property
    def _is_open(self) -> bool:
        """Whether the newest iterator is still used, and has not ended."""
        return self._newest is not None and self._newest() is not None and not self._progress.ended

    # Stateful

    def state_dict(self) -> dict[str, Any]:
        """The position. Draws nothing and makes no iterator."""
        resumes, num_given = (True, self._progress.num_given) if self._is_open else (self._resumes, self._num_given)
        return {
            "kind": self._source.kind, "epoch": self.epoch, "resumes": resumes,
            "num_given": num_given if resumes else 0, "source": self._source.state(resumes=resumes),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        if state.get("kind") != self._source.kind:
            raise RecoveryError(
                f"the loader is of the kind {self._source.kind!r} now and was saved as {state.get('kind')!r}",
                hint="start with the code that saved it",
            )
        self._newest = None
        self.epoch, self._resumes, self._num_given = state["epoch"], state["resumes"], state["num_given"]
        self._saved_epoch, self._is_epoch_set = self.epoch, False
        self._source.load(state["source"])

    def set_rng_at_resume(self, set_rng: Callable[[], object]) -> None:
        """Set all random states so, just before the first batch of an epoch that goes on."""
        self._set_rng = set_rng if self._resumes else _leave

    def _warn_about_dropped(self) -> None:
        progress = self._progress
        is_dropped = self._newest is not None and not self._is_open and not progress.ended
        if is_dropped and progress.num_given - 1 == progress.resumed_at:
            log.warning(
                "the first iterator after the restore was dropped after one batch, and the rest of its epoch is lost: "
                "do not peek with next(iter(loader)); take what it is for from the dataset"
            )

    def _of_ended_epoch(self) -> str:
        """What to warn of, should the next iterator give no batch: a program may take it for an epoch of its own."""
        if not self._resumes or (self._is_epoch_set and self.epoch == self._saved_epoch):
            return ""
        ended, begin = "its epoch", "epoch restored.step // len(loader)"
        if self._is_epoch_set:
            ended, begin = f"epoch {self._saved_epoch}", f"epoch {self._saved_epoch} (restored.step // len(loader))"
        return f"the restored snapshot was the last of {ended}: this iterator gives no batch; begin the loop at {begin}"

    # What frameworks ask a DataLoader for

    def __getattr__(self, name: str) -> Any:
        """The public attributes of the loader inside."""
        if (name.startswith("_") and name not in BEHIND_PROPERTIES) or name == "next_iter_state":
            raise AttributeError(name)
        return getattr(self._wrapped, name)


@dataclass
class PassProgress:
    """How far a pass is. Outlives it."""

    num_given: int = 0
    resumed_at: int | None = None
    ended: bool = False


class LoaderPass:
    """One pass through a Loader."""

    def __init__(
        self, batches: Iterator[Any], progress: PassProgress, set_rng: Callable[[], object], if_empty: str = ""
    ) -> None:
        """`set_rng`: called just before the first batch is asked for. `if_empty`: the warning, if there is none."""
        self._batches, self._progress, self._set_rng, self._if_empty = batches, progress, set_rng, if_empty

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._set_rng()
        self._set_rng = _leave
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._if_empty and self._progress.num_given == self._progress.resumed_at and not self._progress.ended:
                log.warning(self._if_empty)
            self._progress.ended = True
            raise
        self._progress.num_given += 1
        return batch


def _leave() -> None:
    """Leave the random states as they are."""
