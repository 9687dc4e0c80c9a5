"""Parity and fingerprints on a device, against a plain copy on it measured in the same rounds.

    PYTHONPATH=src:.carry python benchmarks/gpu/parity.py --device cuda --out parity.json     about a minute
    python benchmarks/gpu/parity.py --device cpu                                              toy size: does it run?

Operands of 1 GiB, many times the cache of a device. Rates are bytes read and written per second; each round runs the
copy and every case once, and figures are medians over the rounds. Bits are compared with ISA-L on a sample.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # report.py serves all benchmarks
from report import provenance, write_result

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import fingerprint
from keepstep.parity.gpu import batches as parity
from keepstep.parity.gpu.batches import EncodeBatch, FingerprintBatch, Stripe

NUM_OPERANDS, NUM_ROWS = 7, 3
SAMPLE = 64
"""one chunk of so many is fingerprinted in each snapshot"""
LEAD_CYCLES = 4_000_000
"""that a device is kept busy before each case, so that it does not wait for Python between launches"""
COPY = "copy"
TARGETS = {"XOR k=7": 0.6, "P+Q k=7": 0.4, "P+Q k=6": 0.4}
"""of the copy"""


class Sizes(NamedTuple):
    operand_bytes: int
    fingerprinted_bytes: int
    rounds: int


REAL = Sizes(1 << 30, 17 * 10**9, 25)
TOY = Sizes(2 * CHUNK_BYTES, 5 * CHUNK_BYTES + 1000, 2)


class Case(NamedTuple):
    name: str
    moved_bytes: int
    """read and written, by a perfect implementation"""
    run: Callable[[], object]
    is_right: Callable[[], bool]
    """whether a sample of what was computed last has the bits of ISA-L"""


def main(device: str, out: Path | None = None) -> dict[str, Any]:
    sizes = REAL if device == "cuda" else TOY
    began = time.perf_counter()
    parity.warm_up(device, 7, 2)
    body: dict[str, Any] = {"benchmark": "parity on a device", **provenance(), "sizes": sizes._asdict()}
    body["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    body["triton"] = parity._kernels(torch.empty(0, device=device).device) is not None
    body["warm_up_s"] = time.perf_counter() - began
    began = time.perf_counter()
    cases = make_cases(device, sizes)
    body["tables_s"] = time.perf_counter() - began
    seconds = measure(cases, device, sizes.rounds)
    body["wrong"] = []
    for case in cases:
        case.run()
        if not case.is_right():
            body["wrong"].append(case.name)
    body["results"] = summarize(cases, seconds)
    show(body)
    if out is not None:
        write_result(out, body)
    return body


def make_cases(device: str, sizes: Sizes) -> list[Case]:
    operands = [random_bytes(sizes.operand_bytes, device) for _ in range(NUM_OPERANDS)]
    outs = [torch.empty_like(operands[0]) for _ in range(NUM_ROWS)]
    # One byte further on: what is not aligned goes another way. A quarter of it will do.
    shifted = [operand[1:][: sizes.operand_bytes // 4] for operand in operands]
    state = random_bytes(sizes.fingerprinted_bytes, device)
    chunks = list(state.split(CHUNK_BYTES))

    def copy() -> None:
        outs[0].copy_(operands[0])

    return [
        Case(COPY, 2 * sizes.operand_bytes, copy, lambda: torch.equal(operands[0], outs[0])),
        encoding("XOR k=7", 7, 1, [0], operands, outs),
        encoding("P+Q k=7", 7, 2, [0, 1], operands, outs),
        encoding("P+Q k=6", 6, 2, [0, 1], operands, outs),
        encoding("Q k=7", 7, 2, [1], operands, outs),
        encoding("Cauchy k=5 m=3", 5, 3, [0, 1, 2], operands, outs),
        encoding("XOR k=7 unaligned", 7, 1, [0], shifted, outs),
        fingerprinting("fingerprints of all", chunks),
        fingerprinting(f"fingerprints of 1/{SAMPLE}", chunks[::SAMPLE]),
        fingerprinting("fingerprints unaligned", [chunk[1:] for chunk in chunks[:: SAMPLE // 4]]),
    ]


def encoding(
    name: str, k: int, m: int, rows: Sequence[int], operands: Sequence[Tensor], outs: Sequence[Tensor]
) -> Case:
    size = operands[0].numel()
    stripes = [
        Stripe(rows, [one[at : at + CHUNK_BYTES] for one in operands[:k]], [
            outs[index][at : min(at + CHUNK_BYTES, size)] for index in range(len(rows))
        ])
        for at in range(0, size, CHUNK_BYTES)
    ]  # fmt: skip

    def is_right() -> bool:
        wrong = 0
        for stripe in (stripes[0], stripes[len(stripes) // 2], stripes[-1]):
            data = [source.cpu().numpy().data for source in stripe.sources]
            for row, found in zip(stripe.rows, stripe.outs, strict=True):
                expected = bytearray(found.numel())
                Code(k, m).encode(row, data, expected)
                wrong += bytes(found.cpu().numpy()) != expected
        return not wrong

    return Case(name, (k + len(rows)) * size, EncodeBatch(k, m, stripes).run, is_right)


def fingerprinting(name: str, spans: Sequence[Tensor]) -> Case:
    batch = FingerprintBatch(spans)

    def is_right() -> bool:
        found, some = batch.run().cpu(), {0, len(spans) // 2, len(spans) - 1}
        return all(bytes(found[i].numpy()) == fingerprint(spans[i].cpu().numpy().data) for i in some)

    return Case(name, sum(span.numel() for span in spans), batch.run, is_right)


def random_bytes(size: int, device: str) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, device=device)


def measure(cases: Sequence[Case], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds by case and round; one round before is not counted."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds + 1):
        for case in cases:
            found[case.name].append(time_cuda(case.run) if device == "cuda" else time_cpu(case.run))
    return {name: some[1:] for name, some in found.items()}


def time_cuda(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def time_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summarize(cases: Sequence[Case], seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    rates = {case.name: [case.moved_bytes / one / 1e9 for one in seconds[case.name]] for case in cases}
    return {
        case.name: {
            "ms": 1000 * statistics.median(seconds[case.name]),
            "gb_s": statistics.median(rates[case.name]),
            "of_copy": statistics.median(a / b for a, b in zip(rates[case.name], rates[COPY], strict=True)),
            "target": TARGETS.get(case.name),
            "moved_bytes": case.moved_bytes,
            "all_gb_s": rates[case.name],
        }
        for case in cases
    }


def show(body: dict[str, Any]) -> None:
    print(f"{body['device']}, Triton: {body['triton']}, warm-up {body['warm_up_s']:.1f} s")
    print(f"{'':24}{'ms':>9}{'GB/s':>9}{'of copy':>9}{'target':>8}")
    for name, one in body["results"].items():
        target = f"{one['target']:8.2f}" if one["target"] else ""
        print(f"{name:24}{one['ms']:9.3f}{one['gb_s']:9.1f}{one['of_copy']:9.2f}{target}")
    print("wrong bits:", ", ".join(body["wrong"]) or "none")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="result file, by custom in benchmarks/results/")
    arguments = parser.parse_args()
    sys.exit(1 if main(arguments.device, arguments.out)["wrong"] else 0)
