"""Keys that mean something in this process only: `id()` of an object, an address, the default text of an object.

In another process they name nothing, or something else, and an object that looks its state up by them loses it.
Only keys of dicts and items of sets are judged: a number that is merely stored harms nobody.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
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


def check_keys(encoded: bytes, path: str) -> None:
    """Raise CaptureError when a key in these encoded values means nothing in another process."""
    suspected = _TEXT in encoded or _INTEGER in encoded
    if not suspected and (len(encoded) > DIGITS_BYTES or not _DIGITS.search(encoded)):
        return
    objects = _LiveObjects()
    found = [(where, text) for where, key in _keys(codec.decode(encoded), path) if (text := objects.meaning(key))]
    if found:
        shown = ", ".join(f"{where} ({text})" for where, text in found[:MAX_SHOWN])
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise CaptureError(
            f"keys that mean nothing in another process: {shown}{more}",
            hint="use the name or the index of the object as the key",
        )


class _LiveObjects:
    """What the addresses of this process belong to. Collected when a number may be one."""

    def meaning(self, key: Any) -> str:
        """What a key means in this process alone; nothing for any other key."""
        if type(key) is int:
            return self._owner(key)
        if type(key) is tuple:
            return next(filter(None, map(self.meaning, key)), "")
        if type(key) is not str:
            return ""
        if _OBJECT.search(key):
            return "the text of an object, with its address"
        numbers = (int(number, 0) for number in _NUMBERS.findall(key) if number.startswith("0x") or number[0] != "0")
        return next(filter(None, map(self._owner, numbers)), "")

    def _owner(self, number: int) -> str:
        return self._owners.get(number, "") if number in ADDRESSES else ""

    @cached_property
    def _owners(self) -> dict[int, str]:
        owners: dict[int, str] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                try:
                    owners[thing.data_ptr()] = "the address of a tensor"
                except RuntimeError:  # It has no memory of its own.
                    pass
            owners[id(thing)] = f"id() of a {type(thing).__name__}"
        return owners


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
