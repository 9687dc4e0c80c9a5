"""Show 1: whatever nodes are lost, the state comes back if and only if the code says so; else an error says why."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from clones import Image, protected_image, rest
from nodes import running
from patterns import check_all, every_pattern

NAMES = "abcdef"
MB = 1_000_000


@pytest.mark.parametrize(("n", "m"), [(n, m) for n in range(2, 6) for m in range(1, min(3, n - 1) + 1)])
def test_every_loss_pattern_is_restored_if_and_only_if_it_is_covered(n: int, m: int, place: Path) -> None:
    image = protected_image(place, NAMES[:n], losses=m)
    check_all(image, every_pattern(image.order))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_some_loss_patterns_of_six_nodes(m: int, place: Path) -> None:
    image = protected_image(place, NAMES, losses=m)
    patterns = [lost for lost in every_pattern(image.order) if len(lost) in (m, m + 1)]
    check_all(image, random.Random(m).sample(patterns, 8))


@pytest.mark.chaos
@pytest.mark.parametrize("m", [1, 2, 3])
def test_every_loss_pattern_of_six_nodes(m: int, place: Path) -> None:
    image = protected_image(place, NAMES, losses=m)
    check_all(image, every_pattern(image.order))


def test_states_of_many_chunks_come_back(place: Path) -> None:
    """More than one chunk, more than k of them: several rows in every stripe, the last of them ragged."""
    image = protected_image(place, "abcd", losses=1, size_bytes=13 * MB)
    check_all(image, [(), ("a",), ("b",), ("c",), ("d",), ("a", "c")])


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05, 0.1])
def test_what_is_protected_comes_back_from_any_moment_of_the_next_protection(pause_s: float, place: Path) -> None:
    with running(place, losses=1, size_bytes=5 * MB) as run:
        run.add("a", "b", "c")
        run.start(["a", "b", "c"])
        run.protect()
        run.train_until(lambda: run.awaits_a_version, "all have captured the next one")
        covered = run.nodes["a"].keeper.core.orders.active.protected
        assert covered is not None
        time.sleep(pause_s)
        image = Image.of(run, covered)
        newest = rest(run)
    for lost in [(), ("a",), ("c",)]:
        with image.again(lost) as run:
            versions = {answer.version for answer in run.start(image.places(lost))}
            assert len(versions) == 1
            assert versions <= {covered, newest}


def test_two_ranks_per_node_come_back_together(place: Path) -> None:
    image = protected_image(place, "abc", losses=2, local=2)
    check_all(image, every_pattern(image.order))


def test_ranks_with_states_of_very_different_size(place: Path) -> None:
    image = protected_image(place, "abcd", losses=2, size_bytes=100, growth=5 * MB)
    check_all(image, [("a", "b"), ("c", "d"), ("b", "d"), ("d",), ("a",)])


def test_two_groups_are_covered_each_for_itself(place: Path) -> None:
    image = protected_image(place, "abcdef", losses=1, group_size=3)
    groups = groups_of(image)
    assert sorted(map(len, groups)) == [3, 3]
    patterns = [lost for lost in every_pattern(image.order) if 0 < len(lost) <= 3]
    check_all(image, random.Random(0).sample(patterns, 12), groups)


def groups_of(image: Image) -> list[tuple[str, ...]]:
    with image.again() as run:
        run.start(list(image.order))
        orders = [run.nodes[node_id].keeper.core.orders.active.group for node_id in image.order]
        return sorted({order.members for order in orders if order is not None})
