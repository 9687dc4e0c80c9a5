"""The command line on a cluster under torchrun, as an operator drills it: nodes with agents, keepers and trainers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.testing.cluster import LocalCluster
from keepstep.testing.node import Node
from keepstep.testing.run import wait_until

SCRIPT = Path(__file__).with_name("cluster_trainer.py")


def cli(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    identity = node.identity
    which = ["--run-id", identity.run_id, "--node-id", node.node_id, "--runtime-dir", str(identity.runtime_dir)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*arguments, *which])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_an_operator_freezes_cuts_plans_and_kills_a_node_and_the_plan_comes_true() -> None:
    with LocalCluster(nodes=3, script=SCRIPT, arguments=["100000", "0.1"]) as cluster:
        cluster.train(until=10)
        wait_until(lambda: cli(cluster.node(0), "status").returncode == 0, timeout_s=60, what="protection")
        assert cli(cluster.node(0), "status").stdout.startswith("A dead node now costs")

        for drill in ("freeze-peer", "cut-link"):
            done = cli(cluster.node(1), "drill", drill, "--yes", "--seconds", "4")
            assert done.returncode == 0, done.stdout + done.stderr
            assert re.search(r"lag before the outage \d+, after it \d+", done.stdout)
            assert "healed" in done.stdout
        assert cluster.incarnation == 1, "an outage between keepers never restarts the job"

        refused = cli(cluster.node(1), "plan", "--lost", "node2")
        assert "the keeper of node 'node0' coordinates this run" in refused.stderr
        plan: dict[str, Any] = json.loads(cli(cluster.node(0), "plan", "--lost", "node1", "--json").stdout)
        assert [(piece["node_id"], piece["source"]) for piece in plan["pieces"]] == [
            ("node0", "own slots"), ("node1", "parity"), ("node2", "own slots"),
        ]  # fmt: skip
        assert cli(cluster.node(0), "plan", "--lost", "node1", "--lost", "node2").returncode == 3

        processes = cluster.node(1).processes()
        done = cli(cluster.node(1), "drill", "kill-node", "--yes")
        assert done.returncode == 0, done.stderr
        assert f"killed all {len(processes)} processes of node node1" in done.stdout
        assert cluster.node(1).processes() == []
        cluster.node(1).kill()  # so that the cluster knows
        cluster.replace(1)
        restored = cluster.restored
        assert restored.source == "parity"
        assert restored.step is not None
        assert restored.step >= plan["step"]
