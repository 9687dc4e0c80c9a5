"""Facts that trainers under test report, and how a test reads them: JSON lines, one file per process.

A training script for a LocalCluster reports three kinds; any other is kept for the test:

    tell_restored(restored)          the result of restore(), None included
    tell("step", step=step)          after each step
    tell("result", digest=...)       once, at the end: equal to that of a run without failures

Outside a cluster `tell` prints the line, so that the same script runs by hand. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = "KEEPSTEP_TEST_FACTS"


def tell(event: str, **fields: Any) -> None:
    """Report a fact as one line. It ends with a newline, so that a reader sees all of it or nothing."""
    environ = os.environ
    line = json.dumps(
        {
            "event": event, "at": time.time(), "pid": os.getpid(),
            "node": environ.get("KEEPSTEP_NODE_ID", ""), "rank": int(environ.get("RANK", 0)),
            "world_size": int(environ.get("WORLD_SIZE", 1)),
            "incarnation": int(environ.get("KEEPSTEP_INCARNATION", "0").partition(":")[0]),
            **fields,
        }
    )  # fmt: skip
    if directory := environ.get(FACTS):
        with open(Path(directory) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")
    else:
        print(line, flush=True)


def tell_restored(restored: Any) -> None:
    """Report the result of restore(): a keepstep.Restored, or None on a first start."""
    if restored is None:
        tell("restored", step=None, source="", survives="", plan=[])
    else:
        tell(
            "restored", step=restored.step, source=restored.source.value, survives=restored.survives.name,
            plan=list(restored.plan), duration_s=restored.duration_s, bytes=restored.bytes,
        )  # fmt: skip


class Facts:
    """All facts of a directory, read as they are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._facts: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All facts so far, by time."""
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(lines) + len(newline)
            self._facts += [json.loads(line) for line in lines.splitlines()]
        self._facts.sort(key=lambda fact: float(fact["at"]))  # Cheap: the list is nearly sorted.
        return iter(self._facts)
