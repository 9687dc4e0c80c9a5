"""One results file for all parts: each with the commit, versions, hardware and command that it came from.

Written whole after each measurement, by the parent or by the one child that runs: a time limit loses nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # report.py serves all benchmarks
from report import provenance, write_result

_began = time.monotonic()


class Results:
    """The section of one part. `put` reads, changes and writes: nobody keeps a copy that could be stale."""

    def __init__(self, path: Path, part: int) -> None:
        self.path, self._part = path, str(part)

    def begin(self, *, commit: str, settings: dict[str, str]) -> None:
        """A part that is run again replaces its section."""
        found = provenance()
        if commit:  # there is no git where this runs, so nothing is known about changes either
            found["commit"] = commit
            del found["uncommitted_changes"]
        found["hardware"]["accelerator"] = _accelerator()
        body = self._read()
        body.setdefault("parts", {})[self._part] = {**found, "settings": settings, "measures": {}}
        write_result(self.path, body)

    def put(self, *keys: str, value: Any) -> None:
        """Set one value of this part: put("measures", "keepstep", "first", value=...)."""
        body = self._read()
        place = body["parts"][self._part]
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        write_result(self.path, body)

    def measure(self, *keys: str, value: Any) -> None:
        self.put("measures", *keys, value=value)

    @property
    def measures(self) -> dict[str, Any]:
        found: dict[str, Any] = self._read()["parts"][self._part]["measures"]
        return found

    def of_part(self, part: int) -> dict[str, Any]:
        """What another part has measured before, empty when it was not run into this file."""
        found: dict[str, Any] = self._read().get("parts", {}).get(str(part), {}).get("measures", {})
        return found

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        body: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return body


def _accelerator() -> str:
    """Name, memory and driver, without loading torch here."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def say(text: str) -> None:
    """A line at once, with the seconds since this process began."""
    print(f"[{time.monotonic() - _began:6.1f}] {text}", flush=True)
