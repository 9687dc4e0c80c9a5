"""What a keeper publishes about protection."""

from __future__ import annotations

from pathlib import Path

from nodes import running


def test_the_shortest_time_between_protected_versions_is_published(place: Path) -> None:
    with running(place, losses=1, size_bytes=100_000) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        assert run.nodes["b"].status().min_node_period_s is None  # nothing was measured yet
        version = run.protect()
        for node in run.nodes.values():
            status = node.status()
            assert status.min_node_period_s is not None
            assert 0 < status.min_node_period_s < 20
            assert status.protected_step is not None
            assert status.protected_step >= version.step
