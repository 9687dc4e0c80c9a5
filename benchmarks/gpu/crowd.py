"""Other work on every core of the host, as data loaders do it: how much of it gets done beside snapshots.

python crowd.py FILE INDEX      one worker: counts its rounds into its place of FILE until it is killed
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
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
        self._file = tempfile.NamedTemporaryFile()
        self._file.truncate(self.size * COUNT_BYTES)
        self._counts = np.frombuffer(mmap.mmap(self._file.fileno(), 0), dtype=np.int64)[:: COUNT_BYTES // 8]
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, self._file.name]
        self._workers = [subprocess.Popen([*command, str(index)]) for index in range(self.size)]
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
        self._file.close()


def work(path: str, index: int) -> None:
    with open(path, "r+b") as file:
        counts = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)[:: COUNT_BYTES // 8]
    numbers = np.random.default_rng(index).random(ELEMENTS)
    while os.getppid() != 1:  # whoever started it is gone
        np.sort(numbers)
        counts[index] += 1


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
