"""Result files of the benchmarks: every number with the commit, versions, hardware and command it came from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("keepstep", "torch", "numpy", "msgspec", "xxhash", "pyeclib", "lm-resiliency", "dlrover")
GIT_TIMEOUT_S = 10


def provenance() -> dict[str, Any]:
    """Where a result comes from. Taken before the run, so that `load` is the load of others."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src", "benchmarks")),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {
            "cpu": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory": _first_value("/proc/meminfo", "MemTotal"),
            "kernel": platform.release(),
        },
        "load": os.getloadavg(),
    }


def write_result(path: Path, body: dict[str, Any]) -> None:
    """Write whole or not at all: a result file that exists is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _first_value(path: str, key: str) -> str:
    with open(path, encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""
