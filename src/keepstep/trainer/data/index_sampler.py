"""A sampler that begins in the middle: the indices of batches that were given before are drawn and not loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from keepstep.errors import RecoveryError
from keepstep.trainer.data.order_state import note_state

log = logging.getLogger("keepstep")


class PositionedSampler:
    """Around the (batch) sampler of a loader. It draws when that one draws.

    A position holds until the next one: an iterator with workers begins twice, and uses the second one.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._num_skipped = self._num_pads = 0
        self._is_empty = False
        self._newest: PositionedIndices | None = None
        self._is_checked = False  # whether it draws for each batch

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

    def check_draws(self, before: bytes) -> None:
        """Warn where a batch after the first draws from the global random states: training draws in between."""
        if note_state(()) != before:
            log.warning(
                "%s draws from the global random state for each batch, so its order is not exact after a restore: "
                "give it a generator of its own (an attribute `generator`), or draw all indices in __iter__",
                type(self._sampler).__name__,
            )

    @property
    def wants_check(self) -> bool:
        """True once."""
        wanted, self._is_checked = not self._is_checked, True
        return wanted


class PositionedIndices:
    """One pass."""

    def __init__(self, indices: Iterator[Any], num_skipped: int, num_pads: int, sampler: PositionedSampler) -> None:
        self._indices, self._sampler = indices, sampler
        self._num_skipped, self._num_pads = num_skipped, num_pads
        self._num_drawn = 0

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
        if self._num_drawn != 2 or not self._sampler.wants_check:
            return next(self._indices)
        before = note_state(())
        indices = next(self._indices)
        self._sampler.check_draws(before)
        return indices
