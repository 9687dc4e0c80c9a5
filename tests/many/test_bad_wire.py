"""Bits that flip between two keepers: what arrives is checked, asked for again, and never believed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from clones import Image, protected_image, rest
from nodes import Run, running
from proxy import BadWire

from keepstep.control.messages import NodeCard
from keepstep.errors import Error

MB = 1_000_000


@contextlib.contextmanager
def bad_wires(run: Run, *, seed: int, flip_every: int) -> Iterator[list[BadWire]]:
    """Every node there is now is reached through one."""
    wires: list[BadWire] = []
    for number, node in enumerate(run.nodes.values()):
        card, keeper = node.card().card, node.keeper
        assert keeper.network is not None
        wires.append(BadWire((card.address, card.port), seed=seed + number, flip_every=flip_every))
        seen = NodeCard(card.node_id, card.instance, card.address, wires[-1].port, card.domain)
        keeper.network.card = keeper.core.card = seen  # before anybody was told of it
    try:
        yield wires
    finally:
        for wire in wires:
            wire.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_lost_node_comes_back_over_a_bad_wire_or_not_at_all(seed: int, place: Path) -> None:
    image = protected_image(place, "abc", losses=1, size_bytes=5 * MB)
    with image.again(["b"]) as run, bad_wires(run, seed=seed, flip_every=3 * MB) as wires:
        run.begin(["a", "b'", "c"])
        for wire in wires:
            wire.begin()
        with contextlib.suppress(Error):  # a clean refusal is fine, a wrong byte is not
            answers = run.restore()
            assert {answer.version for answer in answers} == {image.version}
        check(image, ["b"])


def test_training_over_a_bad_wire_protects_what_can_be_restored(place: Path) -> None:
    with running(place, losses=1, size_bytes=2 * MB) as run:
        run.add("a", "b", "c")
        with bad_wires(run, seed=3, flip_every=8 * MB) as wires:
            run.start(["a", "b", "c"])
            for wire in wires:
                wire.begin()
            run.train_until(lambda: sum(wire.flipped for wire in wires) >= 3, "bits are flipped", 60)
            run.protect()
            version = rest(run)
            image = Image.of(run, version)
    for lost in "abc":
        check(image, [lost])


def check(image: Image, lost: list[str]) -> None:
    """Over a good wire it is all there."""
    with image.again(lost) as run:
        assert {answer.version for answer in run.start(image.places(lost))} == {image.version}
