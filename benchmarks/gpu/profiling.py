"""The copies of a snapshot as the driver saw them: bytes and time of each, over a few steps of training."""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import Any

from cost import Cost
from measuring import run_block
from results import say
from torch.profiler import ProfilerActivity, profile

LARGE_BYTES = 1 << 20
STEPS = 4


def profile_copies(cost: Cost) -> None:
    """Last of all measurements: a profiler slows training, and may not leave when it is asked to."""
    try:
        value = _profile(cost)
    except Exception as error:  # there may be no profiler on this machine: everything else is measured already
        value = {"error": repr(error)}
    cost.put("profile", value=value)
    say(f"{cost.key}: copies by the profiler: {value}")


def _profile(cost: Cost) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run_block(cost.workload, cost.device, STEPS, cost.saving(2))
    cost.saver.settle()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        with open(file.name, encoding="utf-8") as trace:
            return _summarize(json.load(trace)["traceEvents"])


def _summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e.get("name", "")]
    large = [e for e in copies if e["args"].get("bytes", 0) >= LARGE_BYTES]
    if not large:
        return {"copies": len(copies), "large_copies": 0}
    total = sum(e["args"]["bytes"] for e in large)
    return {
        "copies": len(copies),
        "large_copies": len(large),
        "bytes": total,
        "rate_bytes_s": total / (sum(e["dur"] for e in large) / 1e6),
        "median_bytes": statistics.median(e["args"]["bytes"] for e in large),
        "streams": sorted({e["args"].get("stream", -1) for e in large}),
    }
