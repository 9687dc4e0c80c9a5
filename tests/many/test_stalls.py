"""Protection is off the training path: a peer that cannot be reached holds back protection, never a snapshot."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest
from clones import Image, rest
from nodes import Run, running

from keepstep.keeper.coordinator.state import Deadlines

SOON = Deadlines(stall_s=1.0, deadline_s=0.5)


def test_snapshots_go_on_while_two_peers_cannot_reach_each_other_and_protection_heals(place: Path) -> None:
    with running(place, losses=1, deadlines=SOON) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        covered = run.protect()
        part(run, "b", "c")
        run.train_until(lambda: run.nodes["a"].keeper.core.orders.active.exposed, "snapshots go on unprotected")
        versions = complete_versions(run, 5)
        assert len(versions) == 5
        status = run.nodes["a"].status()
        assert status.exposed
        assert status.lag_steps is not None
        assert status.lag_steps > 0
        kept = run.nodes["a"].keeper.core.orders.active
        assert kept.protected is not None
        assert kept.protected >= covered, "what is protected is never given up"
        image = Image.of(run, kept.protected)
        part(run, "b", "c", dead=False)
        run.train_until(lambda: not run.nodes["a"].keeper.core.orders.active.exposed, "it heals")
        assert run.protect() > kept.protected
        healed = Image.of(run, rest(run))
    for left in (image, healed):
        with left.again(["c"]) as again:
            assert {answer.version for answer in again.start(left.places(["c"]))} == {left.version}


@pytest.mark.parametrize("away", ["a", "c"])
def test_training_goes_on_while_a_node_is_cut_off_and_it_is_protected_again_afterwards(away: str, place: Path) -> None:
    """Nothing can be complete without it; nothing of what there is may be given up, and no trainer may notice."""
    with running(place, losses=1, deadlines=SOON) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        covered = run.protect()
        cut_off(run, away, 3.0)
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            run.train(1, 0.01)
        version = run.protect()
        assert version > covered
        image = Image.of(run, rest(run))
    with image.again(["b"]) as again:
        assert {answer.version for answer in again.start(image.places(["b"]))} == {image.version}


def part(run: Run, one: str, other: str, *, dead: bool = True) -> None:
    """These two cannot reach each other (any more, or: can again); everybody else can reach both."""
    cards = {node_id: node.card().card for node_id, node in run.nodes.items()}
    with socket.create_server(("127.0.0.1", 0)) as sock:
        nowhere = sock.getsockname()[1]
    for node_id, peer in ((one, other), (other, one)):
        told = run.nodes[node_id].membership
        assert told is not None
        nodes = [cards[card.node_id] for card in told.nodes]
        if dead:
            nodes = [msgspec.structs.replace(c, port=nowhere) if c.node_id == peer else c for c in nodes]
        run.nodes[node_id].told(msgspec.structs.replace(told, nodes=nodes, ticket=0))


def cut_off(run: Run, node_id: str, seconds: float) -> None:
    keeper = run.nodes[node_id].keeper
    assert keeper.network is not None
    keeper.network.cut(seconds)


def complete_versions(run: Run, count: int) -> list[object]:
    """Train until so many more are complete on all ranks."""
    found: list[object] = []

    def more() -> bool:
        complete = {trainer.complete for trainer in run.trainers}
        if len(complete) == 1 and (version := complete.pop()) is not None and version not in found:
            found.append(version)
        return len(found) > count

    run.train_until(more, f"{count} more versions are complete")
    return found[1:]
