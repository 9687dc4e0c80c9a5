"""Keepers that die and come back while the training goes on, and the coordinator's node lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from clones import protected_image, rest
from nodes import running, wait_for

from keepstep.transport import links

NEVER_S = 1000.0


def test_the_lost_node_was_the_coordinators(place: Path) -> None:
    image = protected_image(place, "abcd", losses=1)
    with image.again(["a"]) as run:
        answers = run.start(["b", "c", "d", "a'"])  # and its rank moves too
        assert {answer.version for answer in answers} == {image.version}
        run.protect()


@pytest.mark.parametrize("same_port", [True, False])
@pytest.mark.parametrize("died", ["a", "b", "c"])
def test_training_goes_on_when_a_keeper_dies_and_comes_back(died: str, same_port: bool, place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        before = run.protect()
        run.revive(died, same_port=same_port)
        assert run.protect() > before
        version = rest(run)
        run.nodes["b"].kill()
        run.add("b'")
        answers = run.start(["a", "b'", "c"])
        assert {answer.version for answer in answers} == {version}


def test_keeper_that_replaces_another_links_to_its_peers_without_giving_way(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers were refused in the meantime: who waits for them to dial waits for the longest of their pauses."""
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        before = run.protect()
        monkeypatch.setattr(links, "GIVE_WAY_S", NEVER_S)
        monkeypatch.setattr(links, "FIRST_RETRY_S", NEVER_S)  # of the peers, after the link is lost
        run.revive("c")  # gives way to all others
        assert run.protect() > before


def test_training_goes_on_when_all_keepers_die_and_come_back(place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        before = run.protect()
        for node_id in "abc":
            run.revive(node_id)
        assert run.protect() > before


def test_a_keeper_that_dies_again_and_again(place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        for number in range(6):
            before = run.protect()
            run.revive("abc"[number % 3])
            run.train(3)
            assert run.protect() > before


def test_what_was_protected_stays_so_when_a_keeper_comes_back_and_a_node_is_lost_at_once(place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c", "d")
        run.start(["a", "b", "c", "d"])
        run.protect()
        version = rest(run)
        run.revive("c")
        wait_for(lambda: run.nodes["c"].keeper.core.protection.sets, "the parity is taken back")
        run.nodes["b"].kill()
        run.add("b'")
        assert {answer.version for answer in run.start(["a", "b'", "c", "d"])} == {version}
