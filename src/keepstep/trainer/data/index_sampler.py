"""A sampler that begins in the middle: the indices of batches that were given before are drawn and not loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import RandomSampler

from keepstep.errors import RecoveryError
from keepstep.trainer.data.order_state import marks
from keepstep.trainer.state.rng import Generator

log = logging.getLogger("keepstep")


class PositionedSampler:
    """Around the (batch) sampler of a loader. It draws when that one draws.

    A position holds until the next one: an iterator with workers begins twice, and uses the second one.
    """

    def __init__(self, sampler: Iterable[Any], generators: Sequence[Generator]) -> None:
        self._sampler, self._generators = sampler, generators
        self._num_skipped = self._num_pads = 0
        self._is_empty = False
        self._newest: PositionedIndices | None = None
        self.wants_check = not _draws_at_once(sampler)  # until it is named in a warning

    def start_at(self, num_given: int, *, num_pads: int = 0) -> None:
        """Begin after so many batches, with so many empty ones in front."""
        self._num_skipped, self._num_pads, self._is_empty = num_given, num_pads, False

    def start_empty(self) -> None:
        """Begin at the end."""
        self._is_empty = True

    def skip_now(self) -> None:
        """Draw the indices of the batches before the position, unless that was done."""
        assert self._newest is not None, "a pass has begun"
        self._newest.skip()

    def __iter__(self) -> Iterator[Any]:
        if self._is_empty:
            return iter(())
        self._newest = PositionedIndices(iter(self._sampler), self._num_skipped, self._num_pads, self)
        return self._newest

    def __len__(self) -> int:
        assert isinstance(self._sampler, Sized)
        return len(self._sampler)

    def marks(self) -> list[Any]:
        """Of the random states that it may draw from: the global ones first."""
        return marks(self._generators)

    def warn(self, *, is_global: bool) -> None:
        """Name it. It drew in the middle of a pass, where other code draws too: a restore cannot draw this again."""
        self.wants_check = False
        source = "the global random state" if is_global else "a generator that other code draws from too"
        log.warning(
            "%s draws from %s in the middle of an epoch, so its order is not exact after a restore: "
            "give it a generator of its own, or draw all indices at the beginning of __iter__",
            type(getattr(self._sampler, "sampler", self._sampler)).__name__,
            source,
        )


def _draws_at_once(sampler: Any) -> bool:
    """Whether all is drawn for the first batch. What torch's RandomSampler draws at its end is not used."""
    inner = getattr(sampler, "sampler", sampler)
    return type(inner) is RandomSampler and not inner.replacement and inner.num_samples <= len(inner.data_source)


class PositionedIndices:
    """One pass."""

    def __init__(self, indices: Iterator[Any], num_skipped: int, num_pads: int, sampler: PositionedSampler) -> None:
        self._indices, self._sampler = indices, sampler
        self._num_skipped, self._num_pads = num_skipped, num_pads
        self._num_drawn = 0
        self._after: list[Any] = []  # marks behind the indices that were drawn last
        self._shared: set[int] = set()  # Positions of marks that other code has changed in between.

    def skip(self) -> None:
        for index in range(self._num_skipped):
            try:
                next(self._indices)
            except StopIteration:
                raise RecoveryError(
                    f"the loader had given {self._num_skipped} batches of this epoch and has only {index} now",
                    hint="start with the data and settings that it was saved with",
                ) from None
        self._num_drawn += self._num_skipped
        self._num_skipped = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        if self._num_pads:
            self._num_pads -= 1
            return []
        self._num_drawn += 1
        if not self._sampler.wants_check:
            return next(self._indices)
        before = self._sampler.marks()
        indices = next(self._indices)
        after = self._sampler.marks()
        self._shared |= _changed(self._after, before)
        drawn = _changed(before, after) if self._num_drawn > 1 else set()
        if (is_global := 0 in drawn) or drawn & self._shared:
            self._sampler.warn(is_global=is_global)
        self._after = after
        return indices


def _changed(before: list[Any], after: list[Any]) -> set[int]:
    return {index for index, (first, second) in enumerate(zip(before, after, strict=False)) if first != second}
