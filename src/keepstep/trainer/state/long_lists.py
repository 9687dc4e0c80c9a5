"""Long lists of plain values (histories, logs): encoded block by block, and only blocks that changed.

A block is recognised as unchanged when every place in it holds the same object: its items, their keys and values, down
to values that cannot change. These comparisons run in few long calls of C, inside `take`; what is new is only noted
there, and encoded on the copy thread. A list with anything else in it (a tensor, an array, a set) is read anew.

Lists are told apart by their order in the state of an object. A mistake costs time and nothing else: the objects
themselves are compared.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from keepstep import values as codec
from keepstep.values import ItemBlocks

LONG = 512  # Items from which a list is kept in blocks.
BLOCK = 256  # Items of a block. The last one is encoded again whenever an item is appended.
MAX_DEPTH = 6  # Levels below an item.

_NUMPY = (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)
_CONSTANTS = frozenset({type(None), bool, int, float, str, bytes, *_NUMPY})
_SEQUENCES = (list, tuple)
_KNOWN = _CONSTANTS.union((dict, *_SEQUENCES))

_values: Callable[[dict[Any, Any]], Iterable[Any]] = operator.methodcaller("values")


class _NotPlainError(Exception):
    """Something in a block may change without being replaced."""


class _Level:
    """Objects that stood side by side, and what the containers among them held."""

    def __init__(self, items: list[Any], depth: int = 0) -> None:
        kinds = set(map(type, items))
        if not kinds <= _KNOWN or depth > MAX_DEPTH:
            raise _NotPlainError
        self._items = items
        self._dicts = [item for item in items if type(item) is dict] if dict in kinds else []
        nested = not kinds.isdisjoint(_SEQUENCES)
        self._sequences = [item for item in items if type(item) in _SEQUENCES] if nested else []
        self._lengths = self._measure()
        self._keys = list(chain.from_iterable(self._dicts))
        if not _CONSTANTS.issuperset(map(type, self._keys)):
            raise _NotPlainError
        below = list(self._below())
        self._inner = _Level(below, depth + 1) if below else None

    def unchanged(self, items: Iterable[Any]) -> bool:
        """Whether these are the same objects, and hold the same ones."""
        return (
            all(map(operator.is_, items, self._items))
            and self._measure() == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._dicts), self._keys))
            and (self._inner is None or self._inner.unchanged(self._below()))
        )

    def copies(self) -> Iterator[Any]:
        """The objects as they were, in new containers."""
        inner = list(self._inner.copies()) if self._inner is not None else []
        of_dicts, of_sequences = self._lengths[: len(self._dicts)], self._lengths[len(self._dicts) :]
        keys, entries, others = iter(self._keys), iter(inner), iter(inner[sum(of_dicts) :])
        counts, lengths = iter(of_dicts), iter(of_sequences)
        for item in self._items:
            if type(item) is dict:
                count = next(counts)
                yield dict(zip(islice(keys, count), islice(entries, count), strict=True))
            elif type(item) in _SEQUENCES:
                yield type(item)(islice(others, next(lengths)))
            else:
                yield item

    def _measure(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._sequences)]

    def _below(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(_values, self._dicts)), chain.from_iterable(self._sequences))


class ListBlock:
    """Some items of a list in a row."""

    def __init__(self, items: list[Any], path: str, check: Callable[[bytes, str], None]) -> None:
        self._size, self._path, self._check = len(items), path, check
        self._level = _Level(items)
        self._encoded: bytes | None = None

    def holds(self, items: list[Any]) -> bool:
        return len(items) == self._size and self._level.unchanged(items)

    def encode(self) -> bytes:
        """The encodings of the items one after the other. Made once; from any thread."""
        if self._encoded is None:
            whole = codec.encode(list(self._level.copies()), path=self._path)
            self._check(whole, self._path)
            self._encoded = whole[len(codec.list_head(self._size)) :]
        return self._encoded


class LongLists:
    """The long lists of one object, from reading to reading."""

    def __init__(self, path: str, check: Callable[[bytes, str], None]) -> None:
        """`check` refuses encoded values, with their path, by a CaptureError."""
        self._path, self._check = path, check
        self._lists: list[list[ListBlock]] = []
        self._next = 0

    def begin(self) -> None:
        """Begin to read the object."""
        self._next = 0

    @property
    def found(self) -> bool:
        """Whether there were any in this reading."""
        return self._next > 0

    def read(self, items: list[Any]) -> ItemBlocks | None:
        """The blocks of the next list; None when it is to be read in another way."""
        known = self._lists[self._next] if self._next < len(self._lists) else []
        blocks: list[ListBlock] = []
        try:
            for number, start in enumerate(range(0, len(items), BLOCK)):
                part = items[start : start + BLOCK]
                if number < len(known) and known[number].holds(part):
                    blocks.append(known[number])
                else:
                    blocks.append(ListBlock(part, f"{self._path}[{start}:]", self._check))
        except _NotPlainError:
            return None
        self._lists[self._next : self._next + 1] = [blocks]
        self._next += 1
        return ItemBlocks(len(items), tuple(block.encode for block in blocks))

    def end(self) -> None:
        """Release lists that are gone."""
        del self._lists[self._next :]


def longest(path: str, value: Any) -> tuple[int, str]:
    """The longest container in a value: its length and its path."""
    if isinstance(value, ItemBlocks):
        return value.count, path
    if not isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return 0, path
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return max([(len(value), path), *(longest(f"{path}.{key}", item) for key, item in inner)])
