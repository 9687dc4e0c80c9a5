"""Other work on every core of the host, as data loaders do it: how much of it gets done beside snapshots.

python crowd.py FILE INDEX      one worker: counts its rounds into its place of FILE until it is killed
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

import numpy as np

COUNT_BYTES = 64
"""a place for each worker, a cache line apart"""
ELEMENTS = 100_000
START_S = 30.0


class Crowd:
    """As many workers as there are cores."""

    def __init__(self) -> None:
        self.size = len(os.sched_getaffinity(0))
        self._fd = os.memfd_create("crowd")
        os.ftruncate(self._fd, self.size * COUNT_BYTES)
        self._counts = counts_in(self._fd)
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, str(self._fd)]
        self._workers = [subprocess.Popen([*command, str(index)], pass_fds=[self._fd]) for index in range(self.size)]
        deadline = time.monotonic() + START_S
        while not self._counts.all() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self

    def rounds(self) -> int:
        return int(self._counts.sum())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()
        os.close(self._fd)


def counts_in(fd: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(fd, 0), dtype=np.int64)[:: COUNT_BYTES // 8]


def work(fd: int, index: int) -> None:
    counts, parent = counts_in(fd), os.getppid()
    numbers = np.random.default_rng(index).random(ELEMENTS)
    while os.getppid() == parent:  # it must not outlive the benchmark
        np.sort(numbers)
        counts[index] += 1


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
