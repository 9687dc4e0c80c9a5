"""Keys that mean something in this process only: `id()` of an object, an address, the default text of an object.

In another process they name nothing, or something else, and an object that looks its state up by them loses it.
Only keys of dicts and items of sets are judged: a number that is merely stored harms nobody.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep import values as codec
from keepstep.errors import CaptureError

# What such a key leaves in encoded values: text, or the first bytes of an integer from 2^32 to 2^48.
_TEXT, _INTEGER = b" at 0x", b"\xcf\x00\x00"
_DIGITS = re.compile(rb"0x[0-9a-fA-F]{8,12}|[0-9]{10,15}")
_OBJECT = re.compile(r"[\w>] at 0x[0-9a-fA-F]{6,}")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]{8,12}|(?<![0-9])[0-9]{10,15}(?![0-9])")
DIGITS_BYTES = 1 << 20  # Longer values are not searched for digits, which takes 10 ms per MiB.
ADDRESSES = range(1 << 32, 1 << 48)
MAX_SHOWN = 3
MAX_COLLECTED = 8  # Keys that were addresses of nothing so often are no addresses: times, numbers of samples.


class KeyCheck:
    """Judges the keys of one state, from reading to reading. From any thread."""

    def __init__(self) -> None:
        self._collected = 0

    def check(self, encoded: bytes, path: str) -> None:
        """Raise CaptureError when a key in these encoded values means nothing in another process."""
        suspected = _TEXT in encoded or _INTEGER in encoded
        if suspected or (len(encoded) <= DIGITS_BYTES and _DIGITS.search(encoded)):
            self.check_tree(codec.decode(encoded), path)

    def check_tree(self, tree: Any, path: str) -> None:
        """The same of values that are not encoded."""
        owners: dict[int, str] | None = None
        found: list[str] = []
        for where, key in _keys(tree, path):
            meaning = ""
            for part in key if type(key) is tuple else (key,):
                if type(part) is str and _OBJECT.search(part):
                    meaning = "the text of an object, with its address"
                elif numbers := [number for number in _numbers(part) if number in ADDRESSES]:
                    owners = self._owners() if owners is None else owners
                    meaning = next((owners[number] for number in numbers if number in owners), "")
            if meaning:
                found.append(f"{where} ({meaning})")
        if found:
            more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
            raise CaptureError(
                f"keys that mean nothing in another process: {', '.join(found[:MAX_SHOWN])}{more}",
                hint="use the name or the index of the object as the key",
            )
        if owners is not None:
            self._collected += 1  # Only where nothing was found: it takes a tenth of a second.

    def _owners(self) -> dict[int, str]:
        """What the addresses of this process belong to."""
        owners: dict[int, str] = {}
        for thing in gc.get_objects() if self._collected < MAX_COLLECTED else ():
            if issubclass(type(thing), torch.Tensor):
                try:
                    owners[thing.data_ptr()] = "the address of a tensor"
                except RuntimeError:  # It has no memory of its own.
                    pass
            owners[id(thing)] = f"id() of a {type(thing).__name__}"
        return owners


def _numbers(key: Any) -> list[int]:
    """The numbers that a key is, or has in its text."""
    if type(key) is int:
        return [key]
    texts = _NUMBERS.findall(key) if type(key) is str else []
    return [int(text, 0) for text in texts if text.startswith("0x") or text[0] != "0"]


def _keys(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}.{key}", key
            yield from _keys(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _keys(item, f"{path}.{index}")
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{path}.{item}", item) for item in value)
