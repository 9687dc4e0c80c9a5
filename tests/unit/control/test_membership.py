"""Who is in an incarnation and in which order: the pure rules."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.control.membership import (
    NodeClaim,
    agree,
    assign_ranks,
    check_losses,
    membership,
    newest_members,
    with_own_card,
)
from keepstep.control.messages import NodeCard
from keepstep.errors import ConfigError


def card(node_id: str, instance: str = "1") -> NodeCard:
    return NodeCard(node_id, instance, f"10.0.0.{ord(node_id[0])}", 7000)


def known(node_id: str, number: int = 0, **more: object) -> NodeClaim:
    return NodeClaim(card(node_id), number, **more)  # type: ignore[arg-type]


def test_a_first_start_orders_nodes_by_name_as_people_count() -> None:
    assert assign_ranks(["n10", "n2", "n1"], []) == ["n1", "n2", "n10"]
    assert assign_ranks(["b", "10", "a1", "a"], []) == ["a", "a1", "b", "10"]


def test_survivors_keep_their_ranks_and_newcomers_fill_free_ones() -> None:
    assert assign_ranks(["z", "a", "d", "b"], ["b", "c", "a", "d"]) == ["b", "z", "a", "d"]
    assert assign_ranks(["x", "w", "d", "a"], ["a", "b", "c", "d"]) == ["a", "w", "x", "d"]


def test_another_number_of_nodes_keeps_the_order_of_survivors() -> None:
    assert assign_ranks(["a", "c", "d"], ["d", "b", "c", "a"]) == ["d", "c", "a"]
    assert assign_ranks(["f", "a", "b", "e"], ["b", "a"]) == ["b", "a", "e", "f"]


def test_every_node_has_exactly_one_rank() -> None:
    for last in (["a", "b", "c"], ["c", "x", "y", "b"], []):
        for present in (["a", "b", "c"], ["p", "q"], ["c", "b", "q", "r", "s"]):
            assert sorted(assign_ranks(present, last)) == sorted(present)


def test_the_number_is_one_more_than_any_keeper_knows() -> None:
    agreed = agree([known("a", 3), known("b", 7), known("c", 0)], [], nonce=5, secret=b"s")
    assert (agreed.incarnation.number, agreed.incarnation.nonce) == (8, 5)
    assert agree([known("a", 3)], [], nonce=5, secret=b"s", known_number=9).incarnation.number == 10


def test_members_without_a_place_are_named_as_former() -> None:
    agreed = agree([known("a"), known("z")], [card("a"), card("b"), card("c")], nonce=1, secret=b"s")
    assert [node.node_id for node in agreed.nodes] == ["a", "z"]
    assert [node.node_id for node in agreed.former] == ["b", "c"]


def test_a_node_that_came_back_with_an_empty_keeper_is_not_former() -> None:
    agreed = agree([NodeClaim(card("a", "2"), 0)], [card("a", "1")], nonce=1, secret=b"s")
    assert agreed.former == []
    assert agreed.nodes[0].instance == "2"


def test_a_secret_in_a_file_does_not_travel() -> None:
    both = [known("a", has_secret=True), known("b", has_secret=True)]
    agreed = agree(both, [], nonce=1, secret=b"drawn")
    assert agreed.secret == b""
    assert membership(agreed, 1, b"from a file").secret == b"from a file"
    assert membership(agree([known("a"), known("b")], [], nonce=1, secret=b"drawn"), 0, b"").secret == b"drawn"


def test_another_secret_in_the_store_does_not_replace_that_of_the_file() -> None:
    agreed = agree([known("a", has_secret=True), known("b", has_secret=True)], [], nonce=1, secret=b"drawn")
    forged = msgspec.structs.replace(agreed, secret=b"of a stranger")
    with pytest.raises(ConfigError, match="another secret than secret_file"):
        membership(forged, 0, b"from a file")


def test_a_secret_file_on_some_nodes_only_is_refused_by_name() -> None:
    agreed = agree([known("a", has_secret=True), known("b")], [], nonce=1, secret=b"drawn")
    assert "not on b" in agreed.refusal


def test_the_newest_list_of_members_counts() -> None:
    brought = {"x": known("a", members_number=2), "y": known("b", members_number=4), "z": known("c")}
    assert newest_members(brought) == "y"
    assert newest_members({"z": known("c")}) == ""
    assert newest_members({}) == ""


def test_a_replacement_keeper_gets_its_own_new_address() -> None:
    told = membership(agree([known("a"), known("b")], [], nonce=1, secret=b"s"), 1, b"")
    again = with_own_card(told, card("b", "2"))
    assert [node.instance for node in again.nodes] == ["1", "2"]
    assert again.incarnation == told.incarnation


def test_too_many_losses_are_refused_with_the_largest_possible_value() -> None:
    check_losses(4, 1)
    check_losses(1, 2)
    with pytest.raises(ConfigError, match="the largest possible value is 2"):
        check_losses(3, 3)
