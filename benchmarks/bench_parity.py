"""Parity, rebuilding and fingerprints per thread, against memcpy measured beside them.

    python benchmarks/bench_parity.py --out benchmarks/results/parity-cpu.json      about two minutes, idle machine
    python benchmarks/bench_parity.py --quick                                       small and short: does it run at all?

Every figure is bytes of data read per second, as a ratio to the bytes that libc's memcpy copies per second in the same
round: others share the machine, and a round disturbs both. A round walks through arrays of shared memory that are far
larger than the caches, touched before. Target: encoding one parity row, XOR and Q, at 0.9 of memcpy or more.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from report import provenance, write_result
from rich.console import Console
from rich.table import Table

from keepstep.arena.slots import CHUNK_BYTES
from keepstep.parity.backend import chosen
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import fingerprint

TARGET = 0.9
MAX_SOURCES = 8


class Task(NamedTuple):
    """One thing to measure: `work(chunk)` reads `data_bytes` of data for one chunk of output."""

    name: str
    data_bytes: int
    work: Callable[[int], None]
    has_target: bool = False


class Memory:
    """A thread's own sources and target, in shared memory, touched."""

    def __init__(self, size_bytes: int) -> None:
        self.num_chunks = size_bytes // CHUNK_BYTES
        self._maps = [mmap.mmap(-1, self.num_chunks * CHUNK_BYTES) for _ in range(MAX_SOURCES + 1)]
        filling = os.urandom(CHUNK_BYTES)
        for one in self._maps:
            for at in range(0, len(one), CHUNK_BYTES):
                one[at : at + CHUNK_BYTES] = filling
        self.views = [
            [memoryview(one)[at : at + CHUNK_BYTES] for at in range(0, len(one), CHUNK_BYTES)] for one in self._maps
        ]
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self._maps]

    def sources(self, k: int, chunk: int) -> list[memoryview]:
        return [view[chunk] for view in self.views[:k]]

    def target(self, chunk: int) -> memoryview:
        return self.views[-1][chunk]


def main() -> int:
    options = parse_arguments()
    console = Console(width=120)
    body: dict[str, Any] = {**provenance(), "options": vars(options), "backend": vars_of_backend()}
    results: dict[str, Any] = {}
    for num_threads in (1, 2):
        memories = [Memory(options.source_mb << 20) for _ in range(num_threads)]
        results[f"{num_threads} thread{'s' if num_threads > 1 else ''}"] = measure(memories, options.rounds)
    missed = print_table(console, results)
    if options.out:
        write_result(Path(options.out), {**body, "load_after": os.getloadavg(), "target": TARGET, "results": results})
        console.print(f"written to {options.out}", markup=False)
    if options.quick:
        console.print("Small and short: this says that the benchmark runs, not how fast anything is.")
    elif missed:
        console.print(f"below the target of {TARGET}: {', '.join(missed)}", markup=False)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source-mb", type=int, default=64, help="size of each source array of a thread, in MiB")
    parser.add_argument("--rounds", type=int, default=15, help="medians are over these")
    parser.add_argument("--quick", action="store_true", help="8 MiB, 2 rounds")
    parser.add_argument("--out", default="", help="result file, by custom in benchmarks/results/")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(source_mb=8, rounds=2)
    return options


def vars_of_backend() -> dict[str, str]:
    wheel = next((d.version for d in importlib.metadata.distributions(name="pyeclib")), "not installed")
    return {"name": chosen().name, "file": Path(chosen().path).name, "pyeclib": wheel}


def tasks(memory: Memory) -> list[Task]:
    def encode(k: int, m: int, row: int, *, has_target: bool = False) -> Task:
        code = Code(k, m)
        name = f"encode {('XOR', 'Q', 'Cauchy', 'Cauchy')[row]} k={k} m={m}"
        return Task(
            name, k * CHUNK_BYTES, lambda c: code.encode(row, memory.sources(k, c), memory.target(c)), has_target
        )

    def rebuild(k: int, m: int, lost: tuple[int, ...]) -> Task:
        code, kept = Code(k, m), [index for index in range(k + m) if index not in lost][:k]
        # Any bytes will do for the pieces: the arithmetic is the same.
        return Task(
            f"rebuild {len(lost)} lost k={k} m={m}",
            k * CHUNK_BYTES,
            lambda c: code.rebuild(lost[0], dict(zip(kept, memory.sources(k, c), strict=True)), memory.target(c)),
        )

    def copy(chunk: int) -> None:
        at = chunk * CHUNK_BYTES
        ctypes.memmove(memory.addresses[-1] + at, memory.addresses[0] + at, CHUNK_BYTES)

    return [
        Task("memcpy", CHUNK_BYTES, copy),
        encode(1, 1, 0),
        encode(4, 1, 0, has_target=True),
        encode(4, 2, 1, has_target=True),
        encode(7, 1, 0, has_target=True),
        encode(7, 2, 1, has_target=True),
        encode(5, 3, 2),
        rebuild(4, 1, (0,)),
        rebuild(4, 2, (0, 2)),
        rebuild(7, 2, (1, 5)),
        rebuild(5, 3, (0, 1, 2)),
        Task("fingerprint", CHUNK_BYTES, lambda c: void(fingerprint(memory.views[0][c]))),
    ]


def void(_: bytes) -> None:
    pass


def measure(memories: list[Memory], rounds: int) -> dict[str, dict[str, Any]]:
    """Per task the rates in GB/s per thread, and the median of the ratios to memcpy of the same round."""
    per_thread = [tasks(memory) for memory in memories]
    names = [task.name for task in per_thread[0]]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for index, name in enumerate(names):
            rates[name].append(
                rate([(tasks[index], memory.num_chunks) for tasks, memory in zip(per_thread, memories, strict=True)])
            )
    found = {}
    for task in per_thread[0]:
        ratios = [one / copied for one, copied in zip(rates[task.name], rates["memcpy"], strict=True)]
        found[task.name] = {
            "gb_s_per_thread": statistics.median(rates[task.name]),
            "ratio_to_memcpy": statistics.median(ratios),
            "has_target": task.has_target,
            "all_gb_s": rates[task.name],
            "all_ratios": ratios,
        }
    return found


def rate(work: list[tuple[Task, int]]) -> float:
    """GB/s per thread, all threads at once."""
    barrier, spent = threading.Barrier(len(work)), [0.0] * len(work)

    def run(index: int) -> None:
        task, num_chunks = work[index]
        task.work(0)
        barrier.wait()
        start = time.perf_counter()
        for chunk in range(num_chunks):
            task.work(chunk)
        spent[index] = time.perf_counter() - start

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.mean(
        task.data_bytes * num_chunks / seconds / 1e9 for (task, num_chunks), seconds in zip(work, spent, strict=True)
    )


def print_table(console: Console, results: dict[str, Any]) -> list[str]:
    table, missed = Table(title="data read per second and thread"), []
    table.add_column("what")
    for threads in results:
        table.add_column(f"{threads}: GB/s", justify="right")
        table.add_column("of memcpy", justify="right")
    for name in next(iter(results.values())):
        cells = []
        for threads, found in results.items():
            ratio = found[name]["ratio_to_memcpy"]
            cells += [f"{found[name]['gb_s_per_thread']:.1f}", f"{ratio:.2f}"]
            if found[name]["has_target"] and ratio < TARGET:
                missed.append(f"{name} ({threads}, {ratio:.2f})")
        table.add_row(name, *cells)
    console.print(table)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
