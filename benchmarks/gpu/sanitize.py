"""Every kernel of parity/ once, on little data, to be run under a checker of memory accesses:

    PYTHONPATH=src:.carry compute-sanitizer --tool memcheck python benchmarks/gpu/sanitize.py
    PYTHONPATH=src:.carry compute-sanitizer --tool racecheck python benchmarks/gpu/sanitize.py

Torch's cache of device memory is switched off, so that each tensor is an allocation of its own and a read or write
beyond its end is seen. Bits are compared with ISA-L too.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import random

import torch
from torch import Tensor

from keepstep.parity.code import Code
from keepstep.parity.fingerprint import fingerprint
from keepstep.parity.gpu import batches
from keepstep.parity.gpu.batches import Stripe, TensorBytes

CODES = ((1, 1), (7, 1), (6, 2), (7, 2), (32, 2), (5, 3))
SIZE = 70_000
"""more than one row of a table, and not a multiple of anything"""


def main() -> None:
    for k, m in CODES:
        draw = random.Random(k)
        for offset in (0, 3):
            sources = [memory(draw.choice((1, 4096, SIZE - 5, SIZE)), offset) for _ in range(k - 1)] + [None]
            sets = [[row] for row in range(m)] + [list(range(m))]
            stripes = [Stripe(rows, sources, [memory(SIZE, offset) for _ in rows]) for rows in sets]
            batches.EncodeBatch(k, m, stripes).run()
            for stripe in stripes:
                check(k, m, stripe)
        print("parity", k, m, flush=True)
    spans = [
        memory(1_000_003),
        memory(300_000, 3),
        memory(1),
        [TensorBytes(246_800, memory(100)), TensorBytes(4_000_000, memory(7))],
    ]
    for span, row in zip(spans, batches.FingerprintBatch(spans).run().cpu(), strict=True):
        assert bytes(row.numpy()) == fingerprint(read(span)), "fingerprints are wrong"
    small = [memory(size, size % 5) for size in (1, 4, 64, 4096, 65_536, 65_537, SIZE)]
    copies = [memory(one.numel(), one.numel() % 3) for one in small]
    batches.CopyBatch(small, copies).run()
    assert all(map(torch.equal, copies, small)), "copies are wrong"
    print("all is right, Triton:", batches._kernels(torch.empty(0, device="cuda").device) is not None)


def memory(size: int, offset: int = 0) -> Tensor:
    """Exactly to the end of its allocation."""
    return torch.randint(256, (size + offset,), dtype=torch.uint8, device="cuda")[offset:]


def read(source: Tensor | list[TensorBytes]) -> bytes:
    parts = batches._parts(source)
    whole = torch.zeros(parts[-1].end, dtype=torch.uint8)
    for part in parts:
        whole[part.begin : part.end] = part.source.cpu()
    return bytes(whole.numpy())


def check(k: int, m: int, stripe: Stripe) -> None:
    data = [None if source is None else source.cpu().numpy().data for source in stripe.sources]
    for row, out in zip(stripe.rows, stripe.outs, strict=True):
        expected = bytearray(SIZE)
        Code(k, m).encode(row, data, expected)
        assert bytes(out.cpu().numpy()) == expected, (k, m, row)


if __name__ == "__main__":
    main()
