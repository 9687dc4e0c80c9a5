"""Numbers that a program prints with a name: losses, norms, rates of learning (pure). Times and speeds are not read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from keepstep.check.evidence import ChangedValue

Lines = tuple[str, ...]
_NUMBER = re.compile(r"([A-Za-z_][\w./ -]{0,40}?)[\"']?\s*[:=|,]?\s*([-+]?\d+\.\d+(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)")
_NAMES = re.compile(r"loss|ppl|perplex|acc|error|norm|\blr\b|learning|reward|score|nll|bpb|bpc|mse", re.IGNORECASE)


def changed_numbers(expected: Lines | None, found: Lines | None, *, is_first: bool) -> tuple[ChangedValue, ...]:
    """The first number that differs. `is_first`: the first step of a life, which does not print what its predecessor
    printed after the `take` before."""
    if expected is None or found is None:
        return ()
    wanted, printed = list(_numbers(expected)), list(_numbers(found))
    if is_first:
        names = {name for name, _ in printed}
        wanted = [pair for pair in wanted if pair[0] in names]
        printed = printed[-len(wanted) :] if wanted else []
        wanted = wanted[-len(printed) :] if printed else []
    for (name, value), (other_name, other) in zip(wanted, printed, strict=False):
        if name == other_name and value != other:
            return (ChangedValue(name, value, other),)
    return ()


def unknown_numbers(near: Sequence[Lines | None], found: Lines | None) -> tuple[ChangedValue, ...]:
    """The first number that is in none of the segments of the undisturbed run near this one.

    Where several ranks print into one file, their lines are in any order, and may be in the segment before or after.
    """
    if found is None or any(lines is None for lines in near):
        return ()
    wanted = [pair for lines in near for pair in _numbers(lines or ())]
    for name, value in _numbers(found):
        values = [other for other_name, other in wanted if other_name == name]
        if values and value not in values:
            return (ChangedValue(name, " or ".join(dict.fromkeys(values)), value),)
    return ()


def _numbers(lines: Lines) -> Iterator[tuple[str, str]]:
    for line in lines:
        for name, number in _NUMBER.findall(line):
            if _NAMES.search(name):
                yield name.strip(), number
