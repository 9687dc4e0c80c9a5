"""benchmarks/gpu/run.py at toy size, on the CPU: every part runs, and its results file has what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.testing.run import marked_processes

pytestmark = pytest.mark.computing

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "run.py"
PART_S = 500.0
"""a part takes ten seconds on two idle cores; most of that is loading torch, once for each of its processes

It ends by itself after eight minutes, its own time box.
"""


def run_part(part: int, out: Path) -> dict[str, Any]:
    """The section of this part, after a run that ended well and left no process behind."""
    mark = f"GPU_BENCHMARK_TEST={os.getpid()}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    name, _, value = mark.partition("=")
    command = [sys.executable, str(SCRIPT), "--part", str(part), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        command, env={**environ, name: value}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=PART_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"Targets of part {part}" in done.stdout
    assert marked_processes(mark.encode()) == []
    section: dict[str, Any] = json.loads(out.read_text())["parts"][str(part)]
    assert section.keys() >= {"commit", "versions", "hardware", "command", "settings", "measures", "targets"}
    assert all(target.keys() == {"target", "limit", "measured", "outcome"} for target in section["targets"])
    return section


def check_cost(found: dict[str, Any], *cadences: int) -> None:
    """What is measured of every workload with a Snapshotter."""
    assert found.keys() >= {"workload", "device", "before", "open", "first", "cadences", "quiet", "memory"}
    assert list(found["cadences"]) == [str(every) for every in cadences]
    for one in found["cadences"].values():
        assert 0 < one["complete"] <= one["taken"] <= one["requested"]
        assert one["complete"] == one["requested"] or one["not_complete"]
        assert one["lost_s"] is not None
        assert one["step_alone_s"] > 0
        assert {"median_s", "p99_s", "max_s"} <= one["steps_with"].keys() & one["steps_alone"].keys()
        assert one["held"]["count"] == one["take"]["count"] == one["taken"]
    assert found["first"]["held_s"] > 0
    assert found["memory"]["arena_bytes"] > found["workload"]["state_bytes"] // 7
    assert found["memory"]["slot_bytes"] > 0


@pytest.mark.timeout(PART_S + 20)
def test_cost_of_snapshots_is_measured_beside_the_limit_and_other_ways(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    out.write_text(json.dumps({"parts": {"9": {"measures": {}}}}))
    section = run_part(1, out)
    measures = section["measures"]
    check_cost(measures["keepstep"], 2, 1, 10)
    assert measures["keepstep"]["limit"]["best_bytes_s"] > 0
    assert "lost_s" in measures["keepstep"]["floor"]
    assert {"copy-and-wait", "dcp-thread"} <= measures["contenders"].keys()
    for one in measures["contenders"].values():
        assert one["snapshots"]["0"].keys() >= {"lost_s", "call_s", "until_done_s"}
    assert len(section["targets"]) == 10
    assert list(measures["every-step"]["cadences"]) == ["1"]
    assert measures["every-step"]["memory"]["slots"] == 4
    assert measures["keepstep"]["crowd"]["rounds_s"][1] > 0
    assert measures["keepstep"]["cadences"]["2"]["timeline"]["snapshots"] > 0
    assert measures["keepstep"]["cadences"]["2"]["stages"]["capture.begin"] > 0
    assert "9" in json.loads(out.read_text())["parts"], "parts that were there before are kept"


@pytest.mark.timeout(PART_S + 20)
def test_large_model_and_many_small_tensors_are_measured(tmp_path: Path) -> None:
    section = run_part(2, tmp_path / "results.json")
    check_cost(section["measures"]["large"], 5)
    check_cost(section["measures"]["small"], 1)
    assert section["measures"]["small"]["state_dict_s"] > 0
    assert section["measures"]["large"]["batch"] > 0


@pytest.mark.timeout(PART_S + 20)
def test_killed_trainers_are_restored_exactly_and_the_restore_is_timed(tmp_path: Path) -> None:
    section = run_part(3, tmp_path / "results.json")
    summary = section["measures"]["kills"]["summary"]
    assert summary["kills"] == summary["restored"] == summary["exact"] == 1
    assert summary["problems"] == []
    restore = section["measures"]["restore"]
    assert restore["problem"] == ""
    assert restore.keys() >= {"state_s", "returned_s", "limit_s", "restored", "log"}
    exact, fast = section["targets"]
    assert (exact["target"], exact["outcome"]) == ("newest committed restored, bit for bit", "met")
    assert fast["outcome"] in ("met", "missed"), "how fast depends on the machine and on what else it does"


@pytest.mark.timeout(PART_S + 20)
def test_shares_are_measured_and_poisoned_snapshots_never_mix_steps(tmp_path: Path) -> None:
    section = run_part(4, tmp_path / "results.json")
    measures = section["measures"]
    check_cost(measures["share"], 1)
    (poisoned,) = measures["poison"].values()
    assert poisoned["checked"] >= 6
    assert poisoned["num_mixed"] == poisoned["num_void"] == 0
    assert poisoned["complete"] >= poisoned["checked"]
    assert "parity" in measures


def test_the_capture_test_for_devices_runs_here_too() -> None:
    """So that it is not out of date when it reaches a device."""
    script = SCRIPT.parents[2] / "tests" / "gpu" / "test_shared_capture.py"
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed") == 4
