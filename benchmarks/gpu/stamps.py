"""Values that say which step, which tensor and which place they are of. For trainers (torch) and readers (numpy).

An element at place i of tensor t after step s holds, as an integer of its width, i * ODD + number(s, t), wrapped. So a
byte of another step, another tensor or another place is seen wherever it lands. No torch here: the reader has numpy.
"""

from __future__ import annotations

ODD = 0x1E3779B1
KINDS = {"": 0, "moment": 1, "second": 2}
COUNTER = "step"


def number_of(step: int, salt: int, bits: int) -> int:
    """One number per step and tensor, as a signed integer; steps up to 2**16 apart differ even in 16 bits."""
    wrapped = ((step + 1) * 0x9E3B79B1 + salt * 0x85EBCA6B) % (1 << bits)
    return wrapped - (1 << bits) if wrapped >= 1 << (bits - 1) else wrapped


def salt_of(index: int, kind: str) -> int:
    return index * len(KINDS) + KINDS[kind]


def name_of(path: str) -> tuple[int, str] | None:
    """(parameter, kind) of a path in a snapshot's layout: `model.3`, `optimizer.state.3.moment`; None: not stamped."""
    parts = path.split(".")
    if parts[0] == "model" and len(parts) == 2:
        return int(parts[1]), ""
    if parts[:2] == ["optimizer", "state"] and len(parts) == 4 and (parts[3] in KINDS or parts[3] == COUNTER):
        return int(parts[2]), parts[3]
    return None


def numels_for(total_bytes: int) -> list[int]:
    """Large, odd and tiny tensors; with two moments each, 12 bytes per element, about `total_bytes` in all."""
    big = max(64, total_bytes // (12 * 6))
    return [big, big + 1, 257, 64, big // 2 + 3, 1, big // 2, 77] * 2
