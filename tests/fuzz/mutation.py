"""Inputs made from recorded ones by small changes: what a hostile sender would try first."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
TOKENS = (
    b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\xc7\xff\x01", b"[" * 5000, b'{"a":' * 2000, b"\0" * 64, b"\x1b]0;x\a",
)  # fmt: skip


def mutate(seed: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """One to four changes of `seed`; `others`: inputs from which parts may come."""
    data = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                data[at : at + draw.randint(1, 8)] = draw.randbytes(draw.randint(0, 8))
            case 2:
                del data[at:]
            case 3:
                width = draw.choice("BHIQ")
                number = draw.choice(NUMBERS) & ((1 << 8 * struct.calcsize(width)) - 1)
                data[at : at + struct.calcsize(width)] = struct.pack(draw.choice("<>") + width, number)
            case 4:
                data[at:at] = draw.choice(TOKENS)
            case 5:
                other = draw.choice(others)
                cut = draw.randrange(len(other) + 1)
                data[at:] = other[cut:]
            case 6:
                data += data[: draw.randrange(len(data) + 1)]
            case _:
                del data[at : at + draw.randint(1, 64)]
    return bytes(data[: 1 << 20])
