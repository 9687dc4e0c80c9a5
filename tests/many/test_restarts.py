"""Jobs that begin again: on other places, with a node that holds something old, and when the newest is not covered."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from clones import Image, protected_image, rest
from nodes import Node, running
from patterns import errors_of

from keepstep.errors import KeeperError

MB = 1_000_000


@pytest.mark.parametrize("order", ["bca", "cba", "acb"])
def test_permuted_ranks_get_their_own_state_and_are_protected_again(order: str, place: Path) -> None:
    image = protected_image(place, "abc", losses=1)
    with image.again() as run:
        answers = run.start(list(order))
        assert {answer.version for answer in answers} == {image.version}
        assert {answer.source for answer in answers} == {"memory"}
        run.protect()
        version = rest(run)
        run.nodes[order[1]].kill()
        run.add("x")
        answers = run.start([order[0], "x", order[2]])
        assert [answer.source for answer in answers] == ["memory", "parity", "memory"]
        assert {answer.version for answer in answers} == {version}


def test_ranks_may_be_permuted_and_a_node_lost_at_once(place: Path) -> None:
    """The node that rebuilds a rank holds pieces of it itself."""
    image = protected_image(place, "abcd", losses=2)
    with image.again(["b"]) as run:
        answers = run.start(["c", "a", "d", "b'"])
        assert {answer.version for answer in answers} == {image.version}
        assert [answer.source for answer in answers] == ["memory", "parity", "memory", "memory"]
        run.protect()


def test_a_restored_version_is_covered_until_the_first_new_one_is(place: Path) -> None:
    """The old placement stays in place as base: a second node may go right after the first one came back."""
    image = protected_image(place, "abcd", losses=1)
    with image.again(["a"]) as run:
        run.start(["a'", "b", "c", "d"])
        version = rest(run)
        assert version == image.version
        again = Image.of(run, version)
    with again.again(["c"]) as run:
        assert {answer.version for answer in run.start(again.places(["c"]))} == {version}


def test_a_node_with_the_memory_of_an_older_incarnation_is_no_harm(place: Path) -> None:
    image = protected_image(place, "abc", losses=1)
    with image.again(["b"]) as run:
        run.start(image.places(["b"]))
        run.protect()
        version = rest(run)
        assert version.incarnation.number == 2
        newer = Image.of(run, version)
    stale = {**newer.memory, "b": image.memory["b"]}
    old = Image(newer.run, ("a", "b", "c"), version, stale)
    with old.again() as run:
        answers = run.start(["a", "b", "c"])
        assert {answer.version for answer in answers} == {version}
        assert [answer.source for answer in answers] == ["memory", "parity", "memory"]
        run.protect()
        run.protect()
        assert len(run.nodes["b"].memory.names()) <= 3, "what is older than everything that is kept goes"


def test_a_node_that_comes_back_empty_under_its_old_name(place: Path) -> None:
    with running(place, losses=1) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        run.protect()
        version = rest(run)
        before = run.nodes["b"].card().card
        run.nodes["b"].kill()
        run.nodes["b"] = Node(run, "b")
        run.nodes["b"].hello()
        assert run.nodes["b"].card().card.instance != before.instance
        answers = run.start(["a", "b", "c"])
        assert {answer.version for answer in answers} == {version}
        assert [answer.source for answer in answers] == ["memory", "parity", "memory"]
        run.protect()


def test_the_next_older_version_when_the_newest_is_not_covered_yet(place: Path) -> None:
    settings = {"losses": 1, "size_bytes": 4 * MB, "peers": {"rate_bytes_s": 4 * MB}}
    with running(place, **settings) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        covered = run.protect()
        run.train_until(
            lambda: all(t.complete is not None and t.complete > covered for t in run.trainers),
            "a newer one is complete",
        )
        newest = run.trainers[0].complete
        assert newest is not None
        assert all(node.keeper.core.orders.active.protected == covered for node in run.nodes.values())
        image = Image.of(run, newest)
        image.run.peers.pop("rate_bytes_s")
    with image.again() as run:
        assert {answer.version for answer in run.start(image.places([]))} == {newest}
    with image.again(["b"]) as run:
        answers = run.start(image.places(["b"]))
        assert {answer.version for answer in answers} == {covered}
        assert any(str(newest) in reason and "cannot be had" in reason for reason in answers[0].plan)
    with image.again(["b"]) as run:  # and the next loss, right after
        run.start(image.places(["b"]))
        run.protect()


def test_a_newcomer_without_room_is_an_error_on_every_rank_and_not_a_wait(place: Path) -> None:
    image = protected_image(place, "abc", losses=1)
    with image.again(["b"]) as run:
        run.nodes["b'"].keeper.executor.allocator.create_for_fetch = no_room  # type: ignore[method-assign]
        run.begin(image.places(["b"]))
        errors = errors_of(run)
        assert len(errors) == 3
        assert all("1 GiB is needed and 1 MiB is free" in str(error) for error in errors)
    with image.again(["b"]) as run:
        assert {answer.version for answer in run.start(image.places(["b"]))} == {image.version}


def no_room(effect: object, manifest: object) -> NoReturn:
    raise KeeperError("1 GiB is needed and 1 MiB is free")
